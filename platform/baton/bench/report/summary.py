"""The metrics of a run: quantiles, attainment, goodput, tokens per second and device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from baton.bench.report.study import Curve, RunResult, Study, Tradeoff
from baton.simulator.outcome import (
    FILLING_RESIDENCES,
    Objectives,
    Outcome,
    attainment,
    mean,
    quantile,
)

OBJECTIVE_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Factors of objectives, which show how close to the limit a run is."""

_LONG_TAIL_FRACTION = 0.2
"""Of a run, after its last arrival; with more, rates do not describe a steady state."""
_MIN_DECODED_TOKENS = 2
"""Fewer tokens have no time between tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyQuantiles:
    """In seconds; nan without values."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The metrics of one run."""

    name: str
    requests: int
    failed: int
    """Not finished, for any reason; they miss all objectives."""
    span_s: float
    """From the first arrival to the last end: the time over which rates are counted. Source: vLLM's
    benchmark_serving."""
    rate_per_s: float
    """Offered, or else of arrivals."""
    ttft: LatencyQuantiles
    tpot: LatencyQuantiles
    """Of requests with two tokens."""
    max_itl: LatencyQuantiles
    e2e: LatencyQuantiles
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    goodput_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompts, cached or not, and outputs."""
    cached_fraction: float
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


def summarize(result: RunResult, objectives: Objectives) -> RunSummary:
    """The metrics of a run."""
    outcomes = result.outcomes
    span_s = run_span_s(outcomes)
    decoded_outcomes = [
        outcome for outcome in outcomes if outcome.output_tokens >= _MIN_DECODED_TOKENS
    ]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    output_tokens = sum(outcome.output_tokens for outcome in outcomes)
    met_fraction = attainment(outcomes, objectives)
    return RunSummary(
        name=result.name,
        requests=len(outcomes),
        failed=sum(not outcome.ok for outcome in outcomes),
        span_s=span_s,
        rate_per_s=offered_rate(result),
        ttft=_latency_quantiles(outcome.ttft_s for outcome in outcomes if outcome.output_tokens),
        tpot=_latency_quantiles(outcome.tpot_s for outcome in decoded_outcomes),
        max_itl=_latency_quantiles(outcome.max_itl_s for outcome in decoded_outcomes),
        e2e=_latency_quantiles(outcome.e2e_s for outcome in outcomes if outcome.ok),
        attainment=met_fraction,
        ttft_attainment=attainment(outcomes, Objectives(ttft_s=objectives.ttft_s)),
        tpot_attainment=attainment(outcomes, Objectives(tpot_s=objectives.tpot_s)),
        goodput_per_s=_ratio(met_fraction * len(outcomes), span_s),
        output_tokens_per_s=_ratio(output_tokens, span_s),
        total_tokens_per_s=_ratio(prompt_tokens + output_tokens, span_s),
        cached_fraction=_ratio(sum(outcome.cached_tokens for outcome in outcomes), prompt_tokens),
        devices=result.devices,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAttainment:
    """The requests of a tenant in a class, evaluated by the class's objectives."""

    slo_class: str
    tenant: str
    requests: int
    unserved_requests: int
    """Rejected, failed, or aborted."""
    attainment: float


def attainment_by_class(result: RunResult) -> tuple[ClassAttainment, ...]:
    """One for each class and tenant with requests, sorted."""
    outcomes_by_class: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in result.outcomes:
        outcomes_by_class.setdefault((outcome.slo_class, outcome.tenant), []).append(outcome)
    return tuple(
        ClassAttainment(
            slo_class=slo_class,
            tenant=tenant,
            requests=len(several),
            unserved_requests=sum(not outcome.ok for outcome in several),
            attainment=sum(outcome.slo_met for outcome in several) / len(several),
        )
        for (slo_class, tenant), several in sorted(outcomes_by_class.items())
    )


def run_span_s(outcomes: Sequence[Outcome]) -> float:
    """From the first arrival to the last end, in seconds; 0 without requests."""
    if not outcomes:
        return 0.0
    arrived_at_s = min(outcome.arrived_at_s for outcome in outcomes)
    return max(_ended_at_s(outcome) for outcome in outcomes) - arrived_at_s


def length_notes(results: Iterable[RunResult]) -> Iterator[str]:
    """Notes if a run ends before its fleet is full, or lasts long after its last arrival."""
    results = list(results)
    spans = [_arrivals_in_residences(result.outcomes) for result in results]
    shortest = min((span for span in spans if span > 0), default=inf)
    if shortest < FILLING_RESIDENCES:
        yield (
            f"Requests arrive for only {shortest:.1f} times as long as a request takes in the mean."
            f" A fleet that is too small shows it after {FILLING_RESIDENCES} times: give more"
            " requests."
        )
    max_tail_fraction = max((_tail_fraction(result.outcomes) for result in results), default=0.0)
    if max_tail_fraction > _LONG_TAIL_FRACTION:
        yield (
            f"Up to {max_tail_fraction:.0%} of a run's time is after its last arrival. Goodput and"
            " tokens/s are means over all of it: a longer trace has higher ones."
        )


def _tail_fraction(outcomes: Sequence[Outcome]) -> float:
    if not outcomes:
        return 0.0
    arrivals = [outcome.arrived_at_s for outcome in outcomes]
    total_s = run_span_s(outcomes)
    return 1 - (max(arrivals) - min(arrivals)) / total_s if total_s else 0.0


def _arrivals_in_residences(outcomes: Sequence[Outcome]) -> float:
    """The time of the arrivals over the mean time of a request; infinite if none ended."""
    arrivals = [outcome.arrived_at_s for outcome in outcomes]
    residence_s = mean([outcome.e2e_s for outcome in outcomes if outcome.ok])
    return (max(arrivals) - min(arrivals)) / residence_s if residence_s > 0 else inf


def _ended_at_s(outcome: Outcome) -> float:
    duration_s = outcome.e2e_s if outcome.e2e_s < float("inf") else 0.0
    return outcome.arrived_at_s + duration_s


def offered_rate(result: RunResult) -> float:
    """Offered requests per second, else the rate of arrivals; 0 for fewer than two."""
    if result.offered_per_s is not None:
        return result.offered_per_s
    arrivals = [outcome.arrived_at_s for outcome in result.outcomes]
    return _ratio(len(arrivals) - 1, max(arrivals) - min(arrivals)) if arrivals else 0.0


def scale_objectives(objectives: Objectives, factor: float) -> Objectives:
    """The same objectives, all times `factor`."""
    limits = (objectives.ttft_s, objectives.tpot_s, objectives.e2e_s)
    ttft_s, tpot_s, e2e_s = (None if limit is None else limit * factor for limit in limits)
    return Objectives(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)


def scale_curves_for(study: Study) -> tuple[Curve, ...]:
    """Attainment by scale of the objectives: the given curves, else the shown runs.

    Those are evaluated at the objectives times each of `OBJECTIVE_SCALES`.
    """
    if study.scale_curves or not study.has_objectives:
        return study.scale_curves
    limits = [(scale, scale_objectives(study.objectives, scale)) for scale in OBJECTIVE_SCALES]
    return tuple(
        Curve(
            name=result.name,
            points=tuple((scale, attainment(result.outcomes, limit)) for scale, limit in limits),
        )
        for result in representative_results(study)
    )


def rate_curves_for(study: Study) -> tuple[Curve, ...]:
    """Attainment by rate and device: the given curves, else one for each name."""
    if study.rate_curves or not study.has_objectives:
        return study.rate_curves
    points: dict[str, list[tuple[float, float]]] = {}
    for result in study.results:
        met = attainment(result.outcomes, study.objectives)
        points.setdefault(result.name, []).append((offered_rate(result) / result.devices, met))
    return tuple(
        Curve(name=name, points=tuple(sorted(several)))
        for name, several in points.items()
        if len(several) > 1
    )


def capacity(curve: Curve, target: float) -> float | None:
    """The highest rate per device up to which the target is always met; None without one.

    Linear between the last point that meets it and the next; if all do, the last: a lower bound.
    """
    highest_rate: float | None = None
    previous: tuple[float, float] | None = None
    for rate, met in curve.points:
        if met < target:
            if previous is None:
                return None
            weight = (previous[1] - target) / (previous[1] - met)
            return previous[0] + weight * (rate - previous[0])
        highest_rate, previous = rate, (rate, met)
    return highest_rate


def tradeoffs_for(study: Study) -> tuple[Tradeoff, ...]:
    """The given tradeoffs, else one for each result."""
    if study.tradeoffs:
        return study.tradeoffs
    tradeoffs = []
    for result in study.results:
        summary = summarize(result, study.objectives)
        if summary.tpot.p50 > 0:
            tradeoffs.append(
                Tradeoff(
                    name=result.name,
                    user_tokens_per_s=1 / summary.tpot.p50,
                    device_tokens_per_s=summary.output_tokens_per_device,
                    label=f"{summary.rate_per_s:.3g}/s",
                )
            )
    return tuple(tradeoffs)


def representative_results(study: Study) -> tuple[RunResult, ...]:
    """The runs whose distributions are shown: one for each name.

    All have about the same rate: the highest at which the first name meets the target, else the
    lowest.
    """
    first_named = [result for result in study.results if result.name == study.results[0].name]
    passing = [
        run for run in first_named if attainment(run.outcomes, study.objectives) >= study.target
    ]
    chosen = (
        max(passing, key=offered_rate)
        if passing
        else min(first_named, key=offered_rate, default=None)
    )
    if chosen is None:
        return ()
    rate_per_s = offered_rate(chosen)
    names = dict.fromkeys(result.name for result in study.results)
    return tuple(
        min(
            (result for result in study.results if result.name == name),
            key=lambda result: abs(offered_rate(result) - rate_per_s),
        )
        for name in names
    )


def _latency_quantiles(seconds: Iterable[float]) -> LatencyQuantiles:
    values = sorted(second for second in seconds if second < float("inf"))
    p50, p90, p99 = (quantile(values, q) for q in (0.5, 0.9, 0.99))
    return LatencyQuantiles(mean=mean(values), p50=p50, p90=p90, p99=p99)


def _ratio(amount: float, total: float) -> float:
    return amount / total if total else 0.0
