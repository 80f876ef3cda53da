"""The trace of an ended request, as spans of plain values.

```text
chat tiny                      the request; its parent is the caller's span, if any
├── admission                  from arrival to the first placement or the rejection
├── route                      a moment: the choice, and its candidates with their seconds
├── leg prefill, leg decode    the coordinator's view of a leg
│   └── queue, prefill, ...    the engine's view: parts of the waterfall
└── resume                     from the end of a leg to the next placement, with the reason
```

Ids of spans are derived from the trace and the spans' keys. Times are seconds of the record's
clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.domain.commands import RequestRecord
from baton.domain.handoff import PlacementDecision, RouteOption
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.names.trace_context import TraceContext, span_id
from baton.domain.request import Phase
from baton.policy.admission.slo_evaluation import tpot_s, ttft_s
from baton.telemetry.requests.error_budget import missed_objectives, verdict
from baton.telemetry.requests.waterfall import Bar, Part, waterfall

MAX_TEXT_CHARS = 256
"""Of a reason, which may quote an engine's error."""
_OK_PHASES = frozenset({Phase.FINISHED, Phase.CANCELLED})
_OK_LEG_OUTCOMES = frozenset(
    {LegOutcome.COMPLETED, LegOutcome.CANCELLED, LegOutcome.MIGRATED, LegOutcome.REJECTED}
)
Attribute = str | int | float | bool | tuple[str, ...]


class SpanEvent(NamedTuple):
    """A moment within a span."""

    name: str
    at_s: float
    attributes: Mapping[str, Attribute]


class Span(NamedTuple):
    """One stretch of a request's time."""

    name: str
    span_id: str
    parent_id: str
    """Empty without a parent."""
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = {}
    events: tuple[SpanEvent, ...] = ()
    replica_id: str = ""
    """The engine's replica; empty for the coordinator."""
    is_server: bool = False
    """Whether it serves a call of another process."""
    error: str = ""


def request_spans(record: RequestRecord, context: TraceContext, *, model: str) -> tuple[Span, ...]:
    """All spans of an ended request, each after its parent."""
    builder = _SpanBuilder(record, context)
    return (
        builder.root(model),
        builder.admission(),
        *builder.routes(),
        *builder.legs(),
        *builder.resumes(),
    )


class _SpanBuilder:
    def __init__(self, record: RequestRecord, context: TraceContext) -> None:
        self._record = record
        self._context = context
        self._root_id = self._id(record.request_id)

    def _id(self, name: str) -> str:
        return span_id(self._context.trace_id, name)

    def root(self, model: str) -> Span:
        record, operation = self._record, self._context.operation
        return Span(
            name=f"{operation or 'request'} {model}".strip(),
            span_id=self._root_id,
            parent_id=self._context.parent_id,
            start_s=record.arrived_at_s,
            end_s=record.ended_at_s,
            attributes=_gen_ai_attributes(record, operation, model) | _request_attributes(record),
            is_server=True,
            error="" if record.outcome in _OK_PHASES else record.reason[:MAX_TEXT_CHARS],
        )

    def _child(
        self, name: str, key: str, start_s: float, end_s: float, **attributes: Attribute | None
    ) -> Span:
        return Span(
            name=name,
            span_id=self._id(f"{self._record.request_id}/{key}"),
            parent_id=self._root_id,
            start_s=start_s,
            end_s=end_s,
            attributes=_baton_attributes(attributes),
        )

    def admission(self) -> Span:
        record = self._record
        placed_at_s = record.legs[0].started_at_s if record.legs else record.ended_at_s
        return self._child(
            "admission",
            "admission",
            record.arrived_at_s,
            placed_at_s,
            queue_wait_s=record.queue_wait_s,
            admitted=bool(record.legs),
            reason="" if record.legs else record.reason[:MAX_TEXT_CHARS],
        )

    def routes(self) -> Iterator[Span]:
        for number, decision in enumerate(self._record.decisions):
            route, at_s = decision.route, decision.at_s
            span = self._child(
                "route",
                f"route/{number}",
                at_s,
                at_s,
                policy=decision.policy,
                reason=str(route.reason),
                mode=str(route.mode),
                prefill_replica=route.prefill_replica_id or route.decode_replica_id,
                decode_replica=self._decode_replica(number, decision),
                considered=decision.options_considered,
            )
            yield span._replace(
                events=tuple(_candidate_event(option, at_s) for option in decision.options)
            )

    def _decode_replica(self, number: int, decision: PlacementDecision) -> str:
        """The final one: the handoff may choose another replica than the placement."""
        routes = self._record.routes
        final_route = routes[number] if number < len(routes) else decision.route
        return final_route.decode_replica_id

    def legs(self) -> Iterator[Span]:
        bars = waterfall(self._record)
        for leg in self._record.legs:
            span = self._leg(leg)
            yield span
            yield from self._engine_spans(leg, span, bars)

    def _leg(self, leg: LegRecord) -> Span:
        times = leg.engine_times
        span = self._child(
            f"leg {leg.kind}",
            leg.leg_id,
            leg.started_at_s,
            leg.ended_at_s,
            leg=leg.leg_id,
            replica=leg.replica_id,
            end=str(leg.outcome),
            prompt_tokens=leg.prompt_tokens,
            fetched_tokens=leg.fetched_tokens,
            cached_tokens=leg.cached_tokens,
            output_tokens=leg.output_tokens,
            engine_queue_s=None if times is None else times.queue_s,
            engine_compute_s=None if times is None else times.compute_s,
            preemptions=None if times is None else times.preemptions,
        )
        error = "" if leg.outcome in _OK_LEG_OUTCOMES else str(leg.outcome)
        return span._replace(span_id=self._id(leg.leg_id), error=error)

    def _engine_spans(self, leg: LegRecord, span: Span, bars: tuple[Bar, ...]) -> Iterator[Span]:
        arrived_at_s = self._record.arrived_at_s
        for number, bar in enumerate(bars):
            is_inside = (
                leg.started_at_s - arrived_at_s <= bar.from_s
                and bar.to_s <= leg.ended_at_s - arrived_at_s
            )
            if bar.part is Part.INGRESS_WAIT or not is_inside:
                continue
            attributes = {"guessed": bar.is_estimated, "predicted_s": bar.predicted_s}
            yield Span(
                name=str(bar.part),
                span_id=self._id(f"{leg.leg_id}/{number}"),
                parent_id=span.span_id,
                start_s=arrived_at_s + bar.from_s,
                end_s=arrived_at_s + bar.to_s,
                attributes=_baton_attributes(attributes),
                replica_id=leg.replica_id,
            )

    def resumes(self) -> Iterator[Span]:
        record = self._record
        for number, reason in enumerate(record.resume_reasons):
            before = [leg.ended_at_s for leg in record.legs if leg.route_index == number]
            after = [leg.started_at_s for leg in record.legs if leg.route_index == number + 1]
            yield self._child(
                "resume",
                f"resume/{number}",
                before[-1] if before else record.ended_at_s,
                after[0] if after else record.ended_at_s,
                reason=reason[:MAX_TEXT_CHARS],
                placed_again=bool(after),
            )


def _gen_ai_attributes(record: RequestRecord, operation: str, model: str) -> dict[str, Attribute]:
    """Attributes with names of OpenTelemetry.

    Source: OpenTelemetry semantic conventions for generative AI (names of version 1.37 on).
    """
    attributes: dict[str, Attribute] = {
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
    }
    if operation:
        attributes["gen_ai.operation.name"] = operation
    if record.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
    if (first_s := ttft_s(record)) is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_s
    if record.outcome is Phase.FINISHED:
        attributes["gen_ai.response.finish_reasons"] = (record.reason,)
    elif record.outcome is not Phase.CANCELLED:
        attributes["error.type"] = str(record.outcome)
    return attributes


def _request_attributes(record: RequestRecord) -> dict[str, Attribute]:
    return _baton_attributes(
        {
            "request_id": record.request_id,
            "outcome": str(record.outcome),
            "tenant": record.tenant,
            "slo_class": record.slo.name,
            "verdict": verdict(record),
            "missed": missed_objectives(record),
            "ttft_s": ttft_s(record),
            "tpot_s": tpot_s(record),
            "worst_gap_s": record.max_itl_s,
            "queue_wait_s": record.queue_wait_s,
            "resumes": record.resumes,
            "handed_off_blocks": record.handed_off_blocks,
            "gpu_s": record.gpu_s,
        }
    )


def _candidate_event(option: RouteOption, at_s: float) -> SpanEvent:
    attributes: dict[str, Attribute | None] = {
        "mode": str(option.mode),
        "prefill_replica": option.prefill_replica_id or option.decode_replica_id,
        "decode_replica": option.decode_replica_id,
        "hit_tokens": option.hit_tokens,
        "queue_s": option.queue_s,
        "load_s": option.adapter_load_s,
        "prefill_s": option.prefill_s,
        "transfer_s": option.transfer_s,
        "decode_s": option.decode_s,
        "harm_s": option.interference_s,
        "cost_s": option.cost_s,
        "ttft_s": option.ttft_s,
        "early": option.is_early_token,
    }
    return SpanEvent("candidate", at_s, _baton_attributes(attributes))


def _baton_attributes(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {f"baton.{name}": value for name, value in attributes.items() if value is not None}
