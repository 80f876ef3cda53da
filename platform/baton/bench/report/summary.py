"""What a run amounts to: quantiles, attainment, goodput, tokens per second and device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.bench.report.study import Curve, Result, Study, Trade
from baton.simulator.outcome import Objectives, Outcome, attainment, mean, quantile

SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""By which objectives are multiplied, to see how near to the edge a run is."""

_LONG_TAIL = 0.2
"""Of a run, after its last arrival: from then on its rates say little of a steady state."""
_DECODES = 2
"""A request with fewer output tokens has no time between tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where some seconds lie; nan when there are none."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run in figures."""

    name: str
    requests: int
    failed: int
    """That did not finish, for whatever reason; they miss all objectives."""
    span_s: float
    """From the first arrival to the last end: over this, rates are counted.
    Source: vLLM's benchmark_serving."""
    rate_per_s: float
    """At which requests arrived, or were offered if that is known."""
    ttft: Spread
    """Of the requests that got a token."""
    tpot: Spread
    """Of the requests that got two tokens."""
    gap: Spread
    """The longest time between two tokens of a request."""
    e2e: Spread
    """Of the requests that finished."""
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    goodput_per_s: float
    """Requests per second that met all objectives."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompts, cached or not, and outputs."""
    cached_share: float
    """Of the tokens of all prompts."""
    devices: float

    @property
    def rate_per_device(self) -> float:
        """Requests per second and device."""
        return self.rate_per_s / self.devices

    @property
    def goodput_per_device(self) -> float:
        """Requests per second and device that met all objectives."""
        return self.goodput_per_s / self.devices

    @property
    def output_tokens_per_device(self) -> float:
        """Output tokens per second and device."""
        return self.output_tokens_per_s / self.devices


def summarize(result: Result, objectives: Objectives) -> Summary:
    """The figures of a run."""
    outcomes = result.outcomes
    span_s = span(outcomes)
    decoded = [one for one in outcomes if one.output_tokens >= _DECODES]
    prompt_tokens = sum(one.prompt_tokens for one in outcomes)
    output_tokens = sum(one.output_tokens for one in outcomes)
    met = attainment(outcomes, objectives)
    return Summary(
        name=result.name,
        requests=len(outcomes),
        failed=sum(not one.ok for one in outcomes),
        span_s=span_s,
        rate_per_s=rate_of(result),
        ttft=_spread(one.ttft_s for one in outcomes if one.output_tokens),
        tpot=_spread(one.tpot_s for one in decoded),
        gap=_spread(one.worst_gap_s for one in decoded),
        e2e=_spread(one.e2e_s for one in outcomes if one.ok),
        attainment=met,
        ttft_attainment=attainment(outcomes, Objectives(ttft_s=objectives.ttft_s)),
        tpot_attainment=attainment(outcomes, Objectives(tpot_s=objectives.tpot_s)),
        goodput_per_s=_per(met * len(outcomes), span_s),
        output_tokens_per_s=_per(output_tokens, span_s),
        total_tokens_per_s=_per(prompt_tokens + output_tokens, span_s),
        cached_share=_per(sum(one.cached_tokens for one in outcomes), prompt_tokens),
        devices=result.devices,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The requests of one tenant in one class, each judged by what that class is promised."""

    slo_class: str
    tenant: str
    requests: int
    unserved: int
    """Refused, failed, or cut off."""
    attainment: float


def shares_of(result: Result) -> tuple[Share, ...]:
    """One for each class and tenant that there are requests of, in alphabetical order."""
    kinds: dict[tuple[str, str], list[Outcome]] = {}
    for one in result.outcomes:
        kinds.setdefault((one.slo_class, one.tenant), []).append(one)
    return tuple(
        Share(
            slo_class=slo_class,
            tenant=tenant,
            requests=len(several),
            unserved=sum(not one.ok for one in several),
            attainment=sum(one.good for one in several) / len(several),
        )
        for (slo_class, tenant), several in sorted(kinds.items())
    )


def span(outcomes: Sequence[Outcome]) -> float:
    """From the first arrival to the last end, in seconds; 0 without requests."""
    if not outcomes:
        return 0.0
    arrived_at_s = min(one.arrived_at_s for one in outcomes)
    return max(_ended_at_s(one) for one in outcomes) - arrived_at_s


def tail_notes(results: Iterable[Result]) -> Iterator[str]:
    """What a reader must know where much of a run's time is after its last arrival."""
    most = max((_tail(one.outcomes) for one in results), default=0.0)
    if most > _LONG_TAIL:
        yield (
            f"Up to {most:.0%} of a run's time is after its last arrival. Goodput and tokens/s are"
            " means over all of it: a longer trace has higher ones."
        )


def _tail(outcomes: Sequence[Outcome]) -> float:
    """The share of a run's time after its last arrival."""
    if not outcomes:
        return 0.0
    arrivals = [one.arrived_at_s for one in outcomes]
    whole_s = span(outcomes)
    return 1 - (max(arrivals) - min(arrivals)) / whole_s if whole_s else 0.0


def _ended_at_s(one: Outcome) -> float:
    took_s = one.e2e_s if one.e2e_s < float("inf") else 0.0
    return one.arrived_at_s + took_s


def rate_of(result: Result) -> float:
    """Requests per second that were offered, or at which they came; 0 for fewer than two."""
    if result.offered_per_s is not None:
        return result.offered_per_s
    arrivals = [one.arrived_at_s for one in result.outcomes]
    return _per(len(arrivals) - 1, max(arrivals) - min(arrivals)) if arrivals else 0.0


def scaled(objectives: Objectives, factor: float) -> Objectives:
    """The same objectives, all times `factor`."""
    limits = (objectives.ttft_s, objectives.tpot_s, objectives.e2e_s)
    ttft_s, tpot_s, e2e_s = (None if one is None else one * factor for one in limits)
    return Objectives(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)


def scales_of(study: Study) -> tuple[Curve, ...]:
    """Attainment against the scale of the objectives: as given, else the runs that are shown.

    Those are then judged by the objectives times each of `SCALES`.
    """
    if study.scales or not study.judged:
        return study.scales
    limits = [(scale, scaled(study.objectives, scale)) for scale in SCALES]
    return tuple(
        Curve(
            name=one.name,
            points=tuple((scale, attainment(one.outcomes, limit)) for scale, limit in limits),
        )
        for one in shown(study)
    )


def curves_of(study: Study) -> tuple[Curve, ...]:
    """Attainment against rate and device: as given, else one for each name with several rates."""
    if study.curves or not study.judged:
        return study.curves
    points: dict[str, list[tuple[float, float]]] = {}
    for result in study.results:
        met = attainment(result.outcomes, study.objectives)
        points.setdefault(result.name, []).append((rate_of(result) / result.devices, met))
    return tuple(
        Curve(name=name, points=tuple(sorted(several)))
        for name, several in points.items()
        if len(several) > 1
    )


def capacity(curve: Curve, target: float) -> float | None:
    """The highest rate and device at which the target is met, at all lower ones too; None for none.

    Linear between the last point that meets it and the next; when all do, the last: a lower bound.
    """
    found: float | None = None
    last: tuple[float, float] | None = None
    for rate, met in curve.points:
        if met < target:
            if last is None:
                return None
            share = (last[1] - target) / (last[1] - met)
            return last[0] + share * (rate - last[0])
        found, last = rate, (rate, met)
    return found


def trades_of(study: Study) -> tuple[Trade, ...]:
    """Tokens per second for a user against per device: as given, else one for each result."""
    if study.trades:
        return study.trades
    made = []
    for result in study.results:
        figures = summarize(result, study.objectives)
        if figures.tpot.p50 > 0:
            made.append(
                Trade(
                    name=result.name,
                    user_tokens_per_s=1 / figures.tpot.p50,
                    device_tokens_per_s=figures.output_tokens_per_device,
                    label=f"{figures.rate_per_s:.3g}/s",
                )
            )
    return tuple(made)


def shown(study: Study) -> tuple[Result, ...]:
    """The runs whose distributions are worth a look: one for each name.

    All at the same rate: the highest at which the first name meets the target, else the lowest.
    """
    first = [one for one in study.results if one.name == study.results[0].name]
    meets = [one for one in first if attainment(one.outcomes, study.objectives) >= study.target]
    chosen = max(meets, key=rate_of) if meets else min(first, key=rate_of, default=None)
    if chosen is None:
        return ()
    wanted = rate_of(chosen)
    names = dict.fromkeys(one.name for one in study.results)
    return tuple(
        min(
            (one for one in study.results if one.name == name),
            key=lambda one: abs(rate_of(one) - wanted),
        )
        for name in names
    )


def _spread(seconds: Iterable[float]) -> Spread:
    values = sorted(one for one in seconds if one < float("inf"))
    p50, p90, p99 = (quantile(values, q) for q in (0.5, 0.9, 0.99))
    return Spread(mean=mean(values), p50=p50, p90=p90, p99=p99)


def _per(amount: float, whole: float) -> float:
    return amount / whole if whole else 0.0
