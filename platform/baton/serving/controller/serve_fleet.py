"""What the scaling loop sees of Ray Serve, does to it, and keeps in the cluster's store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from baton.control.autoscaling.autoscaler import Override
from baton.domain.errors import RoleNotPossible
from baton.domain.fleet import Role
from baton.runtime.ports import Clock
from baton.serving.controller import overrides as kept
from baton.serving.controller.cold_start_notices import Starts
from baton.serving.controller.ingress_scaler import Used
from baton.serving.controller.quota_allocator import Shares
from baton.serving.ray import serve_control
from baton.serving.ray.packing import unpacked_reports
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.ports import Reports
from baton.serving.shared.names import INGRESS
from baton.serving.store.config_store import wall_s
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_ASK_S = 2.0
"""Answers come within milliseconds; who takes this long is counted as silent for this turn."""
_ACT_S = 5.0
_OVERRIDES = "scaling-overrides"
_OWNER = "scaling-owner"


class ServeFleet:
    """A `ScaledFleet` on Ray Serve."""

    def __init__(self, app: str, pools: Sequence[str]) -> None:
        self._app = app
        self._pools = tuple(pools)
        self._refs: tuple[object, ...] = ()

    async def states(self) -> Mapping[str, DeploymentState]:
        """Every pool that Serve knows."""
        return await serve_control.deployment_states(self._app, self._pools, timeout_s=_ASK_S)

    async def reports(self) -> Reports:
        """What ingresses report, and for each that does not, why."""
        answers = await serve_control.call_all(self._app, INGRESS, "report", timeout_s=_ASK_S)
        self._refs = answers.refs  # until the next round
        reports = [report for one in answers.given for report in unpacked_reports(one)]
        return tuple(reports), answers.missing

    async def scale(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool."""
        await serve_control.scale_soon(self._app, pool, replicas=replicas, timeout_s=_ACT_S)

    async def ingresses_used(self) -> tuple[tuple[Used, ...], int]:
        """What each ingress has used, and how many did not say."""
        answers = await serve_control.call_all(self._app, INGRESS, "used", timeout_s=_ASK_S)
        told = tuple(Used(*one) for one in answers.given if isinstance(one, tuple))
        return told, len(answers.missing) + len(answers.given) - len(told)

    async def ingresses(self) -> int | None:
        """How many there are to be; None where Serve does not say."""
        states = await serve_control.deployment_states(self._app, (INGRESS,), timeout_s=_ASK_S)
        return states[INGRESS].target if INGRESS in states else None

    async def scale_ingresses(self, replicas: int) -> None:
        """Have exactly so many ingresses."""
        await self.scale(INGRESS, replicas)

    async def begin_anew(self) -> None:
        """Have Serve's controller started again."""
        await serve_control.begin_anew(timeout_s=_ACT_S)

    async def set_role(self, pool: str, replica_ids: Sequence[str], role: Role) -> None:
        """Have these replicas play a role.

        Raises:
            RoleNotPossible: not all of them do.
        """
        answers = await serve_control.call_all(
            self._app, pool, "play", tuple(replica_ids), str(role), timeout_s=_ACT_S
        )
        played = {one["replica_id"] for one in answers.given if isinstance(one, dict)}
        if silent := sorted(set(replica_ids) - played):
            why = answers.missing[0] if answers.missing else "it is not there"
            raise RoleNotPossible(f"{', '.join(silent)} cannot be {role} now: {why}", "wait")

    async def tell_starts(self, starts: Starts) -> int:
        """Tell ingresses how long first replicas take; returns how many have taken it."""
        plain = {model: tuple(one) for model, one in starts.items()}
        answers = await serve_control.call_all(
            self._app, INGRESS, "take_starts", plain, timeout_s=_ASK_S
        )
        return 0 if answers.missing else len(answers.given)

    async def share_quotas(self, shares: Shares, *, at_most: bool) -> frozenset[str]:
        """Tell ingresses their shares of tenants' limits; returns who has taken theirs.

        With `at_most`, who has less keeps that.
        """
        answers = await serve_control.call_all(
            self._app, INGRESS, "take_quotas", shares, at_most, timeout_s=_ASK_S
        )
        given: Iterable[object] = answers.given
        taken = (one if isinstance(one, tuple) else (one,) for one in given)
        return frozenset(one for several in taken for one in several if isinstance(one, str))


class KeyValues(Protocol):
    """A small store that outlives every actor; calls block."""

    def load(self, name: str) -> bytes | None:
        """What was saved last under a name; None for nothing."""
        ...

    def save(self, name: str, data: bytes) -> None:
        """Keep it."""
        ...


class StoredMemory:
    """A `Memory` in a store."""

    def __init__(
        self,
        store: KeyValues,
        *,
        owner: str,
        clock: Clock,
        wall: Callable[[], float] = wall_s,
    ) -> None:
        self._store = store
        self._owner = owner.encode()
        self._clock = clock
        self._wall = wall

    async def claim(self) -> bool:
        """Be the one who acts; whether another was before."""
        before = await self._load(_OWNER)
        await self._save(_OWNER, self._owner)
        return before not in {None, self._owner}

    async def is_ours(self) -> bool:
        """Whether nobody else has claimed it since; claims it again where that was forgotten."""
        owner = await self._load(_OWNER)
        if owner is None:
            await self.claim()
        return owner in {None, self._owner}

    async def load(self) -> dict[str, Override]:
        """Overrides by pool, also those that have run out; none where they cannot be read."""
        data = await self._load(_OVERRIDES)
        try:
            return kept.decode(data, now_s=self._clock.now_s(), wall_s=self._wall())
        except ValueError as error:
            # Nothing that is tried again would help, and pools have to be scaled all the same.
            log_event(_LOGGER, logging.ERROR, "overrides_lost", {"why": str(error)})
            return {}

    async def save(self, overrides: Mapping[str, Override]) -> None:
        """Keep overrides."""
        data = kept.encode(overrides, now_s=self._clock.now_s(), wall_s=self._wall())
        await self._save(_OVERRIDES, data)

    async def _load(self, name: str) -> bytes | None:
        async with asyncio.timeout(_ASK_S):
            return await asyncio.to_thread(self._store.load, name)

    async def _save(self, name: str, data: bytes) -> None:
        async with asyncio.timeout(_ASK_S):
            await asyncio.to_thread(self._store.save, name, data)
