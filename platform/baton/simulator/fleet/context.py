"""What the replicas of a virtual fleet have in common, and know of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from baton.domain.fleet import ReplicaFacts
from baton.domain.handoff import LegOutput
from baton.simulator.engine.port import VirtualEngine
from baton.simulator.fleet.frozen_replica import Freezer
from baton.simulator.fleet.reporting import Reporting
from baton.simulator.network.timeline import Timeline
from baton.simulator.network.transfers import Transfers


class Member(Protocol):
    """A replica, as its fetches and other replicas see it."""

    facts: ReplicaFacts
    alive: bool
    engine: VirtualEngine
    freezer: Freezer

    def go_on(self) -> None:
        """Something has changed: compute."""
        ...

    def after_change(self) -> None:
        """Something has changed in the engine."""
        ...

    def send_outputs(self, outputs: Iterable[LegOutput]) -> None:
        """Tell coordinators what their legs have produced."""
        ...

    def pulled(self, source_id: str) -> None:
        """A pull from a source is over."""
        ...


@dataclass(slots=True, kw_only=True)
class World:
    """What they have in common."""

    timeline: Timeline
    transfers: Transfers
    reporting: Reporting
    replace: Callable[[str], None]
    """Have another replica take the place of this one, by its id."""
    by_address: dict[str, Member] = field(default_factory=dict)
    """Those that live, by their side channels."""
    next_happening_at_s: float = float("inf")
    """No jump goes beyond: whoever dies then has sent what it had computed."""
