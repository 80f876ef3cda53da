"""The results of one simulated run at one rate, compared with objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from baton.planner.problem import DEFAULT_OBJECTIVES, SloClass, class_of
from baton.planner.shapes.space import Duty
from baton.simulator.outcome import Objectives, Outcome, attainment, mean, quantile
from baton.simulator.workloads.trace import TraceRequest

WARM_UP_FRACTION = 1 / 3
"""First requests of a run that are not counted: their engine is emptier than usual."""
_MIN_LIMIT_S = 1e-9
_MAJORITY = 0.5
_MAX_WAIT_GROWTH = 0.04
"""Growth of the wait in seconds per second that shows overload. Less may be chance."""
_SELF_EVIDENT_SPAN = 1 / _MAX_WAIT_GROWTH
"""A run of this many times the objective shows such a growth by missing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyQuantiles:
    """Quantiles of a latency, in seconds."""

    p50_s: float
    p90_s: float
    p99_s: float

    @staticmethod
    def from_values(values: Sequence[float]) -> LatencyQuantiles:
        """Of these values; nan for none."""
        return LatencyQuantiles(
            p50_s=quantile(values, 0.5), p90_s=quantile(values, 0.9), p99_s=quantile(values, 0.99)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run."""

    rate_per_s: float
    attainment: float
    """Of the class with the smallest margin."""
    margin: float
    """Attainment minus target; below 0 the rate is too high."""
    late_first_token_fraction: float
    """Requests with a late first token, or none."""
    slow_stream_fraction: float
    """Requests with an early first token but late tokens after it."""
    requests: int
    ttft: LatencyQuantiles
    tpot: LatencyQuantiles
    e2e_s: float
    output_tokens: float
    cached_fraction: float
    wait_grows: bool = False
    """Whether the wait for the first token grows, too slowly to miss objectives in a run this
    short."""
    is_shortened: bool = False
    """Whether it failed so clearly that a longer run was given up."""

    @property
    def holds(self) -> bool:
        """Whether every class meets its target, and would in a longer run."""
        return self.margin >= 0 and not self.wait_grows

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second while the queue does not grow."""
        return self.rate_per_s * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DutyRequirement:
    """A duty's part of a request's objectives."""

    duty: Duty
    elsewhere_s: float = 0.0
    """Part of the time to first token that the other replica and the handoff use."""

    def limits(self, objectives: Objectives) -> Objectives:
        """Objectives of this duty alone."""
        ttft_s = DEFAULT_OBJECTIVES.ttft_s if objectives.ttft_s is None else objectives.ttft_s
        tpot_s = DEFAULT_OBJECTIVES.tpot_s if objectives.tpot_s is None else objectives.tpot_s
        match self.duty:
            case Duty.PREFILL:
                return Objectives(ttft_s=self._remaining_s(ttft_s))
            case Duty.DECODE:
                return Objectives(ttft_s=self._remaining_s(ttft_s), tpot_s=tpot_s)
            case Duty.BOTH:
                return replace(objectives, ttft_s=ttft_s, tpot_s=tpot_s)

    def _remaining_s(self, ttft_s: float | None) -> float | None:
        return None if ttft_s is None else max(ttft_s - self.elsewhere_s, _MIN_LIMIT_S)

    def required_attainment(self, attainment: float) -> float:
        """Attainment that this duty needs for the whole to reach `attainment`.

        With two duties the square root, as if they missed independently.
        """
        return attainment if self.duty is Duty.BOTH else attainment**0.5


def steady_tpot_s(classes: Sequence[SloClass]) -> float | None:
    """The time per token that a step of all streams may take at most in the mean.

    The loosest: a stream of any class is in each step. None where fewer than half need meet it.
    """
    if min(class_.attainment for class_ in classes) < _MAJORITY:
        return None
    limits = [class_.objectives.tpot_s or DEFAULT_OBJECTIVES.tpot_s or inf for class_ in classes]
    return max(limits)


def evaluate_trial(
    rate_per_s: float,
    requests: Sequence[TraceRequest],
    outcomes: Sequence[Outcome],
    classes: Sequence[SloClass],
    requirement: DutyRequirement,
) -> Trial:
    """The results of a run; outcomes are in the order of the requests."""
    if len(requests) != len(outcomes):
        raise ValueError(f"{len(outcomes)} outcomes for {len(requests)} requests")
    warm_up_count = int(len(requests) * WARM_UP_FRACTION)
    counted = list(zip(requests[warm_up_count:], outcomes[warm_up_count:], strict=True))
    margins: list[tuple[float, float]] = []
    late_first = late_stream = 0
    for class_ in classes:
        class_outcomes = [out for request, out in counted if class_of(request, classes) is class_]
        limits = requirement.limits(class_.objectives)
        class_attainment = attainment(class_outcomes, limits)
        margins.append(
            (
                class_attainment - requirement.required_attainment(class_.attainment),
                class_attainment,
            )
        )
        first_token_late = [_is_first_token_late(out, limits) for out in class_outcomes]
        late_first += sum(first_token_late)
        late_stream += sum(
            not early and _is_stream_slow(out, limits)
            for early, out in zip(first_token_late, class_outcomes, strict=True)
        )
    margin, lowest_attainment = min(margins)
    with_output = [out for _, out in counted if out.output_tokens]
    prompts = sum(out.prompt_tokens for _, out in counted)
    return Trial(
        rate_per_s=rate_per_s,
        attainment=lowest_attainment,
        margin=margin,
        late_first_token_fraction=late_first / max(1, len(counted)),
        slow_stream_fraction=late_stream / max(1, len(counted)),
        requests=len(counted),
        ttft=LatencyQuantiles.from_values([out.ttft_s for _, out in counted]),
        tpot=LatencyQuantiles.from_values([out.tpot_s for out in with_output]),
        e2e_s=mean([out.e2e_s for out in with_output]),
        output_tokens=mean([float(out.output_tokens) for _, out in counted]),
        cached_fraction=sum(out.cached_tokens for _, out in counted) / max(1, prompts),
        wait_grows=_wait_grows([out for _, out in counted], classes, requirement),
    )


def _wait_grows(
    outcomes: Sequence[Outcome], classes: Sequence[SloClass], requirement: DutyRequirement
) -> bool:
    """Whether first tokens come later and later, in a run too short to show it otherwise.

    At rho times the capacity, the wait grows by 1 - 1/rho per second: at 1.25 times the capacity,
    an objective of 2 s is met for 10 s.
    """
    limits = [requirement.limits(class_.objectives).ttft_s or 0.0 for class_ in classes]
    third = len(outcomes) // 3
    if not third:
        return False
    span_s = outcomes[-1].arrived_at_s - outcomes[0].arrived_at_s
    if span_s <= 0 or span_s > _SELF_EVIDENT_SPAN * max(limits):
        return False
    # Medians: one more long prompt in a third is no growth. Infinite without tokens.
    begin_s, end_s = (
        quantile([out.ttft_s for out in part], 0.5)
        for part in (outcomes[:third], outcomes[-third:])
    )
    return end_s - begin_s > _MAX_WAIT_GROWTH * span_s * 2 / 3


def _is_first_token_late(outcome: Outcome, objectives: Objectives) -> bool:
    if not outcome.output_tokens:
        return True
    return objectives.ttft_s is not None and outcome.ttft_s > objectives.ttft_s


def _is_stream_slow(outcome: Outcome, objectives: Objectives) -> bool:
    return not outcome.ok or (objectives.tpot_s is not None and outcome.tpot_s > objectives.tpot_s)
