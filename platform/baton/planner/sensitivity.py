"""Sensitivity of a plan to changes of its question by a fifth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from baton.planner.explore import Explorer
from baton.planner.problem import SloClass
from baton.planner.rates.measure import InstanceTask, measure_instance
from baton.planner.rates.trials import Trial
from baton.planner.result import Candidate, Demand, Plan, Sensitivity
from baton.planner.shapes.fleets import FleetKind, PlannedFleet, RateKey, estimate_rate, rate_key
from baton.planner.shapes.space import Duty
from baton.planner.simulation_runner import SimulationRunner
from baton.planner.verify import FleetTask, run_whole

CHANGES = (0.8, 1.2)
STAGE = "sensitivity"
_BASELINE = "as asked"
_MAX_RATE_FACTOR = 3.0
"""Times a fleet's rate: higher rates are not simulated, since attainment would be 0."""
_MAX_DEMAND_ROUNDS = 3
_DEMAND_PRECISION = 0.01
_PARAMETERS = ("prompt length", "output length", "objectives")


def find_demand(plan: Plan, explorer: Explorer, runner: SimulationRunner) -> Demand | None:
    """The required load as a rate.

    Users wait for answers, and answers take longer the more requests users send: the rate is found
    by simulations of the best fleet at it.
    """
    question, best = plan.question, plan.best
    if question.users is None:
        return None if question.rate_per_s is None else Demand(rate_per_s=question.rate_per_s)
    if best is None:
        return None
    answer_s = best.answer_s
    rate_per_s = question.users.rate_per_s(answer_s)
    for _ in range(_MAX_DEMAND_ROUNDS if plan.meets_rate else 0):
        task = explorer.task(best.simulated_fleet)
        task = replace(task, guess_per_s=rate_per_s / best.scale_factor)
        (trial,) = runner.run_stage(STAGE, run_at_guess, [task])
        explorer.runs += 1
        if not trial.e2e_s > 0:
            break
        answer_s = trial.e2e_s
        last_per_s, rate_per_s = rate_per_s, question.users.rate_per_s(answer_s)
        if abs(rate_per_s / last_per_s - 1) < _DEMAND_PRECISION:
            break
    if plan.meets_rate and rate_per_s > best.rate_per_s:  # by the tolerance of the rounds
        rate_per_s = best.rate_per_s
        answer_s = question.users.users / rate_per_s - question.users.think_s
    return Demand(rate_per_s=rate_per_s, answer_s=answer_s)


def analyze_sensitivity(
    candidate: Candidate,
    explorer: Explorer,
    tasks: list[InstanceTask],
    runner: SimulationRunner,
    demand_per_s: float | None,
) -> tuple[Sensitivity, ...]:
    """Rates and attainment of the candidate with another rate, other lengths or other objectives.

    For lengths and objectives, each shape is simulated alone again, and the fleet's rate changes in
    proportion to its estimate. For the rate, the fleet is simulated.
    """
    tasks_by_key = {rate_key(task.duty, task.engine_shape): task for task in tasks}
    fleet_keys = [
        fleet_key for fleet_key in _fleet_keys(candidate.fleet) if fleet_key in tasks_by_key
    ]
    changes = [(_BASELINE, 1.0), *product(_PARAMETERS, CHANGES)]
    changed_tasks = [
        _changed_task(tasks_by_key[fleet_key], term, change, explorer.rates[fleet_key])
        for term, change in changes
        for fleet_key in fleet_keys
    ]
    results = runner.run_stage(STAGE, measure_instance, changed_tasks)
    explorer.runs += sum(len(result.trials) for result in results)
    rates = iter(results)
    results_by_change: list[Sensitivity] = []
    estimates = [
        estimate_rate(
            candidate.fleet, {fleet_key: next(rates).rate_per_s for fleet_key in fleet_keys}
        )
        for _ in changes
    ]
    for (term, change), rate in zip(changes[1:], estimates[1:], strict=True):
        ratio = rate / estimates[0] if estimates[0] else 0.0
        results_by_change.append(
            Sensitivity(parameter=term, change=change, rate_per_s=candidate.rate_per_s * ratio)
        )
    return (*_rate_sensitivity(candidate, explorer, runner, demand_per_s), *results_by_change)


def _fleet_keys(fleet: PlannedFleet) -> Iterator[RateKey]:
    if fleet.kind is FleetKind.COLOCATED:
        yield rate_key(Duty.BOTH, fleet.pools[0].engine_shape)
        return
    yield rate_key(Duty.PREFILL, fleet.pools[0].engine_shape)
    yield rate_key(Duty.DECODE, fleet.pools[1].engine_shape)
    if fleet.kind is FleetKind.HYBRID:
        yield rate_key(Duty.BOTH, fleet.pools[1].engine_shape)


def _changed_task(
    task: InstanceTask, parameter: str, change: float, rate_per_s: float
) -> InstanceTask:
    # Finer than for the choice of shapes: these rates differ by about a fifth.
    effort = replace(task.effort, precision=task.effort.precision / 2)
    task = replace(task, effort=effort, guess_per_s=rate_per_s)
    match parameter:
        case "prompt length":
            return replace(task, traffic=task.traffic.scaled(prompts=change))
        case "output length":
            return replace(task, traffic=task.traffic.scaled(outputs=change))
        case "objectives":
            return replace(
                task, classes=tuple(_scaled_class(class_, change) for class_ in task.classes)
            )
        case _:
            return task


def _scaled_class(slo_class: SloClass, change: float) -> SloClass:
    original = slo_class.objectives
    objectives = replace(
        original,
        ttft_s=None if original.ttft_s is None else original.ttft_s * change,
        tpot_s=None if original.tpot_s is None else original.tpot_s * change,
        e2e_s=None if original.e2e_s is None else original.e2e_s * change,
    )
    return replace(slo_class, objectives=objectives)


def _rate_sensitivity(
    candidate: Candidate, explorer: Explorer, runner: SimulationRunner, demand_per_s: float | None
) -> Iterator[Sensitivity]:
    rate = demand_per_s or candidate.rate_per_s
    base_task = explorer.task(candidate.simulated_fleet)
    changes = [
        change for change in CHANGES if change * rate <= _MAX_RATE_FACTOR * candidate.rate_per_s
    ]
    tasks = [
        replace(base_task, guess_per_s=change * rate / candidate.scale_factor) for change in changes
    ]
    for change, trial in zip(changes, runner.run_stage(STAGE, run_at_guess, tasks), strict=True):
        explorer.runs += 1
        yield Sensitivity(parameter="rate", change=change, attainment=trial.attainment)


def run_at_guess(task: FleetTask) -> Trial:
    """Simulate the fleet at its task's initial rate."""
    return run_whole(task, task.guess_per_s)
