"""Reports of ended requests: each is logged once, and the latest are kept.

Rejected requests are lines at DEBUG only: `RejectionLog` sums them up, so that an overload does not
fill the log.
"""

from __future__ import annotations

import logging
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from typing import Protocol, assert_never

from baton.domain.commands import RecordSelection, RequestRecord
from baton.domain.errors import Cause, Rejected
from baton.domain.handoff import PlacementDecision, Route, RouteOption
from baton.domain.leg_record import LegRecord
from baton.domain.request import Phase
from baton.policy.admission.slo_evaluation import tpot_s, ttft_s
from baton.telemetry.logs import log_event
from baton.telemetry.requests.error_budget import (
    missed_objectives,
    objective_rows,
    ttft_parts,
    verdict,
)
from baton.telemetry.requests.waterfall import Bar, waterfall

_LOGGER = logging.getLogger(__name__)
_LEVELS = {Phase.FAILED: logging.WARNING, Phase.EVICTED: logging.DEBUG, Phase.SHED: logging.DEBUG}
"""Of the other phases: INFO."""
RequestReport = dict[str, object]
LOG_PERIOD_S = 10.0
_MINUTE_S = 60.0
_MINUTES = 60
_MAX_REASON_CHARS = 200


class RequestLog:
    """Keeps the latest `capacity` records. Satisfies `ports.Recorder`."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._by_outcome: dict[Phase, int] = {}
        self._resumes = 0

    def record(self, record: RequestRecord) -> None:
        """Log a record and keep it; drops the oldest beyond the capacity."""
        self._records[record.request_id] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)
        self._by_outcome[record.outcome] = self._by_outcome.get(record.outcome, 0) + 1
        self._resumes += record.resumes
        level = _LEVELS.get(record.outcome, logging.INFO)
        if _LOGGER.isEnabledFor(level):
            log_event(_LOGGER, level, "request_ended", headline(record))
        if _LOGGER.isEnabledFor(logging.DEBUG):
            _log_decisions(record)

    def find(self, request_id: str) -> list[RequestRecord]:
        """The records of a request, oldest first; several if it had several choices.

        `request_id` is the client's (X-Request-Id), the response's, or the one in logs.
        """
        names = _id_pattern(request_id)
        return [record for key, record in self._records.items() if names.fullmatch(key)]

    def latest(self, count: int) -> list[RequestRecord]:
        """The last records, oldest first."""
        return list(deque(self._records.values(), maxlen=count))

    def select(self, count: int, order: RecordSelection) -> list[RequestRecord]:
        """At most `count` of the kept records, in that order."""
        newest_first = reversed(self._records.values())
        match order:
            case RecordSelection.LATEST:
                return list(islice(newest_first, count))
            case RecordSelection.MISSED:
                return list(
                    islice(
                        (request for request in newest_first if missed_objectives(request)), count
                    )
                )
            case RecordSelection.SLOWEST:
                return nlargest(count, newest_first, key=slowness)
            case _:
                assert_never(order)

    def totals(self) -> dict[str, int]:
        """Ended requests by outcome since the start, and resumes."""
        return {str(outcome): count for outcome, count in self._by_outcome.items()} | {
            "resumes": self._resumes
        }


def _log_decisions(record: RequestRecord) -> None:
    """Log each placement of an ended request, and the reason of each resume."""
    for number, decision in enumerate(record.decisions):
        option = decision.chosen
        fields = _route(decision.route) | {
            "request_id": record.request_id,
            "placement": number,
            "policy": decision.policy,
            "decided_s": _since(record.arrived_at_s, decision.at_s),
            "considered": decision.options_considered,
            "predicted_ttft_s": None if option is None else _rounded(option.ttft_s),
        }
        log_event(_LOGGER, logging.DEBUG, "route", fields)
    for number, reason in enumerate(record.resume_reasons):
        fields = {"request_id": record.request_id, "placement": number, "reason": reason}
        log_event(_LOGGER, logging.DEBUG, "resume", fields)


def slowness(record: RequestRecord) -> float:
    """TTFT as a multiple of its objective, or in seconds without one.

    Without a first token, the time until the request ended counts.
    """
    took_s = ttft_s(record)
    if took_s is None:
        took_s = record.ended_at_s - record.arrived_at_s
    return took_s / (record.slo.ttft_s or 1.0)


def headline(record: RequestRecord) -> RequestReport:
    """A record as flat plain values for a log line; times are seconds since arrival."""
    route = record.routes[-1] if record.routes else None
    return {
        "request_id": record.request_id,
        "outcome": str(record.outcome),
        "reason": record.reason,
        "mode": None if route is None else str(route.mode),
        "route_reason": None if route is None else str(route.reason),
        "prefill_replica": None if route is None else _prefill_replica(route),
        "decode_replica": None if route is None else route.decode_replica_id,
        "placements": len(record.routes),
        "resumes": record.resumes,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "prefill_done_s": _since(record.arrived_at_s, record.prefill_done_at_s),
        "first_token_s": _since(record.arrived_at_s, record.first_token_at_s),
        "last_token_s": _since(record.arrived_at_s, record.last_token_at_s),
        "ended_s": _since(record.arrived_at_s, record.ended_at_s),
        "handed_off_blocks": record.handed_off_blocks,
        "tenant": record.tenant,
        "slo_class": record.slo.name,
        "verdict": verdict(record),
        "missed": ",".join(missed_objectives(record)),
        "tpot_s": _rounded(tpot_s(record)),
        "worst_gap_s": _rounded(record.max_itl_s),
        "queue_wait_s": _rounded(record.queue_wait_s),
        "gpu_s": _rounded(record.gpu_s),
        "trace_id": None if record.trace is None else record.trace.trace_id,
    } | _prediction_fields(_decision_of_first_token(record), record)


def request_report(record: RequestRecord) -> RequestReport:
    """The headline, objectives, waterfall, legs, and the decision of each placement."""
    first_token_decision = _decision_of_first_token(record)
    decisions: list[RequestReport] = []
    for decision, final_route in zip(record.decisions, record.routes, strict=False):
        report = _decision(decision, final_route, record)
        decisions.append(
            report
            | _prediction_fields(decision, record if decision is first_token_decision else None)
        )
    return headline(record) | {
        "objectives": objective_rows(record),
        "ttft_parts": ttft_parts(record),
        "slowness": round(slowness(record), 6),
        "waterfall": [_bar(bar) for bar in waterfall(record)],
        "legs": [_leg(leg, record) for leg in record.legs],
        "routes": [_route(route) for route in record.routes],
        "resume_reasons": list(record.resume_reasons),
        "decisions": decisions,
    }


# ------------------------------------------------------------------------------------- decisions


def _decision(
    decision: PlacementDecision, final_route: Route, record: RequestRecord
) -> RequestReport:
    chosen = decision.chosen
    return {
        "policy": decision.policy,
        "reason": str(decision.route.reason),
        "decided_s": _since(record.arrived_at_s, decision.at_s),
        "considered": decision.options_considered,
        "route": _route(decision.route),
        "became": _route(final_route),
        "options": [_option(option) | {"chosen": option is chosen} for option in decision.options],
    }


def _option(option: RouteOption) -> RequestReport:
    return {
        "mode": str(option.mode),
        "prefill_replica": option.prefill_replica_id or option.decode_replica_id,
        "decode_replica": option.decode_replica_id,
        "hit_tokens": option.hit_tokens,
        "hit_source": str(option.hit_source),
        "hit_age_s": _rounded(option.hit_age_s),
        "queue_s": _rounded(option.queue_s),
        "load_s": _rounded(option.adapter_load_s),
        "prefill_s": _rounded(option.prefill_s),
        "transfer_s": _rounded(option.transfer_s),
        "decode_s": _rounded(option.decode_s),
        "harm_s": _rounded(option.interference_s),
        "cost_s": _rounded(option.cost_s),
        "missed": _rounded(option.expected_misses),
        "ttft_s": _rounded(option.ttft_s),
        "early": option.is_early_token,
    }


def _route(route: Route) -> RequestReport:
    return {
        "mode": str(route.mode),
        "prefill_replica": _prefill_replica(route),
        "decode_replica": route.decode_replica_id,
        "reason": str(route.reason),
        "prefill_tokens": route.prefill_tokens,
    }


def _prefill_replica(route: Route) -> str:
    return route.prefill_replica_id or route.decode_replica_id


def _decision_of_first_token(record: RequestRecord) -> PlacementDecision | None:
    """The last decision before the first token."""
    if record.first_token_at_s is None:
        return None
    before = [d for d in record.decisions if d.at_s <= record.first_token_at_s]
    return before[-1] if before else None


def _prediction_fields(
    decision: PlacementDecision | None, outcome: RequestRecord | None
) -> RequestReport:
    """Predicted and actual TTFT since the decision, and the error as a fraction of the actual one.

    The error is above 0 if the prediction was too long. Only the decision that led to the first
    token has an actual value.
    """
    option = None if decision is None else decision.chosen
    predicted_s = None if option is None else _rounded(option.ttft_s)
    actual_s = None
    if decision is not None and outcome is not None:
        actual_s = _since(decision.at_s, outcome.first_token_at_s)
    error = None
    if predicted_s is not None and actual_s:
        error = round(predicted_s / actual_s - 1.0, 4)
    return {
        "predicted_ttft_s": predicted_s,
        "actual_ttft_s": actual_s,
        "ttft_error_fraction": error,
    }


# --------------------------------------------------------------------------------- plain values


def _bar(bar: Bar) -> RequestReport:
    return {
        "part": str(bar.part),
        "replica": bar.replica_id or None,
        "from_s": round(bar.from_s, 6),
        "to_s": round(bar.to_s, 6),
        "predicted_s": _rounded(bar.predicted_s),
        "guessed": bar.is_estimated,
    }


def _leg(leg: LegRecord, record: RequestRecord) -> RequestReport:
    arrived_at_s, times = record.arrived_at_s, leg.engine_times
    return {
        "leg": leg.leg_id,
        "kind": str(leg.kind),
        "replica": leg.replica_id,
        "placement": leg.route_index,
        "end": str(leg.outcome),
        "began_s": _since(arrived_at_s, leg.started_at_s),
        "first_output_s": _since(arrived_at_s, leg.first_output_at_s),
        "ended_s": _since(arrived_at_s, leg.ended_at_s),
        "prompt_tokens": leg.prompt_tokens,
        "fetched_tokens": leg.fetched_tokens,
        "cached_tokens": leg.cached_tokens,
        "output_tokens": leg.output_tokens,
        "engine_queue_s": None if times is None else _rounded(times.queue_s),
        "engine_compute_s": None if times is None else _rounded(times.compute_s),
        "preemptions": None if times is None else times.preemptions,
    }


def _since(from_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - from_s, 6)


def _rounded(value: float | None) -> float | None:
    """Rounded; None for values that JSON cannot express."""
    return round(value, 6) if value is not None and math.isfinite(value) else None


def _id_pattern(request_id: str) -> re.Pattern[str]:
    """Matches internal ids of a request that a caller names `request_id`.

    The API layer adds a kind in front (`chatcmpl-`), and before that the index of a choice (`1_`).
    It adds the index of a prompt behind (`-1`, `_1`), and eight random hex digits at the end. With
    vLLM's Rust frontend, a gate adds two words for tenant and class (`~20d39a8f4884ade880~gold`). A
    mere part of an id does not match: `a` is not `a-b`.

    Source: vLLM 0.32, `InputProcessor.assign_request_id`, `ParentRequest.get_child_info`, and the
    `create_*` methods of its OpenAI serving classes.
    """
    escaped_id = re.escape(request_id)
    return re.compile(
        rf"(?:\d+_)?(?:[a-z]+-)?{escaped_id}(?:~[^~]*~[^~]*|[-_]\d+)?(?:-[0-9a-f]{{8}})?"
    )


class _Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], _Timer]
"""Calls a function after a delay in seconds, as an event loop's `call_later`."""


@dataclass(slots=True)
class _Cause:
    """The rejections of one cause."""

    last: Rejected
    last_at_s: float
    unlogged: int = 0
    by_minute: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MINUTES))
    """Minute and requests, oldest first; minutes without any have no entry."""

    def add(self, error: Rejected, requests: int, now_s: float) -> None:
        """Count requests that are rejected now."""
        self.last, self.last_at_s = error, now_s
        self.unlogged += requests
        minute = int(now_s // _MINUTE_S)
        counted = 0
        if self.by_minute and self.by_minute[-1][0] == minute:
            counted = self.by_minute.pop()[1]
        self.by_minute.append((minute, counted + requests))

    def recent(self, now_s: float) -> int:
        """Requests of the last hour, to the minute."""
        oldest = int(now_s // _MINUTE_S) - _MINUTES
        return sum(requests for minute, requests in self.by_minute if minute > oldest)


class RejectionLog:
    """Rejected requests by cause: a line of the log per period, and counts of the last hour.

    Theory of operation. The first rejection is logged at once, and a timer starts. At the end of
    each period each cause with new rejections is one line; a period without any stops the timer.
    Causes come from an enumeration, so that lines and memory are bounded for any load.
    """

    def __init__(
        self, *, now_s: Callable[[], float], call_later: CallLater, period_s: float = LOG_PERIOD_S
    ) -> None:
        self._now_s = now_s
        self._call_later = call_later
        self._period_s = period_s
        self._causes: dict[Cause, _Cause] = {}
        self._timer: _Timer | None = None

    def record(self, error: Rejected, *, requests: int = 1) -> None:
        """Count requests that were answered with this error."""
        now_s = self._now_s()
        if (cause := self._causes.get(error.cause)) is None:
            cause = self._causes[error.cause] = _Cause(error, now_s)
        cause.add(error, requests, now_s)
        if self._timer is None:
            self._flush()
            self._start_timer()

    def rows(self) -> list[dict[str, object]]:
        """One per cause with rejections in the last hour: count, and age and reason of the last."""
        now_s = self._now_s()
        return [
            {
                "cause": str(name),
                "status": cause.last.http_status,
                "requests": recent,
                "last_age_s": round(now_s - cause.last_at_s, 1),
                "reason": cause.last.reason[:_MAX_REASON_CHARS],
            }
            for name, cause in sorted(self._causes.items())
            if (recent := cause.recent(now_s))
        ]

    def close(self) -> None:
        """Log what is not logged yet, and stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush()

    def _start_timer(self) -> None:
        self._timer = self._call_later(self._period_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._flush():
            self._start_timer()

    def _flush(self) -> bool:
        """Whether there was anything to log."""
        unlogged = {name: cause for name, cause in self._causes.items() if cause.unlogged}
        for name, cause in sorted(unlogged.items()):
            fields = {
                "cause": str(name),
                "status": cause.last.http_status,
                "requests": cause.unlogged,
                "last_request_id": cause.last.request_id,
                "reason": cause.last.reason[:_MAX_REASON_CHARS],
            }
            cause.unlogged = 0
            log_event(_LOGGER, logging.WARNING, "requests_rejected", fields)
        return bool(unlogged)
