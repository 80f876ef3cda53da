"""What becomes of a plan when its question was a fifth off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from baton.planner.explore import Explorer
from baton.planner.problem import SloClass
from baton.planner.rates.measure import Task, measure
from baton.planner.rates.trials import Trial
from baton.planner.result import Candidate, Sensitivity
from baton.planner.shapes.fleets import Fleet, Key, Kind, estimate, key
from baton.planner.shapes.space import Duty
from baton.planner.simulation_runner import Work
from baton.planner.verify import FleetTask
from baton.planner.verify import run as run_fleet

CHANGES = (0.8, 1.2)
STAGE = "sensitivity"
_AS_ASKED = "as asked"
_FAR = 3.0
"""Times what a fleet carries: at a rate beyond that nothing is simulated, since nothing is met."""
_TERMS = ("prompt length", "output length", "objectives")


def sensitivity(
    candidate: Candidate, explorer: Explorer, tasks: list[Task], work: Work
) -> tuple[Sensitivity, ...]:
    """What the candidate would carry, and attain, if rate, lengths or objectives were others.

    Lengths and objectives: each shape is measured alone again, and the fleet's rate changes as its
    estimate does. The rate: the fleet is simulated at it.
    """
    base = {key(task.duty, task.instance): task for task in tasks}
    wanted = [one for one in _keys(candidate.fleet) if one in base]
    changes = [(_AS_ASKED, 1.0), *product(_TERMS, CHANGES)]
    changed = [
        _changed(base[one], term, change, explorer.rates[one])
        for term, change in changes
        for one in wanted
    ]
    results = work.all(STAGE, measure, changed)
    explorer.runs += sum(len(one.trials) for one in results)
    rates = iter(results)
    found: list[Sensitivity] = []
    carried = [
        estimate(candidate.fleet, {one: next(rates).rate_per_s for one in wanted}) for _ in changes
    ]
    for (term, change), rate in zip(changes[1:], carried[1:], strict=True):
        share = rate / carried[0] if carried[0] else 0.0
        found.append(Sensitivity(term=term, change=change, rate_per_s=candidate.rate_per_s * share))
    return (*_other_rates(candidate, explorer, work), *found)


def _keys(fleet: Fleet) -> Iterator[Key]:
    if fleet.kind is Kind.COLOCATED:
        yield key(Duty.BOTH, fleet.pools[0].instance)
        return
    yield key(Duty.PREFILL, fleet.pools[0].instance)
    yield key(Duty.DECODE, fleet.pools[1].instance)
    if fleet.kind is Kind.HYBRID:
        yield key(Duty.BOTH, fleet.pools[1].instance)


def _changed(task: Task, term: str, change: float, rate_per_s: float) -> Task:
    # finer than when shapes were chosen: here rates a fifth apart are compared
    effort = replace(task.effort, precision=task.effort.precision / 2)
    task = replace(task, effort=effort, guess_per_s=rate_per_s)
    match term:
        case "prompt length":
            return replace(task, traffic=task.traffic.scaled(prompts=change))
        case "output length":
            return replace(task, traffic=task.traffic.scaled(outputs=change))
        case "objectives":
            return replace(task, classes=tuple(_scaled(one, change) for one in task.classes))
        case _:
            return task


def _scaled(one: SloClass, change: float) -> SloClass:
    held = one.objectives
    objectives = replace(
        held,
        ttft_s=None if held.ttft_s is None else held.ttft_s * change,
        tpot_s=None if held.tpot_s is None else held.tpot_s * change,
        e2e_s=None if held.e2e_s is None else held.e2e_s * change,
    )
    return replace(one, objectives=objectives)


def _other_rates(candidate: Candidate, explorer: Explorer, work: Work) -> Iterator[Sensitivity]:
    rate = explorer.question.rate_per_s or candidate.rate_per_s
    part = explorer.task(candidate.cell)
    near = [change for change in CHANGES if change * rate <= _FAR * candidate.rate_per_s]
    tasks = [replace(part, guess_per_s=change * rate / candidate.factor) for change in near]
    for change, trial in zip(near, work.all(STAGE, at_guess, tasks), strict=True):
        explorer.runs += 1
        yield Sensitivity(term="rate", change=change, attainment=trial.attainment)


def at_guess(task: FleetTask) -> Trial:
    """The fleet at the rate that its task begins with."""
    return run_fleet(task, task.guess_per_s)
