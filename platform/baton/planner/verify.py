"""What a whole fleet carries: simulated with the coordinator and the policy that would run it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.planner.problem import PATIENCE, Effort, SloClass
from baton.planner.rates.arrivals import Traffic
from baton.planner.rates.measure import Measured, requests_of_a_run, search_rate, shortened, unseen
from baton.planner.rates.trials import HeldTo, Trial, judge
from baton.planner.shapes.fleets import Fleet, Kind
from baton.planner.shapes.space import Duty
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.outcome import Objectives
from baton.simulator.scenario import PoolPlan, Scenario, simulate

DISAGGREGATE = {
    Kind.COLOCATED: Disaggregate.NEVER,
    Kind.DISAGGREGATED: Disaggregate.ALWAYS,
    Kind.HYBRID: Disaggregate.AUTO,
}
"""How placement is told what kind of fleet it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTask:
    """A fleet to be tried; goes to another process and back."""

    fleet: Fleet
    """All of it, or the part of it that stands for it."""
    traffic: Traffic
    classes: tuple[SloClass, ...]
    aims: Objectives
    """Of placement."""
    effort: Effort
    guess_per_s: float
    under_way_s: float
    """About how long a request is there."""
    seed: int = 0


def verify(task: FleetTask) -> Measured:
    """The highest rate that the fleet carries."""
    return search_rate(
        lambda rate_per_s: run(task, rate_per_s),
        task.guess_per_s,
        precision=task.effort.precision,
    )


def run(task: FleetTask, rate_per_s: float) -> Trial:
    """The fleet at one rate."""
    requests = requests_of_a_run(rate_per_s * task.under_way_s, _for_all(task))
    return shortened(lambda count: _run(task, rate_per_s, count), requests)


def _for_all(task: FleetTask) -> Effort:
    """As many requests for each replica where more are simulated than usual.

    A run that is over before a replica has had a few prompts shows no queue at any rate.
    """
    effort = task.effort
    times = max(1.0, task.fleet.replicas / effort.cell)
    return replace(effort, requests=round(times * effort.requests))


def _run(task: FleetTask, rate_per_s: float, requests: int) -> Trial:
    sample = task.traffic.sample(rate_per_s, requests)
    held_to = HeldTo(duty=Duty.BOTH)
    if not sample.requests:
        return unseen(rate_per_s, task.classes, held_to)
    ran = simulate(scenario_of(task), sample, until_s=_over_s(task, sample.requests[-1].at_s))
    return judge(rate_per_s, sample.requests, ran.outcomes, task.classes, held_to)


def scenario_of(task: FleetTask) -> Scenario:
    """The fleet as the simulator takes it."""
    options = PredictedOptions(
        disaggregate=DISAGGREGATE[task.fleet.kind],
        ttft_slo_s=task.aims.ttft_s,
        tpot_slo_s=task.aims.tpot_s,
    )
    return Scenario(
        pools=tuple(
            PoolPlan(
                name=str(pool.role),
                role=pool.role,
                replicas=pool.replicas,
                settings=pool.instance.settings,
            )
            for pool in task.fleet.pools
        ),
        placer=lambda: PredictedPlacer(options, seed=task.seed),
        seed=task.seed,
    )


def _over_s(task: FleetTask, last_arrival_s: float) -> float:
    """When whoever has not finished has missed its objectives in any case."""
    ttft_s = max(_limit(one.objectives.ttft_s, PATIENCE.ttft_s) for one in task.classes)
    tpot_s = max(_limit(one.objectives.tpot_s, PATIENCE.tpot_s) for one in task.classes)
    longest = max(one.output_tokens for one in task.traffic.trace.requests)
    return last_arrival_s + ttft_s + longest * tpot_s


def _limit(given_s: float | None, otherwise_s: float | None) -> float:
    return given_s or otherwise_s or 0.0
