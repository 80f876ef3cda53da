"""The metrics of one run, and whether they are valid.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py, `calculate_metrics`), except
that latencies count from when a request was due. Latencies from when it was sent are given, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

from baton.bench.client.samples import LATE_SEND_THRESHOLD_S, RequestSample
from baton.bench.driver import LoadResult
from baton.bench.load import LoadPlan
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.simulator.outcome import Objectives, mean, quantile

MAX_LATE_FRACTION = 0.01
"""Of requests; with more, latencies describe the client."""
MAX_LAG_S = 0.02
"""Of the client's event loop, at the 99th percentile."""
MAX_BUSY_FRACTION = 0.9
"""Of a core; above, the client is the bottleneck."""

_MIN_DECODED_TOKENS = 2
"""Fewer tokens have no time between tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Statistics of some values; all nan without values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    maximum: float
    count: int


def distribution(values: Iterable[float]) -> Distribution:
    """Quantiles with linear interpolation, as numpy's."""
    ordered = sorted(values)
    p50, p90, p95, p99, p999, maximum = (
        quantile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
    )
    return Distribution(
        mean=mean(ordered),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        maximum=maximum,
        count=len(ordered),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SloObjectives:
    """Objectives by class."""

    objectives: Mapping[str, Objectives] = field(default_factory=lambda: MappingProxyType({}))
    """By class; those of `default` apply to other classes."""
    target: float = 0.99

    @property
    def has_objectives(self) -> bool:
        """Whether there is any objective."""
        return bool(self.objectives)

    def is_met_by(self, sample: RequestSample) -> bool:
        """Whether a request met its objectives, if its class has any."""
        limits = self.objectives.get(sample.slo_class, self.objectives.get(DEFAULT_CLASS))
        return sample.ok and (limits is None or limits.are_met(sample.to_outcome()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMetrics:
    """The requests of one class."""

    slo_class: str
    requests: int
    met_requests: int
    attainment: float
    goodput_per_s: float
    ttft: Distribution
    tpot: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMetrics:
    """How well the client kept up."""

    late_sends: int
    send_lateness: Distribution
    loop_lag: Distribution
    """Of its event loop: reads may be late by as much."""
    busy_fraction: float
    """Of a core, by the busiest process, over the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkMetrics:
    """The metrics of one run."""

    requests: int
    """Measured: without the warm-up."""
    completed: int
    failed: int
    unfinished: int
    """In flight or not sent when the run was stopped; not in other counts."""
    dropped_turns: int
    warm_up_requests: int
    window_start_s: float
    """When the first measured request was due, since the run began."""
    window_end_s: float
    offered_per_s: float
    """The rate at which measured requests were due."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft: Distribution
    """Since due, like `e2e`."""
    ttft_from_send: Distribution
    tpot: Distribution
    itl: Distribution
    """Between pieces, of all answers together; a piece may be several tokens."""
    e2e: Distribution
    e2e_from_send: Distribution
    met_requests: int
    attainment: float
    """Of all measured requests; failed requests miss."""
    goodput_per_s: float
    classes: tuple[ClassMetrics, ...]
    failures: Mapping[str, int]
    failure_kinds: Mapping[str, int]
    truncated_prompts: int
    skipped_too_long: int
    short_answers: int
    prompt_length_mismatches: int
    """Prompts whose length differs from the requested length."""
    client: ClientMetrics
    is_partial: bool
    invalid_reasons: tuple[str, ...]
    """Why the figures describe the client; empty for a valid run."""

    @property
    def window_s(self) -> float:
        """The time over which rates are counted."""
        return self.window_end_s - self.window_start_s


def calculate_metrics(
    load_result: LoadResult, plan: LoadPlan, slo: SloObjectives
) -> BenchmarkMetrics:
    """The metrics of a run."""
    measured = measured_samples(load_result, plan)
    completed = [sample for sample in measured if sample.ok]
    from_s = min((sample.due_s for sample in measured), default=0.0)
    until_s = max((sample.completed_s for sample in measured), default=from_s)
    window_s = until_s - from_s
    met_requests = sum(slo.is_met_by(sample) for sample in measured)
    output = sum(sample.output_tokens for sample in completed)
    prompts = sum(sample.prompt_tokens for sample in completed)
    last_due_s = max((sample.due_s for sample in measured), default=from_s)
    client = _client_metrics(load_result, measured)
    return BenchmarkMetrics(
        requests=len(measured),
        completed=len(completed),
        failed=len(measured) - len(completed),
        unfinished=load_result.unfinished,
        dropped_turns=load_result.dropped_turns,
        warm_up_requests=len(load_result.samples) - len(measured),
        window_start_s=from_s,
        window_end_s=until_s,
        offered_per_s=_ratio(len(measured) - 1, last_due_s - from_s),
        requests_per_s=_ratio(len(completed), window_s),
        output_tokens_per_s=_ratio(output, window_s),
        total_tokens_per_s=_ratio(prompts + output, window_s),
        prompt_tokens=prompts,
        output_tokens=output,
        cached_tokens=sum(sample.cached_tokens for sample in completed),
        ttft=distribution(sample.ttft_s for sample in completed),
        ttft_from_send=distribution(sample.ttft_from_send_s for sample in completed),
        tpot=distribution(
            sample.tpot_s for sample in completed if sample.output_tokens >= _MIN_DECODED_TOKENS
        ),
        itl=distribution(chain.from_iterable(sample.gaps_s for sample in completed)),
        e2e=distribution(sample.e2e_s for sample in completed),
        e2e_from_send=distribution(sample.e2e_s - sample.send_delay_s for sample in completed),
        met_requests=met_requests,
        attainment=met_requests / len(measured) if measured else 0.0,
        goodput_per_s=_ratio(met_requests, window_s),
        classes=_class_metrics(measured, slo, window_s),
        failures=_count_values(sample.failure for sample in measured),
        failure_kinds=_count_values(sample.failure_kind for sample in measured),
        truncated_prompts=load_result.truncated_prompts,
        skipped_too_long=load_result.skipped_too_long,
        short_answers=sum(sample.is_short for sample in measured),
        prompt_length_mismatches=sum(
            0 < sample.requested_prompt_tokens != sample.prompt_tokens for sample in completed
        ),
        client=client,
        is_partial=load_result.stopped,
        invalid_reasons=tuple(_invalid_reasons(client, measured)),
    )


def measured_samples(load_result: LoadResult, plan: LoadPlan) -> list[RequestSample]:
    """Samples after the warm-up."""
    return [
        sample
        for sample in load_result.samples
        if plan.is_measured(sample.request_index, sample.due_s)
    ]


def _client_metrics(load_result: LoadResult, measured: Sequence[RequestSample]) -> ClientMetrics:
    return ClientMetrics(
        late_sends=sum(sample.is_late for sample in measured),
        send_lateness=distribution(sample.send_delay_s for sample in measured),
        loop_lag=distribution(load_result.loop_lags_s),
        busy_fraction=load_result.busy_fraction,
    )


def _invalid_reasons(client: ClientMetrics, measured: Sequence[RequestSample]) -> Iterable[str]:
    if not measured:
        yield "no request of the measured window has ended"
        return
    if client.late_sends > MAX_LATE_FRACTION * len(measured):
        yield (
            f"the client sent {client.late_sends} of {len(measured)} requests more than"
            f" {LATE_SEND_THRESHOLD_S * 1000:g} ms after they were due, at worst by"
            f" {client.send_lateness.maximum:.3f} s: its own delay is in their latencies"
        )
    if client.loop_lag.p99 > MAX_LAG_S:
        yield (
            f"the client read late: its event loop was {client.loop_lag.p99 * 1000:.0f} ms behind"
            f" at the 99th percentile, expected {MAX_LAG_S * 1000:g} ms"
        )
    if client.busy_fraction > MAX_BUSY_FRACTION:
        yield (
            f"a client process used {client.busy_fraction:.0%} of a core, expected at most"
            f" {MAX_BUSY_FRACTION:.0%}: it may not have sent and read as fast as the endpoint"
            " could"
        )


def _class_metrics(
    measured: Sequence[RequestSample], slo: SloObjectives, window_s: float
) -> tuple[ClassMetrics, ...]:
    by_class: dict[str, list[RequestSample]] = {}
    for sample in measured:
        by_class.setdefault(sample.slo_class, []).append(sample)
    metrics = []
    for name, samples in sorted(by_class.items()):
        met_requests = sum(slo.is_met_by(sample) for sample in samples)
        completed = [sample for sample in samples if sample.ok]
        metrics.append(
            ClassMetrics(
                slo_class=name,
                requests=len(samples),
                met_requests=met_requests,
                attainment=met_requests / len(samples),
                goodput_per_s=_ratio(met_requests, window_s),
                ttft=distribution(sample.ttft_s for sample in completed),
                tpot=distribution(
                    sample.tpot_s
                    for sample in completed
                    if sample.output_tokens >= _MIN_DECODED_TOKENS
                ),
            )
        )
    return tuple(metrics)


def _count_values(values: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(value for value in values if value is not None).most_common())


def _ratio(amount: float, total: float) -> float:
    return amount / total if total > 0 else 0.0
