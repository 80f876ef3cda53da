"""The port between a virtual replica and its engine: token-exact or counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts
from baton.domain.handoff import Leg, LegFailure, LegOutput
from baton.simulator.engine.commands import EngineCommand, SimKvHandle


class Occupancy(NamedTuple):
    """Requests and blocks of an engine at one moment: the part of a `Load` that samples keep."""

    queued: int
    running: int
    pulling: int
    kv_used_fraction: float


NO_OCCUPANCY = Occupancy(0, 0, 0, 0.0)
"""Of an engine without requests and blocks in use."""


class VirtualEngine(Protocol):
    """An engine without a clock.

    The caller calls `begin`, lets the returned seconds pass, and calls `finish`. In between it may
    add, abort and report pulls, and must then call `interrupt`: an engine that began several steps
    may end with the step under way. `pop_commands` must be called after every call.
    """

    def add(self, leg: Leg, *, now_s: float | None = None) -> LegFailure | None:
        """Queue a leg; None when accepted. Without `now_s`, outputs have no times."""
        ...

    def abort(self, leg_ids: Iterable[str]) -> None:
        """End legs without an output and free their blocks; ignores unknown ids."""
        ...

    def begin(self, now_s: float, *, horizon_s: float) -> float | None:
        """Choose the next steps: seconds until `finish` is due, None without work.

        Several steps only where nothing can change meanwhile, and only up to about `horizon_s`.
        """
        ...

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due after a change; None outside of steps."""
        ...

    def finish(self, now_s: float) -> tuple[LegOutput, ...]:
        """End the steps of `begin` and return their outputs."""
        ...

    def pull_done(
        self, leg_id: str, *, blocks: int, duration_s: float, source_kept: bool
    ) -> LegOutput | None:
        """Record the arrival of pulled blocks, and whether their source kept them to the end.

        If not, the leg recomputes or ends with the returned error.
        """
        ...

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        """Record a failed pull; the leg recomputes or ends with the returned error."""
        ...

    def load_done(self, leg_id: str) -> None:
        """Record blocks loaded from the host tier."""
        ...

    def is_leased(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still leased."""
        ...

    def renew(self, leg_id: str, now_s: float) -> None:
        """Extend the lease of a finished prefill leg; does nothing after its end."""
        ...

    def pending_kv_handles(self) -> tuple[SimKvHandle, ...]:
        """KV handles of blocks that are still to be pulled: their leases need renewal."""
        ...

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False without a lease."""
        ...

    def next_expiry_s(self) -> float | None:
        """When to call `begin` though nothing else happens; None for never."""
        ...

    def pop_commands(self) -> tuple[EngineCommand, ...]:
        """Commands for the caller since the last call."""
        ...

    def pop_cache_update(self) -> CacheUpdate | None:
        """Changes of the prefix cache since the last call; None without any."""
        ...

    def cache_snapshot(self) -> CacheUpdate:
        """All cached blocks. Call `pop_cache_update` first."""
        ...

    def has_cache_update(self) -> bool:
        """Whether `pop_cache_update` would return an update."""
        ...

    def load(self, now_s: float) -> Load:
        """The load at this moment; `cache_sequence` is that of the last popped update."""
        ...

    def occupancy(self, now_s: float) -> Occupancy:
        """The same requests and blocks as `load` reports, without its totals."""
        ...

    def links(self) -> tuple[LinkTotals, ...]:
        """Totals of pulls, by source."""
        ...

    def facts(self, *, replica_id: str, side_channel: str) -> ReplicaFacts:
        """The replica's facts."""
        ...

    def check_integrity(self) -> None:
        """Assert that blocks and legs are each in exactly one place."""
        ...
