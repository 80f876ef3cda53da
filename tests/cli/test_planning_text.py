"""What people read of a plan."""

from __future__ import annotations

from dataclasses import replace

from baton.cli.model.planning_text import plan_lines
from baton.planner.result import Plan
from baton.planner.shapes.fleets import FleetKind
from tests.planner.test_answers import ASKED, MIX, candidate


def heading(*rates: tuple[FleetKind, float], asked_per_s: float | None = None) -> str:
    """Of the fleets, of which the first is taken."""
    candidates = tuple(candidate(kind, rate) for kind, rate in rates)
    made = Plan(
        question=replace(ASKED, rate_per_s=asked_per_s, gpus=8),
        mix=MIX,
        best=candidates[0],
        meets_rate=True,
        verdict="take the first",
        candidates=candidates,
    )
    (found,) = (
        line for line in plan_lines(made) if line.startswith("fleets (simulated; best first")
    )
    return found


def test_where_the_first_fleet_does_not_carry_most_the_reason_is_said() -> None:
    most, less = (FleetKind.DISAGGREGATED, 10.3), (FleetKind.COLOCATED, 10.0)
    assert heading(most, less) == "fleets (simulated; best first):"
    assert heading(less, most).endswith("of those within 15%, the simplest to run):")
    assert heading(less, most, asked_per_s=9.0).endswith("the cheapest that is enough):")
