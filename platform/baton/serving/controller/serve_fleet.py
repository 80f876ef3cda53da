"""What the scaling loop sees of Ray Serve, does to it, and keeps in the cluster's store."""

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
"""Answers come within milliseconds; who takes this long is counted as silent for this turn."""
_ACTION_TIMEOUT_S = 5.0
_OVERRIDES_KEY = "scaling-overrides"
_OWNER_KEY = "scaling-owner"
_Overrides = Mapping[str, Override]
"""By pool."""


class ServeFleet:
    """A `ScaledFleet` on Ray Serve."""

    def __init__(self, app: str, pools: Sequence[str]) -> None:
        self._app = app
        self._pools = tuple(pools)
        self._refs: tuple[object, ...] = ()

    async def states(self) -> Mapping[str, DeploymentState]:
        """Every pool that Serve knows."""
        return await serve_control.deployment_states(
            self._app, self._pools, timeout_s=_QUERY_TIMEOUT_S
        )

    async def reports(self) -> Reports:
        """What ingresses report, and for each that does not, why."""
        answers = await serve_control.call_all(
            self._app, INGRESS, "report", timeout_s=_QUERY_TIMEOUT_S
        )
        self._refs = answers.refs  # until the next round
        reports = [report for value in answers.values for report in unpack_reports(value)]
        return tuple(reports), answers.failures

    async def scale(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool."""
        await serve_control.scale_async(
            self._app, pool, replicas=replicas, timeout_s=_ACTION_TIMEOUT_S
        )

    async def ingress_usage(self) -> tuple[tuple[IngressUsage, ...], int]:
        """What each ingress has used, and how many did not say."""
        answers = await serve_control.call_all(
            self._app, INGRESS, "resource_usage", timeout_s=_QUERY_TIMEOUT_S
        )
        usages = tuple(IngressUsage(*value) for value in answers.values if isinstance(value, tuple))
        return usages, len(answers.failures) + len(answers.values) - len(usages)

    async def ingress_target(self) -> int | None:
        """How many there are to be; None where Serve does not say."""
        states = await serve_control.deployment_states(
            self._app, (INGRESS,), timeout_s=_QUERY_TIMEOUT_S
        )
        return states[INGRESS].target if INGRESS in states else None

    async def scale_ingresses(self, replicas: int) -> None:
        """Have exactly so many ingresses."""
        await self.scale(INGRESS, replicas)

    async def restart_serve_controller(self) -> None:
        """Have Serve's controller started again."""
        await serve_control.restart_serve_controller(timeout_s=_ACTION_TIMEOUT_S)

    async def set_role(self, pool: str, replica_ids: Sequence[str], role: Role) -> None:
        """Have these replicas play a role.

        Raises:
            RoleUnsupported: not all of them do.
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
            why = answers.failures[0] if answers.failures else "it is not there"
            raise RoleUnsupported(f"{', '.join(unresponsive)} cannot be {role} now: {why}", "wait")

    async def send_cold_starts(self, starts: ColdStartsByModel) -> int:
        """Tell ingresses how long first replicas take; returns how many have taken it."""
        rows = {model: tuple(start) for model, start in starts.items()}
        answers = await serve_control.call_all(
            self._app, INGRESS, "record_cold_starts", rows, timeout_s=_QUERY_TIMEOUT_S
        )
        return 0 if answers.failures else len(answers.values)

    async def send_quota_shares(self, shares: Shares, *, at_most: bool) -> frozenset[str]:
        """Tell ingresses their shares of tenants' limits; returns who has taken theirs.

        With `at_most`, who has less keeps that.
        """
        answers = await serve_control.call_all(
            self._app, INGRESS, "apply_quotas", shares, at_most, timeout_s=_QUERY_TIMEOUT_S
        )
        given: Iterable[object] = answers.values
        accepted = (item if isinstance(item, tuple) else (item,) for item in given)
        return frozenset(
            accepted_id
            for several in accepted
            for accepted_id in several
            if isinstance(accepted_id, str)
        )


class KeyValueStore(Protocol):
    """A small store that outlives every actor; calls block."""

    def load(self, name: str) -> bytes | None:
        """What was saved last under a name; None for nothing."""
        ...

    def save(self, name: str, data: bytes) -> None:
        """Keep it."""
        ...


class ClusterControllerStore:
    """A `Memory` in a store."""

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
        """Be the one who acts; whether another was before."""
        previous_owner = await self._load(_OWNER_KEY)
        await self._save(_OWNER_KEY, self._owner)
        return previous_owner not in {None, self._owner}

    async def is_owner(self) -> bool:
        """Whether nobody else has claimed it since; claims it again where that was forgotten."""
        owner = await self._load(_OWNER_KEY)
        if owner is None:
            await self.claim()
        return owner in {None, self._owner}

    async def load(self) -> dict[str, Override]:
        """Overrides by pool, also those that have run out; none where they cannot be read."""
        data = await self._load(_OVERRIDES_KEY)
        try:
            return decode_overrides(data, now_s=self._clock.now_s(), wall_s=self._wall_now_s())
        except ValueError as error:
            # Nothing that is tried again would help, and pools have to be scaled all the same.
            log_event(_LOGGER, logging.ERROR, "overrides_lost", {"why": str(error)})
            return {}

    async def save(self, overrides: Mapping[str, Override]) -> None:
        """Keep overrides."""
        data = encode_overrides(overrides, now_s=self._clock.now_s(), wall_s=self._wall_now_s())
        await self._save(_OVERRIDES_KEY, data)

    async def _load(self, name: str) -> bytes | None:
        async with asyncio.timeout(_QUERY_TIMEOUT_S):
            return await asyncio.to_thread(self._store.load, name)

    async def _save(self, name: str, data: bytes) -> None:
        async with asyncio.timeout(_QUERY_TIMEOUT_S):
            await asyncio.to_thread(self._store.save, name, data)


def encode_overrides(overrides: _Overrides, *, now_s: float, wall_s: float) -> bytes:
    """As bytes that another process can read: their ends are in seconds since 1970.

    A monotonic clock means nothing to another process. A wall clock that jumps in between shortens
    or lengthens an override; a running controller never looks at it.
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
    """What `encode_overrides` has written, also what has run out meanwhile; nothing for no bytes.

    Raises:
        ValueError: it was not written by `encode_overrides`.
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
