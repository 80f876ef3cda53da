"""What the replicas of a virtual fleet have in common, and know of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from baton.domain.fleet import ReplicaFacts
from baton.domain.handoff import LegOutput
from baton.simulator.engine.port import VirtualEngine
from baton.simulator.fleet.frozen_replica import Freezer
from baton.simulator.fleet.reporting import ReportingOptions
from baton.simulator.network.timeline import Timeline
from baton.simulator.network.transfers import Transfers


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
