"""What one simulated run at one rate showed, held against objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.planner.problem import PATIENCE, SloClass, class_of
from baton.planner.shapes.space import Duty
from baton.simulator.outcome import Objectives, Outcome, attainment, mean, quantile
from baton.simulator.workloads.trace import TraceRequest

WARM_UP = 1 / 3
"""Of a run's requests, the first that do not count: they find an engine emptier than it will be."""
_NO_TIME_S = 1e-9
_GROWS = 0.04
"""Seconds that the wait grows by per second, from where on there is too much to do. Below it a wait
is as likely the chance of one run."""
_SHOWS = 1 / _GROWS
"""A run this many times as long as the objective shows such a growth by missing it."""
TURNS = 3
"""A run has this many times as many requests as are under way at once, so that those that count
find as many streams as there would be for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Quantiles of a latency, in seconds."""

    p50_s: float
    p90_s: float
    p99_s: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of some values; nan for none."""
        return Spread(
            p50_s=quantile(values, 0.5), p90_s=quantile(values, 0.9), p99_s=quantile(values, 0.99)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run."""

    rate_per_s: float
    attainment: float
    """Of the class that is furthest from its target, or least above it."""
    margin: float
    """How far that is above its target; below 0 the rate is too high."""
    late_first: float
    """Share of all requests whose first token came too late, or never."""
    late_stream: float
    """Share of all requests with tokens too far apart, although the first came."""
    requests: int
    """That were counted."""
    ttft: Spread
    tpot: Spread
    e2e_s: float
    """On average."""
    output_tokens: float
    """On average."""
    cached_fraction: float
    """Of all prompt tokens."""
    grows: bool = False
    """Whether the wait for the first token grows, too slowly for a run this short to miss its
    objectives: they would be missed for ever a little later."""

    @property
    def holds(self) -> bool:
        """Whether every class meets its target, and would go on to."""
        return self.margin >= 0 and not self.grows

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, all together, while the queue does not grow."""
        return self.rate_per_s * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTo:
    """What a duty is held to of a request's objectives."""

    duty: Duty
    spent_s: float = 0.0
    """Of the time to first token: what the other replica and the way between them take."""

    def limits(self, objectives: Objectives) -> Objectives:
        """What this duty alone must meet."""
        ttft_s = PATIENCE.ttft_s if objectives.ttft_s is None else objectives.ttft_s
        tpot_s = PATIENCE.tpot_s if objectives.tpot_s is None else objectives.tpot_s
        match self.duty:
            case Duty.PREFILL:
                return Objectives(ttft_s=self._left(ttft_s))
            case Duty.DECODE:
                return Objectives(ttft_s=self._left(ttft_s), tpot_s=tpot_s)
            case Duty.BOTH:
                return replace(objectives, ttft_s=ttft_s, tpot_s=tpot_s)

    def _left(self, ttft_s: float | None) -> float | None:
        return None if ttft_s is None else max(ttft_s - self.spent_s, _NO_TIME_S)

    def wanted(self, attainment: float) -> float:
        """What this duty alone must attain for the whole to attain that.

        Where there is another: the root, as if the two missed independently.
        """
        return attainment if self.duty is Duty.BOTH else attainment**0.5


def judge(
    rate_per_s: float,
    requests: Sequence[TraceRequest],
    outcomes: Sequence[Outcome],
    classes: Sequence[SloClass],
    held_to: HeldTo,
) -> Trial:
    """What a run showed; outcomes are in the order of the requests."""
    if len(requests) != len(outcomes):
        raise ValueError(f"{len(outcomes)} outcomes for {len(requests)} requests")
    cold = int(len(requests) * WARM_UP)
    kept = list(zip(requests[cold:], outcomes[cold:], strict=True))
    margins: list[tuple[float, float]] = []
    late_first = late_stream = 0
    for one in classes:
        mine = [out for request, out in kept if class_of(request, classes) is one]
        limits = held_to.limits(one.objectives)
        met = attainment(mine, limits)
        margins.append((met - held_to.wanted(one.attainment), met))
        first = [_first_late(out, limits) for out in mine]
        late_first += sum(first)
        late_stream += sum(
            not early and _stream_late(out, limits) for early, out in zip(first, mine, strict=True)
        )
    margin, attained = min(margins)
    came = [out for _, out in kept if out.output_tokens]
    prompts = sum(out.prompt_tokens for _, out in kept)
    return Trial(
        rate_per_s=rate_per_s,
        attainment=attained,
        margin=margin,
        late_first=late_first / max(1, len(kept)),
        late_stream=late_stream / max(1, len(kept)),
        requests=len(kept),
        ttft=Spread.of([out.ttft_s for _, out in kept]),
        tpot=Spread.of([out.tpot_s for out in came]),
        e2e_s=mean([out.e2e_s for out in came]),
        output_tokens=mean([float(out.output_tokens) for _, out in kept]),
        cached_fraction=sum(out.cached_tokens for _, out in kept) / max(1, prompts),
        grows=_wait_grows([out for _, out in kept], classes, held_to),
    )


def _wait_grows(kept: Sequence[Outcome], classes: Sequence[SloClass], held_to: HeldTo) -> bool:
    """Whether first tokens come later and later, in a run too short to show it otherwise.

    Where prompts bring more work than can be done, at rho times what can, the wait grows by 1 -
    1/rho per second: an objective of 2 s is met for 10 s at 1.25 times the capacity.
    """
    limits = [held_to.limits(one.objectives).ttft_s or 0.0 for one in classes]
    third = len(kept) // 3
    if not third:
        return False
    span_s = kept[-1].arrived_at_s - kept[0].arrived_at_s
    if span_s <= 0 or span_s > _SHOWS * max(limits):
        return False
    # Medians: one long prompt more in a third is no growth. Infinite where nothing came.
    begin_s, end_s = (
        quantile([out.ttft_s for out in part], 0.5) for part in (kept[:third], kept[-third:])
    )
    return end_s - begin_s > _GROWS * span_s * 2 / 3


def _first_late(outcome: Outcome, objectives: Objectives) -> bool:
    if not outcome.output_tokens:
        return True
    return objectives.ttft_s is not None and outcome.ttft_s > objectives.ttft_s


def _stream_late(outcome: Outcome, objectives: Objectives) -> bool:
    return not outcome.ok or (objectives.tpot_s is not None and outcome.tpot_s > objectives.tpot_s)
