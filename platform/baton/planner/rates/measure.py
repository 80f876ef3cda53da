"""What one instance alone can carry: its highest rate at which objectives are met, simulated.

A prefill instance is held to the time to first token, a decode instance to the time per token, one
that does both to both. A fleet of several carries a little less or more: pools wait for each other,
and placement shares the load; that is for `verify` to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.planner.problem import SearchEffort, SloClass
from baton.planner.rates.arrivals import TrafficSampler
from baton.planner.rates.trials import RUN_LENGTH_FACTOR, DutyRequirement, Trial, evaluate_trial
from baton.planner.shapes.space import Duty, EngineShape
from baton.simulator.single_engine import ServedPhases, simulate_engine

_LONG_RUN_REQUESTS = 1200
_SHORT_RUN_DIVISOR = 4
_PRECISION_FACTOR = 2
"""Than what is asked of a fleet: these rates only choose which fleets are simulated."""
_HOPELESS_MARGIN = -0.15
"""Below the target by this much."""
_SIMULATED_PHASES = {
    Duty.PREFILL: ServedPhases.PREFILL,
    Duty.DECODE: ServedPhases.DECODE,
    Duty.BOTH: ServedPhases.BOTH,
}
_STEP_FACTORS = 1.2, 1.2, 1.4, 2.0
"""How far the next try goes while everything holds, or nothing does."""
_MAX_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTask:
    """One instance to be measured; goes to another process and back."""

    engine_shape: EngineShape
    duty: Duty
    traffic: TrafficSampler
    classes: tuple[SloClass, ...]
    effort: SearchEffort
    guess_per_s: float
    """Where the search begins."""
    residence_s: float
    """About how long a request is there, for how long a run must be."""
    elsewhere_s: float = 0.0
    """Of the time to first token, elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSearchResult:
    """The highest rate that was seen to hold, and everything that was tried."""

    rate_per_s: float
    trials: tuple[Trial, ...]

    @property
    def best_trial(self) -> Trial | None:
        """The run at that rate; None when none held."""
        return next((trial for trial in self.trials if trial.rate_per_s == self.rate_per_s), None)

    @property
    def lowest_failed_trial(self) -> Trial | None:
        """The run at the lowest rate that was seen to be too high; None when none was."""
        failed = [
            trial
            for trial in self.trials
            if trial.rate_per_s > self.rate_per_s and trial.requests and not trial.holds
        ]
        return min(failed, key=lambda trial: trial.rate_per_s, default=None)


def measure_instance(task: InstanceTask) -> RateSearchResult:
    """The highest rate of one instance alone."""
    return search_rate(
        lambda rate_per_s: run_instance(task, rate_per_s),
        task.guess_per_s,
        precision=_PRECISION_FACTOR * task.effort.precision,
    )


def search_rate(
    trial_at: Callable[[float], Trial], guess_per_s: float, *, precision: float
) -> RateSearchResult:
    """The highest rate at which trials hold; 0 when none does."""
    trials: list[Trial] = []

    def holds(rate_per_s: float) -> bool:
        trials.append(trial_at(rate_per_s))
        return trials[-1].holds

    low, _ = highest_rate(holds, guess_per_s, precision=precision)
    return RateSearchResult(rate_per_s=low, trials=tuple(trials))


def run_instance(task: InstanceTask, rate_per_s: float) -> Trial:
    """One rate."""
    requests = requests_per_run(rate_per_s * task.residence_s, task.effort)
    return run_shortened(lambda count: _simulate_instance(task, rate_per_s, count), requests)


def run_shortened(run_of: Callable[[int], Trial], requests: int) -> Trial:
    """A run of so many requests, or a shorter one where that fails so badly that it settles it.

    Queues only grow while there is too much to do, so a longer run would fail as well.
    """
    if requests >= _LONG_RUN_REQUESTS:
        short_trial = run_of(requests // _SHORT_RUN_DIVISOR)
        if short_trial.requests and short_trial.margin < _HOPELESS_MARGIN:
            return short_trial
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
    """A run that no request arrived in: where nothing was seen, nothing is known to hold."""
    return replace(
        evaluate_trial(rate_per_s, (), (), classes, requirement), attainment=0.0, margin=-1.0
    )


def requests_per_run(in_flight: float, effort: SearchEffort) -> int:
    """How many requests a run needs when so many are under way at once."""
    return round(min(max(effort.min_requests, RUN_LENGTH_FACTOR * in_flight), effort.max_requests))


def highest_rate(
    holds: Callable[[float], bool], guess: float, *, precision: float
) -> tuple[float, float]:
    """Two rates within `precision` of each other: it holds at the first, not at the second.

    (0, r) when it holds nowhere near: not at r, far below the guess; (r, infinity) when it holds
    everywhere that was tried, far above it.

    Raises:
        ValueError: the guess is not above 0.
    """
    if not guess > 0:
        raise ValueError(f"the guessed rate is {guess}, expected more than 0")
    low, high = _bracket(holds, guess)
    while low > 0 and high < float("inf") and high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def _bracket(holds: Callable[[float], bool], guess: float) -> tuple[float, float]:
    holds_at_guess = holds(guess)
    rate = guess
    for step in range(_MAX_STEPS):
        factor = _STEP_FACTORS[min(step, len(_STEP_FACTORS) - 1)]
        next_rate = rate * factor if holds_at_guess else rate / factor
        if holds(next_rate) != holds_at_guess:
            return (rate, next_rate) if holds_at_guess else (next_rate, rate)
        rate = next_rate
    return (rate, float("inf")) if holds_at_guess else (0.0, rate)
