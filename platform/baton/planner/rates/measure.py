"""The highest simulated rate of one replica alone, within its objectives.

A prefill replica must meet the time to first token, a decode replica the time per token too. A
fleet's rate differs: pools wait for each other, and placement shares the load (see `verify`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from baton.planner.problem import SearchEffort, SloClass
from baton.planner.rates.arrivals import TrafficSampler
from baton.planner.rates.trials import DutyRequirement, Trial, evaluate_trial
from baton.planner.shapes.space import Duty, EngineShape
from baton.simulator.outcome import FILLING_RESIDENCES
from baton.simulator.single_engine import ServedPhases, simulate_engine

_LONG_RUN_REQUESTS = 1200
_SHORT_RUN_DIVISOR = 4
COARSE_FACTOR = 2
"""Of the tolerance, for rates that only choose what to simulate next."""
_HOPELESS_MARGIN = -0.15
_SIMULATED_PHASES = {
    Duty.PREFILL: ServedPhases.PREFILL,
    Duty.DECODE: ServedPhases.DECODE,
    Duty.BOTH: ServedPhases.BOTH,
}
LARGE_STEPS = 1.2, 1.2, 1.4, 2.0
"""Factors between rates while all of them hold, or none does; the last again and again."""
_MAX_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTask:
    """Simulation of one replica; picklable."""

    engine_shape: EngineShape
    duty: Duty
    traffic: TrafficSampler
    classes: tuple[SloClass, ...]
    effort: SearchEffort
    guess_per_s: float
    residence_s: float
    """Approximate time that a request spends on the replica; determines the length of runs."""
    elsewhere_s: float = 0.0
    """Part of the time to first token that other replicas use."""
    steady_per_s: float = inf
    """Above it no run is simulated: it would only show how long an overloaded replica fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSearchResult:
    """The highest rate that held, and all trials."""

    rate_per_s: float
    trials: tuple[Trial, ...]

    @property
    def best_trial(self) -> Trial | None:
        """The trial at that rate; None if none held."""
        return next((trial for trial in self.trials if trial.rate_per_s == self.rate_per_s), None)

    @property
    def lowest_failed_trial(self) -> Trial | None:
        """The trial at the lowest rate that was too high; None without one."""
        failed = [
            trial
            for trial in self.trials
            if trial.rate_per_s > self.rate_per_s and trial.requests and not trial.holds
        ]
        return min(failed, key=lambda trial: trial.rate_per_s, default=None)


def measure_instance(task: InstanceTask) -> RateSearchResult:
    """The highest rate of one replica alone."""
    return search_rate(
        lambda rate_per_s: run_instance(task, rate_per_s),
        task.guess_per_s,
        precision=COARSE_FACTOR * task.effort.precision,
        steady_per_s=task.steady_per_s,
    )


def search_rate(
    trial_at: Callable[[float], Trial],
    guess_per_s: float,
    *,
    precision: float,
    steady_per_s: float = inf,
    factors: Sequence[float] = LARGE_STEPS,
) -> RateSearchResult:
    """The highest rate at which trials hold, without any above `steady_per_s`; 0 if none does.

    `factors` are between the rates that are tried first, from the guess on.
    """
    trials: list[Trial] = []

    def holds(rate_per_s: float) -> bool:
        if rate_per_s > steady_per_s:
            return False
        trials.append(trial_at(rate_per_s))
        return trials[-1].holds

    low, _ = highest_rate(holds, guess_per_s, precision=precision, factors=factors)
    return RateSearchResult(rate_per_s=low, trials=tuple(trials))


def run_instance(task: InstanceTask, rate_per_s: float) -> Trial:
    """Simulate the replica at one rate."""
    in_flight = min(rate_per_s * task.residence_s, task.engine_shape.settings.max_running_requests)
    # The rate only chooses what to simulate next: many places need not all be taken.
    requests = min(
        requests_per_run(in_flight, task.effort),
        task.engine_shape.dp * task.effort.rank_requests,
    )
    return run_shortened(lambda count: _simulate_instance(task, rate_per_s, count), requests)


def run_shortened(run_of: Callable[[int], Trial], requests: int) -> Trial:
    """A trial of `requests` requests, or a shorter trial that fails clearly.

    Queues only grow under overload, so a longer run would fail, too. After a burst it may hold.
    """
    if requests >= _LONG_RUN_REQUESTS:
        short_trial = run_of(requests // _SHORT_RUN_DIVISOR)
        if short_trial.requests and short_trial.margin < _HOPELESS_MARGIN:
            return replace(short_trial, is_shortened=True)
    return run_of(requests)


def _simulate_instance(task: InstanceTask, rate_per_s: float, requests: int) -> Trial:
    sample = task.traffic.sample(rate_per_s, requests)
    requirement = DutyRequirement(duty=task.duty, elsewhere_s=task.elsewhere_s)
    if not sample.requests:
        return empty_trial(rate_per_s, task.classes, requirement)
    outcomes = simulate_engine(
        task.engine_shape.settings,
        sample.requests,
        block_tokens=sample.block_tokens,
        phases=_SIMULATED_PHASES[task.duty],
    )
    return evaluate_trial(rate_per_s, sample.requests, outcomes, task.classes, requirement)


def empty_trial(
    rate_per_s: float, classes: Sequence[SloClass], requirement: DutyRequirement
) -> Trial:
    """A trial without requests, which does not hold."""
    return replace(
        evaluate_trial(rate_per_s, (), (), classes, requirement), attainment=0.0, margin=-1.0
    )


def requests_per_run(in_flight: float, effort: SearchEffort) -> int:
    """Number of requests of a run with `in_flight` concurrent requests.

    Fewer would find free places at any rate.
    """
    return round(max(effort.min_requests, FILLING_RESIDENCES * in_flight))


def highest_rate(
    holds: Callable[[float], bool],
    guess: float,
    *,
    precision: float,
    factors: Sequence[float] = LARGE_STEPS,
) -> tuple[float, float]:
    """Two rates within `precision` of each other: it holds at the first, not at the second.

    (0, r) if it does not hold at r, far below the guess; (r, infinity) if it holds at r, far above
    the guess.

    Raises:
        ValueError: the guess is not above 0.
    """
    if not guess > 0:
        raise ValueError(f"the guessed rate is {guess}, expected more than 0")
    low, high = _bracket(holds, guess, factors)
    while low > 0 and high < float("inf") and high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def _bracket(
    holds: Callable[[float], bool], guess: float, factors: Sequence[float]
) -> tuple[float, float]:
    holds_at_guess = holds(guess)
    rate = guess
    for step in range(_MAX_STEPS):
        factor = factors[min(step, len(factors) - 1)]
        next_rate = rate * factor if holds_at_guess else rate / factor
        if holds(next_rate) != holds_at_guess:
            return (rate, next_rate) if holds_at_guess else (next_rate, rate)
        rate = next_rate
    return (rate, float("inf")) if holds_at_guess else (0.0, rate)
