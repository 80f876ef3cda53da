"""What one instance alone can carry: its highest rate at which objectives are met, simulated.

A prefill instance is held to the time to first token, a decode instance to the time per token, one
that does both to both. A fleet of several carries a little less or more: pools wait for each other,
and placement shares the load; that is for `verify` to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.planner.problem import Effort, SloClass
from baton.planner.rates.arrivals import Traffic
from baton.planner.rates.rate_search import highest_rate
from baton.planner.rates.trials import TURNS, HeldTo, Trial, judge
from baton.planner.shapes.space import Duty, Instance
from baton.simulator.single_engine import Served, serve

_LONG_REQUESTS = 1200
_SHORTER = 4
_COARSER = 2
"""Than what is asked of a fleet: these rates only choose which fleets are simulated."""
_HOPELESS = -0.15
"""Below the target by this much."""

_SERVED = {
    Duty.PREFILL: Served.PREFILL,
    Duty.DECODE: Served.DECODE,
    Duty.BOTH: Served.BOTH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One instance to be measured; goes to another process and back."""

    instance: Instance
    duty: Duty
    traffic: Traffic
    classes: tuple[SloClass, ...]
    effort: Effort
    guess_per_s: float
    """Where the search begins."""
    under_way_s: float
    """About how long a request is there, for how long a run must be."""
    spent_s: float = 0.0
    """Of the time to first token, elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The highest rate that was seen to hold, and everything that was tried."""

    rate_per_s: float
    trials: tuple[Trial, ...]

    @property
    def at_best(self) -> Trial | None:
        """The run at that rate; None when none held."""
        return next((one for one in self.trials if one.rate_per_s == self.rate_per_s), None)

    @property
    def beyond(self) -> Trial | None:
        """The run at the lowest rate that was seen to be too high; None when none was."""
        over = [
            one
            for one in self.trials
            if one.rate_per_s > self.rate_per_s and one.requests and not one.holds
        ]
        return min(over, key=lambda one: one.rate_per_s, default=None)


def measure(task: Task) -> Measured:
    """The highest rate of one instance alone."""
    return search_rate(
        lambda rate_per_s: run(task, rate_per_s),
        task.guess_per_s,
        precision=_COARSER * task.effort.precision,
    )


def search_rate(
    trial_at: Callable[[float], Trial], guess_per_s: float, *, precision: float
) -> Measured:
    """The highest rate at which trials hold; 0 when none does."""
    trials: list[Trial] = []

    def holds(rate_per_s: float) -> bool:
        trials.append(trial_at(rate_per_s))
        return trials[-1].holds

    low, _ = highest_rate(holds, guess_per_s, precision=precision)
    return Measured(rate_per_s=low, trials=tuple(trials))


def run(task: Task, rate_per_s: float) -> Trial:
    """One rate."""
    requests = requests_of_a_run(rate_per_s * task.under_way_s, task.effort)
    return shortened(lambda count: _run(task, rate_per_s, count), requests)


def shortened(run_of: Callable[[int], Trial], requests: int) -> Trial:
    """A run of so many requests, or a shorter one where that fails so badly that it settles it.

    Queues only grow while there is too much to do, so a longer run would fail as well.
    """
    if requests >= _LONG_REQUESTS:
        first = run_of(requests // _SHORTER)
        if first.requests and first.margin < _HOPELESS:
            return first
    return run_of(requests)


def _run(task: Task, rate_per_s: float, requests: int) -> Trial:
    sample = task.traffic.sample(rate_per_s, requests)
    held_to = HeldTo(duty=task.duty, spent_s=task.spent_s)
    if not sample.requests:
        return unseen(rate_per_s, task.classes, held_to)
    outcomes = serve(
        task.instance.settings,
        sample.requests,
        block_tokens=sample.block_tokens,
        phase=_SERVED[task.duty],
    )
    return judge(rate_per_s, sample.requests, outcomes, task.classes, held_to)


def unseen(rate_per_s: float, classes: Sequence[SloClass], held_to: HeldTo) -> Trial:
    """A run that no request arrived in: where nothing was seen, nothing is known to hold."""
    return replace(judge(rate_per_s, (), (), classes, held_to), attainment=0.0, margin=-1.0)


def requests_of_a_run(under_way: float, effort: Effort) -> int:
    """How many requests a run needs when so many are under way at once."""
    return round(min(max(effort.least_requests, TURNS * under_way), effort.requests))
