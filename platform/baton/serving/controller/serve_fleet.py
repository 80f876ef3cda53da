"""The scaling loop's access to Ray Serve and to the cluster's store."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from baton.control.autoscaling.autoscaler import Override
from baton.domain.errors import RoleUnsupported
from baton.domain.fleet import Role
from baton.runtime.ports import Clock
from baton.serving.controller.cold_start_notices import ColdStartsByModel
from baton.serving.controller.ingress_scaler import IngressUsage
from baton.serving.controller.quota_allocator import Shares
from baton.serving.ray import serve_control
from baton.serving.ray.packing import unpack_reports
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.ports import Reports
from baton.serving.shared.names import INGRESS
from baton.serving.store.config_store import unix_time_s
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_QUERY_TIMEOUT_S = 2.0
"""Answers take milliseconds; after this time a process counts as unresponsive for this tick."""
_ACTION_TIMEOUT_S = 5.0
_OVERRIDES_KEY = "scaling-overrides"
_OWNER_KEY = "scaling-owner"
_Overrides = Mapping[str, Override]


class ServeFleet:
    """A `ScaledFleet` on Ray Serve."""

    def __init__(self, app: str, pools: Sequence[str]) -> None:
        self._app = app
        self._pools = tuple(pools)
        self._refs: tuple[object, ...] = ()

    async def states(self) -> Mapping[str, DeploymentState]:
        """The state of every pool that Serve knows."""
        return await serve_control.deployment_states(
            self._app, self._pools, timeout_s=_QUERY_TIMEOUT_S
        )

    async def reports(self) -> Reports:
        """The ingresses' reports, and a reason for each that is missing."""
        answers = await serve_control.call_all(
            self._app, INGRESS, "report", timeout_s=_QUERY_TIMEOUT_S
        )
        self._refs = answers.refs  # until the next round
        reports = [report for value in answers.values for report in unpack_reports(value)]
        return tuple(reports), answers.failures

    async def scale(self, pool: str, replicas: int) -> None:
        """Set the desired replicas of a pool."""
        await serve_control.scale(self._app, pool, replicas=replicas, timeout_s=_ACTION_TIMEOUT_S)

    async def ingress_usage(self) -> tuple[tuple[IngressUsage, ...], int]:
        """The usage of each ingress, and how many did not answer."""
        answers = await serve_control.call_all(
            self._app, INGRESS, "resource_usage", timeout_s=_QUERY_TIMEOUT_S
        )
        usages = tuple(IngressUsage(*value) for value in answers.values if isinstance(value, tuple))
        return usages, len(answers.failures) + len(answers.values) - len(usages)

    async def ingress_target(self) -> int | None:
        """The desired ingresses; None if Serve does not answer."""
        states = await serve_control.deployment_states(
            self._app, (INGRESS,), timeout_s=_QUERY_TIMEOUT_S
        )
        return states[INGRESS].target if INGRESS in states else None

    async def scale_ingresses(self, replicas: int) -> None:
        """Set the desired ingresses."""
        await self.scale(INGRESS, replicas)

    async def restart_serve_controller(self) -> None:
        """Restart Serve's controller."""
        await serve_control.restart_serve_controller(timeout_s=_ACTION_TIMEOUT_S)

    async def set_role(self, pool: str, replica_ids: Sequence[str], role: Role) -> None:
        """Switch replicas to a role.

        Raises:
            RoleUnsupported: at least one replica has not switched.
        """
        answers = await serve_control.call_all(
            self._app,
            pool,
            "set_role_if_listed",
            tuple(replica_ids),
            str(role),
            timeout_s=_ACTION_TIMEOUT_S,
        )
        switched = {value["replica_id"] for value in answers.values if isinstance(value, dict)}
        if unresponsive := sorted(set(replica_ids) - switched):
            reason = answers.failures[0] if answers.failures else "it is not there"
            raise RoleUnsupported(
                f"{', '.join(unresponsive)} cannot be {role} now: {reason}", "wait"
            )

    async def send_cold_starts(self, starts: ColdStartsByModel) -> int:
        """Tell ingresses the cold starts; returns how many accepted, 0 after a failure."""
        rows = {model: tuple(start) for model, start in starts.items()}
        answers = await serve_control.call_all(
            self._app, INGRESS, "record_cold_starts", rows, timeout_s=_QUERY_TIMEOUT_S
        )
        return 0 if answers.failures else len(answers.values)

    async def send_quota_shares(self, shares: Shares, *, at_most: bool) -> frozenset[str]:
        """Tell ingresses their shares; see `SendShares`."""
        answers = await serve_control.call_all(
            self._app, INGRESS, "apply_quotas", shares, at_most, timeout_s=_QUERY_TIMEOUT_S
        )
        values: Iterable[object] = answers.values
        accepted = (value if isinstance(value, tuple) else (value,) for value in values)
        return frozenset(
            coordinator_id
            for coordinator_ids in accepted
            for coordinator_id in coordinator_ids
            if isinstance(coordinator_id, str)
        )


class KeyValueStore(Protocol):
    """A small store that outlives every actor; calls block."""

    def load(self, name: str) -> bytes | None:
        """The bytes saved last under a name; None without."""
        ...

    def save(self, name: str, data: bytes) -> None:
        """Save bytes under a name."""
        ...


class ClusterControllerStore:
    """A `ControllerStore` in the cluster's store."""

    def __init__(
        self,
        store: KeyValueStore,
        *,
        owner: str,
        clock: Clock,
        wall_now_s: Callable[[], float] = unix_time_s,
    ) -> None:
        self._store = store
        self._owner = owner.encode()
        self._clock = clock
        self._wall_now_s = wall_now_s

    async def claim(self) -> bool:
        """Become the owner; returns whether another controller was."""
        previous_owner = await self._load(_OWNER_KEY)
        await self._save(_OWNER_KEY, self._owner)
        return previous_owner not in {None, self._owner}

    async def is_owner(self) -> bool:
        """Whether no other controller has claimed it; claims it if the store lost the owner."""
        owner = await self._load(_OWNER_KEY)
        if owner is None:
            await self.claim()
        return owner in {None, self._owner}

    async def load(self) -> dict[str, Override]:
        """Overrides by pool, even if expired; none if they cannot be read."""
        data = await self._load(_OVERRIDES_KEY)
        try:
            return decode_overrides(data, now_s=self._clock.now_s(), wall_s=self._wall_now_s())
        except ValueError as error:
            # A retry would not help, and the pools still need scaling.
            log_event(_LOGGER, logging.ERROR, "overrides_lost", {"reason": str(error)})
            return {}

    async def save(self, overrides: Mapping[str, Override]) -> None:
        """Save overrides."""
        data = encode_overrides(overrides, now_s=self._clock.now_s(), wall_s=self._wall_now_s())
        await self._save(_OVERRIDES_KEY, data)

    async def _load(self, name: str) -> bytes | None:
        async with asyncio.timeout(_QUERY_TIMEOUT_S):
            return await asyncio.to_thread(self._store.load, name)

    async def _save(self, name: str, data: bytes) -> None:
        async with asyncio.timeout(_QUERY_TIMEOUT_S):
            await asyncio.to_thread(self._store.save, name, data)


def encode_overrides(overrides: _Overrides, *, now_s: float, wall_s: float) -> bytes:
    """Overrides as JSON; their ends are in seconds since 1970.

    A monotonic clock means nothing to another process. A step of the wall clock between two
    controllers shortens or lengthens an override.
    """
    rows = {
        pool: {
            "replicas": override.replicas,
            "until": None if override.until_s is None else wall_s + override.until_s - now_s,
        }
        for pool, override in sorted(overrides.items())
    }
    return json.dumps(rows).encode()


def decode_overrides(data: bytes | None, *, now_s: float, wall_s: float) -> dict[str, Override]:
    """The overrides of `encode_overrides`, even if expired; none for None.

    Raises:
        ValueError: the bytes are invalid.
    """
    if data is None:
        return {}
    try:
        rows = json.loads(data)
        return {
            str(pool): Override(
                replicas=int(row["replicas"]),
                until_s=None if row["until"] is None else now_s + float(row["until"]) - wall_s,
            )
            for pool, row in rows.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"scaling overrides cannot be read: {data[:200]!r}") from error
