"""What the replicas of a virtual fleet have in common, and know of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from baton.domain.fleet import ReplicaFacts
from baton.domain.handoff import LegOutput
from baton.simulator.engine.port import VirtualEngine
from baton.simulator.network.timeline import Callback, Timeline
from baton.simulator.network.transfers import Transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportingOptions:
    """When a replica says how it is."""

    report_interval_s: float = 0.25
    """Between two load reports; as the fleet link does it."""
    load_delay_s: float = 0.0
    """How much later than anything else load reports arrive."""
    cache_flush_interval_s: float = 0.02
    """How long cache changes are gathered before they are sent."""
    report_unchanged: bool = True
    """Report even if nothing has happened since the last time; the fleet link does now and then."""
    max_report_gap_s: float = float("inf")
    """Without `report_unchanged`: the longest that a replica says nothing."""
    report_cache: bool = True
    """Say what is cached."""
    max_step_run_s: float = 1.0
    """The longest jump of an engine: so old may the tokens be that a client has not been sent."""


class PeerReplica(Protocol):
    """A replica, as its fetches and other replicas see it."""

    facts: ReplicaFacts
    is_alive: bool
    engine: VirtualEngine
    freezer: Freezer

    def continue_steps(self) -> None:
        """Something has changed: compute."""
        ...

    def apply_engine_commands(self) -> None:
        """Something has changed in the engine."""
        ...

    def send_outputs(self, outputs: Iterable[LegOutput]) -> None:
        """Tell coordinators what their legs have produced."""
        ...

    def on_pull_ended(self, source_id: str) -> None:
        """A pull from a source is over."""
        ...


@dataclass(slots=True, kw_only=True)
class FleetContext:
    """What they have in common."""

    timeline: Timeline
    transfers: Transfers
    reporting: ReportingOptions
    replace_replica: Callable[[str], None]
    """Have another replica take the place of this one, by its id."""
    replicas_by_address: dict[str, PeerReplica] = field(default_factory=dict)
    """Those that live, by their side channels."""
    next_event_at_s: float = float("inf")
    """No jump goes beyond: whoever dies then has sent what it had computed."""


class Freezer:
    """Holds actions while it is frozen."""

    def __init__(self) -> None:
        self.is_frozen = False
        self._deferred: list[Callback] = []

    def defer_if_frozen(self, action: Callback) -> bool:
        """Whether this is not to be done now; then it is kept for later."""
        if self.is_frozen:
            self._deferred.append(action)
        return self.is_frozen

    def thaw(self) -> list[Callback]:
        """Hold nothing any more; returns what was held, in order."""
        self.is_frozen = False
        deferred, self._deferred = self._deferred, []
        return deferred
