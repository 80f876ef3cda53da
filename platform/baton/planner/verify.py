"""The rate of a whole fleet, simulated with its coordinator and placement policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.domain.fleet import Role
from baton.planner.problem import DEFAULT_OBJECTIVES, SearchEffort, SloClass
from baton.planner.rates.arrivals import TrafficSampler
from baton.planner.rates.closed_form import MeanRequest, steady_rate
from baton.planner.rates.measure import (
    COARSE_FACTOR,
    LARGE_STEPS,
    RateSearchResult,
    empty_trial,
    requests_per_run,
    run_shortened,
    search_rate,
)
from baton.planner.rates.trials import DutyRequirement, Trial, evaluate_trial, steady_tpot_s
from baton.planner.shapes.fleets import FleetKind, PlannedFleet
from baton.planner.shapes.space import Duty
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.outcome import Objectives, mean
from baton.simulator.scenario import PoolPlan, Scenario, simulate
from baton.simulator.workloads.trace import TraceRequest

_SMALL_STEPS = 3
"""From a short run's rate to the rate that long runs confirm, mostly a little less."""
DISAGGREGATE = {
    FleetKind.COLOCATED: Disaggregate.NEVER,
    FleetKind.DISAGGREGATED: Disaggregate.ALWAYS,
    FleetKind.HYBRID: Disaggregate.AUTO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTask:
    """Simulation of a fleet; picklable."""

    fleet: PlannedFleet
    traffic: TrafficSampler
    classes: tuple[SloClass, ...]
    placement_objectives: Objectives
    effort: SearchEffort
    guess_per_s: float
    residence_s: float
    seed: int = 0


def measure_fleet(task: FleetTask) -> RateSearchResult:
    """The highest rate that the fleet sustains, found by short runs and confirmed by long runs.

    A run that failed early may have begun in a burst. The lowest rate that failed is run whole.
    """
    precision = task.effort.precision
    found = search_rate(
        lambda rate_per_s: run_fleet(task, rate_per_s),
        task.guess_per_s,
        precision=COARSE_FACTOR * precision,
    )
    if not found.rate_per_s:
        return found
    confirmed = _confirm_rate(task, found.rate_per_s / (1 + precision), _run_confirming)
    failed = confirmed.lowest_failed_trial
    if failed is not None and failed.is_shortened:
        whole = run_whole(task, failed.rate_per_s)
        if whole.holds:
            confirmed = _confirm_rate(task, failed.rate_per_s, run_whole)
        else:
            confirmed = replace(confirmed, trials=(whole, *confirmed.trials))
    return replace(confirmed, trials=(*confirmed.trials, *found.trials))


def _confirm_rate(
    task: FleetTask, guess_per_s: float, run: Callable[[FleetTask, float], Trial]
) -> RateSearchResult:
    precision = task.effort.precision
    return search_rate(
        partial(run, task),
        guess_per_s,
        precision=precision,
        factors=((1 + precision) ** 2,) * _SMALL_STEPS + LARGE_STEPS,
    )


def run_fleet(task: FleetTask, rate_per_s: float, min_requests: int = 0) -> Trial:
    """Simulate the fleet at one rate, with at least `min_requests`, and as many as fill it."""
    return run_shortened(
        partial(_simulate_fleet, task, rate_per_s), _run_length(task, rate_per_s, min_requests)
    )


def run_whole(task: FleetTask, rate_per_s: float) -> Trial:
    """The same, with as many requests as confirm a rate, however clearly it fails."""
    requests = _run_length(task, rate_per_s, task.effort.confirmation_requests)
    return _simulate_fleet(task, rate_per_s, requests)


def _run_confirming(task: FleetTask, rate_per_s: float) -> Trial:
    return run_fleet(task, rate_per_s, task.effort.confirmation_requests)


def _run_length(task: FleetTask, rate_per_s: float, min_requests: int) -> int:
    places = sum(
        pool.replicas * pool.engine_shape.settings.max_running_requests for pool in task.fleet.pools
    )
    in_flight = min(rate_per_s * task.residence_s, places)
    return max(min_requests, requests_per_run(in_flight, task.effort))


def _simulate_fleet(task: FleetTask, rate_per_s: float, requests: int) -> Trial:
    sample = task.traffic.sample(rate_per_s, requests)
    requirement = DutyRequirement(duty=Duty.BOTH)
    if not sample.requests:
        return empty_trial(rate_per_s, task.classes, requirement)
    result = simulate(scenario_of(task), sample, until_s=_end_s(task, sample.requests[-1].at_s))
    trial = evaluate_trial(rate_per_s, sample.requests, result.outcomes, task.classes, requirement)
    grows = trial.wait_grows or rate_per_s > _steady_rate(task, sample.requests)
    return replace(trial, wait_grows=grows)


def _steady_rate(task: FleetTask, requests: Sequence[TraceRequest]) -> float:
    """Requests per second above which the decoding replicas have too many streams.

    A hybrid's prefill replicas decode with a part of their batch, and at best without prompts.
    """
    mix = MeanRequest(
        prompt_tokens=mean([float(request.prompt_tokens) for request in requests]),
        output_tokens=max(1.0, mean([float(request.output_tokens) for request in requests])),
    )
    fractions = dict.fromkeys(Role, 1.0)
    fractions[Role.PREFILL] = (
        PredictedOptions().decode_on_prefill_fraction
        if task.fleet.kind is FleetKind.HYBRID
        else 0.0
    )
    return sum(
        pool.replicas
        * steady_rate(
            pool.engine_shape.settings,
            mix,
            steady_tpot_s(task.classes),
            places_fraction=fractions[pool.role],
        )
        for pool in task.fleet.pools
    )


def scenario_of(task: FleetTask) -> Scenario:
    """The fleet as a scenario of the simulator."""
    options = PredictedOptions(
        disaggregate=DISAGGREGATE[task.fleet.kind],
        ttft_slo_s=task.placement_objectives.ttft_s,
        tpot_slo_s=task.placement_objectives.tpot_s,
    )
    return Scenario(
        pools=tuple(
            PoolPlan(
                name=str(pool.role),
                role=pool.role,
                replicas=pool.replicas,
                settings=pool.engine_shape.settings,
            )
            for pool in task.fleet.pools
        ),
        placer=lambda: PredictedPlacer(options, seed=task.seed),
        seed=task.seed,
    )


def _end_s(task: FleetTask, last_arrival_s: float) -> float:
    """When every unfinished request has missed its objectives."""
    ttft_s = max(
        _limit_or_default(class_.objectives.ttft_s, DEFAULT_OBJECTIVES.ttft_s)
        for class_ in task.classes
    )
    tpot_s = max(
        _limit_or_default(class_.objectives.tpot_s, DEFAULT_OBJECTIVES.tpot_s)
        for class_ in task.classes
    )
    max_output_tokens = max(request.output_tokens for request in task.traffic.trace.requests)
    return last_arrival_s + ttft_s + max_output_tokens * tpot_s


def _limit_or_default(objective_s: float | None, default_s: float | None) -> float:
    return objective_s or default_s or 0.0
