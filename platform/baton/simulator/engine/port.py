"""The port between a virtual replica and its engine: the token-exact one, or the counted one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts
from baton.domain.handoff import Leg, LegFailure, LegOutput
from baton.simulator.engine.commands import EngineCommand, SimKvHandle


class VirtualEngine(Protocol):
    """An engine without a clock.

    A body calls `begin`, lets the seconds pass that it said, and calls `finish`. In between it may
    add, abort and report pulls, and must then call `interrupt`: an engine that has promised many
    steps at once ends with the one under way. Orders are to be taken after every call.
    """

    def add(self, leg: Leg, *, now_s: float | None = None) -> LegFailure | None:
        """Queue a leg; None when accepted, else why not. Without `now_s` no times are told."""
        ...

    def abort(self, leg_ids: Iterable[str]) -> None:
        """End legs without a word and free what they hold; unknown ones are ignored."""
        ...

    def begin(self, now_s: float, *, horizon_s: float) -> float | None:
        """Choose what to compute next: seconds until `finish` is due, None when there is nothing.

        One step, or as many as nothing can change in, but no more than about `horizon_s` long.
        """
        ...

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due now that something has changed; None outside of steps."""
        ...

    def finish(self, now_s: float) -> tuple[LegOutput, ...]:
        """Account for what `begin` began and return what it produced."""
        ...

    def pull_done(
        self, leg_id: str, *, blocks: int, duration_s: float, source_kept: bool
    ) -> LegOutput | None:
        """The blocks of a pull are here, and whether their source kept them to the end.

        Where it did not, the leg computes its own, or ends with the returned error.
        """
        ...

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        """A pull did not work; the leg recomputes, or ends with the returned error."""
        ...

    def load_done(self, leg_id: str) -> None:
        """Blocks have come from the host's memory."""
        ...

    def is_leased(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still kept."""
        ...

    def renew(self, leg_id: str, now_s: float) -> None:
        """Keep a finished prefill leg's blocks for longer; nothing where they are lost."""
        ...

    def pending_kv_handles(self) -> tuple[SimKvHandle, ...]:
        """What legs wait for that is elsewhere: their leases are to be renewed."""
        ...

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False when they were no longer kept."""
        ...

    def next_expiry_s(self) -> float | None:
        """When to look again though nothing happens; None: never."""
        ...

    def pop_commands(self) -> tuple[EngineCommand, ...]:
        """What the body has to do outside, since this was last called."""
        ...

    def pop_cache_update(self) -> CacheUpdate | None:
        """What changed in the prefix cache since this was last called; None when nothing did."""
        ...

    def cache_snapshot(self) -> CacheUpdate:
        """All that is cached. Call `pop_cache_update` first."""
        ...

    def has_cache_update(self) -> bool:
        """Whether `pop_cache_update` would have anything to say."""
        ...

    def load(self, now_s: float) -> Load:
        """The load at this moment, counted; `cache_sequence` is that of the last update taken."""
        ...

    def links(self) -> tuple[LinkTotals, ...]:
        """What was pulled from whom."""
        ...

    def facts(self, *, replica_id: str, side_channel: str) -> ReplicaFacts:
        """What the replica says of itself."""
        ...

    def check_integrity(self) -> None:
        """Assert that blocks and legs are each in exactly one place."""
        ...
