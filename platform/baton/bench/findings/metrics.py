"""What one run amounts to, and whether its figures may be believed.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py, `calculate_metrics`) but
where said: latencies count from when a request was due, and the same from when it was sent stands
beside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

from baton.bench.client.samples import Sample
from baton.bench.driver import Driven
from baton.bench.load import Plan
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.simulator.outcome import Objectives, mean, quantile

LATE_S = 0.02
"""A send this much behind its time counts as late: about one step of an engine."""
MOST_LATE = 0.01
"""Of the requests may be late; beyond that latencies tell of the client."""
MOST_LAG_S = 0.02
"""By which the client may read late, at the 99th percentile."""
MOST_BUSY = 0.9
"""Of a core may a client be busy; beyond that it is what is measured."""

_DECODES = 2
"""An answer with fewer tokens has no time between tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where some values lie; all nan when there are none."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    most: float
    count: int


def spread(values: Iterable[float]) -> Spread:
    """Quantiles, linear between neighbours as numpy's."""
    ordered = sorted(values)
    p50, p90, p95, p99, p999, most = (
        quantile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
    )
    return Spread(
        mean=mean(ordered),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        most=most,
        count=len(ordered),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What requests are promised, each class something of its own."""

    objectives: Mapping[str, Objectives] = field(default_factory=lambda: MappingProxyType({}))
    """By class; those of `default` hold for classes that are not named."""
    target: float = 0.99
    """The share that shall meet them."""

    @property
    def made(self) -> bool:
        """Whether anything is promised."""
        return bool(self.objectives)

    def met(self, sample: Sample) -> bool:
        """Whether a request got all it was promised; nothing is promised to unnamed classes."""
        limits = self.objectives.get(sample.slo_class, self.objectives.get(DEFAULT_CLASS))
        return sample.ok and (limits is None or limits.met(sample.outcome()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """The requests of one class."""

    slo_class: str
    requests: int
    met: int
    attainment: float
    goodput_per_s: float
    ttft: Spread
    tpot: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFigures:
    """How well the client itself kept up."""

    late_sends: int
    """Requests sent more than `LATE_S` after they were due."""
    late: Spread
    lag: Spread
    """How late its event loop was: so late may answers have been read."""
    busy: float
    """Of a core, by the busiest client process; over the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run."""

    requests: int
    """Measured: without the warm-up."""
    completed: int
    failed: int
    abandoned: int
    """Under way or not sent when the run was stopped, measured or not; in nothing else."""
    dropped_turns: int
    warm_up_requests: int
    from_s: float
    """When the first measured request was due, since the run began."""
    until_s: float
    """When the last of them ended."""
    offered_per_s: float
    """The rate at which measured requests were due."""
    requests_per_s: float
    """That completed."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft: Spread
    """From when they were due, like `e2e`."""
    ttft_from_send: Spread
    tpot: Spread
    itl: Spread
    """Between pieces of an answer, of all answers together; a piece may be several tokens."""
    e2e: Spread
    e2e_from_send: Spread
    met: int
    attainment: float
    """Of all measured requests, failed ones included."""
    goodput_per_s: float
    classes: tuple[ClassFigures, ...]
    failures: Mapping[str, int]
    kinds: Mapping[str, int]
    """Failures by kind: `timeout`, `connection`, `http 429`, `stream`."""
    clipped_prompts: int
    too_long: int
    short_answers: int
    other_lengths: int
    """Prompts that the endpoint counts otherwise than they were asked for."""
    client: ClientFigures
    partial: bool
    """It was stopped."""
    invalid: tuple[str, ...]
    """Why its figures are not the endpoint's; empty for a run to believe."""

    @property
    def window_s(self) -> float:
        """Over this rates are counted."""
        return self.until_s - self.from_s


def figures(driven: Driven, plan: Plan, promise: Promise) -> Figures:
    """A run's figures."""
    measured = measured_of(driven, plan)
    done = [one for one in measured if one.ok]
    from_s = min((one.due_s for one in measured), default=0.0)
    until_s = max((one.end_s for one in measured), default=from_s)
    window_s = until_s - from_s
    met = sum(promise.met(one) for one in measured)
    output = sum(one.output_tokens for one in done)
    prompts = sum(one.prompt_tokens for one in done)
    last_due_s = max((one.due_s for one in measured), default=from_s)
    client = _client(driven, measured)
    return Figures(
        requests=len(measured),
        completed=len(done),
        failed=len(measured) - len(done),
        abandoned=driven.abandoned,
        dropped_turns=driven.dropped_turns,
        warm_up_requests=len(driven.samples) - len(measured),
        from_s=from_s,
        until_s=until_s,
        offered_per_s=_per(len(measured) - 1, last_due_s - from_s),
        requests_per_s=_per(len(done), window_s),
        output_tokens_per_s=_per(output, window_s),
        total_tokens_per_s=_per(prompts + output, window_s),
        prompt_tokens=prompts,
        output_tokens=output,
        cached_tokens=sum(one.cached_tokens for one in done),
        ttft=spread(one.ttft_s for one in done),
        ttft_from_send=spread(one.sent_ttft_s for one in done),
        tpot=spread(one.tpot_s for one in done if one.output_tokens >= _DECODES),
        itl=spread(chain.from_iterable(one.gaps_s for one in done)),
        e2e=spread(one.e2e_s for one in done),
        e2e_from_send=spread(one.e2e_s - one.late_s for one in done),
        met=met,
        attainment=met / len(measured) if measured else 0.0,
        goodput_per_s=_per(met, window_s),
        classes=_classes(measured, promise, window_s),
        failures=_counted(one.failure for one in measured),
        kinds=_counted(one.kind for one in measured),
        clipped_prompts=driven.clipped_prompts,
        too_long=driven.too_long,
        short_answers=sum(one.short for one in measured),
        other_lengths=sum(0 < one.asked_prompt_tokens != one.prompt_tokens for one in done),
        client=client,
        partial=driven.stopped,
        invalid=tuple(_doubts(client, measured)),
    )


def measured_of(driven: Driven, plan: Plan) -> list[Sample]:
    """The requests that are not of the warm-up."""
    return [one for one in driven.samples if plan.counts(one.number, one.due_s)]


def _client(driven: Driven, measured: Sequence[Sample]) -> ClientFigures:
    return ClientFigures(
        late_sends=sum(one.late_s > LATE_S for one in measured),
        late=spread(one.late_s for one in measured),
        lag=spread(driven.lags_s),
        busy=driven.busy,
    )


def _doubts(client: ClientFigures, measured: Sequence[Sample]) -> Iterable[str]:
    if not measured:
        yield "no request of the measured window has ended"
        return
    if client.late_sends > MOST_LATE * len(measured):
        yield (
            f"the client sent {client.late_sends} of {len(measured)} requests more than"
            f" {LATE_S * 1000:g} ms after they were due, at worst by {client.late.most:.3f} s:"
            " its own delay is in their latencies"
        )
    if client.lag.p99 > MOST_LAG_S:
        yield (
            f"the client read late: its event loop was {client.lag.p99 * 1000:.0f} ms behind at the"
            f" 99th percentile, wanted {MOST_LAG_S * 1000:g} ms"
        )
    if client.busy > MOST_BUSY:
        yield (
            f"a client process used {client.busy:.0%} of a core, wanted at most {MOST_BUSY:.0%}:"
            " it may not have sent and read as fast as the endpoint could"
        )


def _classes(
    measured: Sequence[Sample], promise: Promise, window_s: float
) -> tuple[ClassFigures, ...]:
    by_class: dict[str, list[Sample]] = {}
    for one in measured:
        by_class.setdefault(one.slo_class, []).append(one)
    made = []
    for name, several in sorted(by_class.items()):
        met = sum(promise.met(one) for one in several)
        done = [one for one in several if one.ok]
        made.append(
            ClassFigures(
                slo_class=name,
                requests=len(several),
                met=met,
                attainment=met / len(several),
                goodput_per_s=_per(met, window_s),
                ttft=spread(one.ttft_s for one in done),
                tpot=spread(one.tpot_s for one in done if one.output_tokens >= _DECODES),
            )
        )
    return tuple(made)


def _counted(words: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(one for one in words if one is not None).most_common())


def _per(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
