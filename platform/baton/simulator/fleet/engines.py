"""The engines of virtual replicas, and their KV transfer settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from baton.control.fleet.cache_feed import CacheFeed
from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import Leg, LegFailure, LegOutput
from baton.domain.kv_events import KvEventBatch
from baton.simulator.engine.commands import (
    EngineCommand,
    SimKvHandle,
    decode_kv_handle,
    encode_kv_handle,
)
from baton.simulator.engine.core import SimCore
from baton.simulator.engine.port import Occupancy, VirtualEngine
from baton.simulator.engine.settings import SimSettings, replica_facts
from baton.simulator.v1.core import V1Core
from baton.simulator.v1.settings import V1Settings

EngineSettings = SimSettings | V1Settings
"""Of the token-exact or the counted engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """KV transfer settings of an engine."""

    bytes_per_s: float
    """Bandwidth of its network interfaces, in and out each."""
    setup_s: float
    """Before the first byte of a pull."""
    host_block_s: float
    """To load one block from the host tier."""
    lease_s: float


def link_settings(settings: EngineSettings) -> LinkSettings:
    """The KV transfer settings in an engine's settings."""
    match settings:
        case SimSettings():
            return LinkSettings(
                bytes_per_s=settings.wire_bytes_per_s,
                setup_s=settings.transfer_setup_s / settings.speed,
                host_block_s=settings.host_load_s(1),
                lease_s=settings.lease_s,
            )
        case V1Settings():
            return LinkSettings(
                bytes_per_s=settings.transfer_bytes_per_s,
                setup_s=settings.transfer_setup_s,
                host_block_s=0.0,
                lease_s=settings.lease_s,
            )
        case _:
            assert_never(settings)


def create_engine(
    settings: EngineSettings, *, engine_id: str, model: str, address: str
) -> VirtualEngine:
    """A new engine; other engines pull from it at `address`."""
    match settings:
        case SimSettings():
            return _ExactEngine(settings, engine_id=engine_id, model=model, address=address)
        case V1Settings():
            return V1Core(settings, engine_id=engine_id, model=model, address=address)
        case _:
            assert_never(settings)


class _ExactEngine:
    """The token-exact engine. See `VirtualEngine` for the methods."""

    def __init__(self, settings: SimSettings, *, engine_id: str, model: str, address: str) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._core = SimCore(
            settings,
            engine_id=engine_id,
            model=model,
            address=address,
            encode_kv_handle=encode_kv_handle,
        )
        self._model = model
        self._feed = CacheFeed(
            model=model,
            block_size_tokens=settings.block_size_tokens,
            capacity_blocks=settings.kv_blocks,
            host_blocks=settings.host_blocks,
        )
        self._kv_batches = 0
        self._has_update = False
        self._ends_at_s: float | None = None

    # ------------------------------------------------------------------ legs and steps
    def add(self, leg: Leg, *, now_s: float | None = None) -> LegFailure | None:
        kv_handle = None if leg.kv_handle is None else decode_kv_handle(leg.kv_handle)
        return self._core.add(leg, kv_handle, now_s=now_s)

    def abort(self, leg_ids: Iterable[str]) -> None:
        self._core.abort(leg_ids)

    def begin(self, now_s: float, *, horizon_s: float) -> float | None:
        step = self._core.begin_step(now_s)
        if step is None:
            return None
        self._ends_at_s = now_s + step.duration_s
        return step.duration_s

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until the step under way ends, which nothing shortens; None without one."""
        return None if self._ends_at_s is None else self._ends_at_s - now_s

    def finish(self, now_s: float) -> tuple[LegOutput, ...]:
        self._ends_at_s = None
        return self._core.finish_step(now_s)

    # ------------------------------------------------------------------ transfers
    def pull_done(
        self, leg_id: str, *, blocks: int, duration_s: float, source_kept: bool
    ) -> LegOutput | None:
        return self._core.pull_done(
            leg_id, blocks=blocks, duration_s=duration_s, source_kept=source_kept
        )

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        return self._core.pull_failed(leg_id)

    def load_done(self, leg_id: str) -> None:
        self._core.load_done(leg_id)

    def is_leased(self, leg_id: str, now_s: float) -> bool:
        return self._core.is_leased(leg_id, now_s)

    def renew(self, leg_id: str, now_s: float) -> None:
        self._core.renew(leg_id, now_s)

    def pending_kv_handles(self) -> tuple[SimKvHandle, ...]:
        return self._core.pending_kv_handles()

    def release(self, leg_id: str, now_s: float) -> bool:
        return self._core.release(leg_id, now_s)

    def next_expiry_s(self) -> float | None:
        return self._core.next_expiry_s

    def pop_commands(self) -> tuple[EngineCommand, ...]:
        return self._core.pop_commands()

    # ------------------------------------------------------------------ reports
    def has_cache_update(self) -> bool:
        events = self._core.pop_events()
        if events:
            self._feed.apply(
                KvEventBatch(replica_id=self._engine_id, sequence=self._kv_batches, events=events)
            )
            self._kv_batches += 1
            self._has_update = True
        return self._has_update

    def pop_cache_update(self) -> CacheUpdate | None:
        self.has_cache_update()
        self._has_update = False
        return self._feed.pop_update()

    def cache_snapshot(self) -> CacheUpdate:
        return self._feed.snapshot()

    def load(self, now_s: float) -> Load:
        return self._core.load()._replace(cache_sequence=self._feed.sequence)

    def occupancy(self, now_s: float) -> Occupancy:
        load = self.load(now_s)
        return Occupancy(
            load.queued_requests,
            load.running_requests,
            load.pulling_requests,
            load.kv_used_fraction,
        )

    def links(self) -> tuple[LinkTotals, ...]:
        return self._core.links()

    def facts(self, *, replica_id: str, side_channel: str) -> ReplicaFacts:
        return replica_facts(
            self._settings,
            replica_id=replica_id,
            pool="",
            role=Role.MIXED,
            model=self._model,
            side_channel=side_channel,
        )

    def check_integrity(self) -> None:
        self._core.check_integrity()
