"""The time of one request from arrival to end, phase by phase, without gaps.

Start, first output and end of a leg are the coordinator's times. The engine reports its compute
time, counted back from the first output; the rest of the leg is waiting. Without a report the
predicted compute time is used, and the bars are marked `is_estimated`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from baton.domain.commands import RequestRecord
from baton.domain.handoff import LegKind, RouteOption
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import Phase


class Part(StrEnum):
    """A phase of a request; a metric label."""

    INGRESS_WAIT = "ingress_wait"
    """It waited at the ingress."""
    LOST = "lost"
    """A leg whose work was discarded, or that stopped responding."""
    QUEUE = "queue"
    """It waited in an engine, or was in transit to it."""
    PREFILL = "prefill"
    TRANSFER = "transfer"
    """Its blocks were in transfer, or waited for it."""
    DECODE = "decode"


class Bar(NamedTuple):
    """One stretch of a request's time, in seconds since arrival."""

    part: Part
    replica_id: str
    """Empty at the ingress."""
    from_s: float
    to_s: float
    predicted_s: float | None = None
    """Its predicted duration; None without a prediction."""
    is_estimated: bool = False
    """Whether a prediction, not a report, separates it from its neighbour."""


_INTERRUPTED = frozenset({LegOutcome.FAILED, LegOutcome.TIMED_OUT, LegOutcome.MIGRATED})
_USEFUL_PHASES = frozenset({Phase.FINISHED, Phase.CANCELLED})


def waterfall(record: RequestRecord) -> tuple[Bar, ...]:
    """A record's time in order; each bar begins at the end of the one before."""
    timeline = _Timeline(record)
    lost_placements = _lost_placements(record)
    for leg in record.legs:
        timeline.add_until(Part.INGRESS_WAIT, "", leg.started_at_s)
        if leg.route_index in lost_placements:
            timeline.add_until(Part.LOST, leg.replica_id, leg.ended_at_s)
        else:
            _add_leg(timeline, leg, _prediction(record, leg.route_index))
    timeline.add_until(Part.INGRESS_WAIT, "", record.ended_at_s)
    return tuple(timeline.bars)


def _prediction(record: RequestRecord, placement: int) -> RouteOption | None:
    if placement < len(record.decisions):
        return record.decisions[placement].chosen
    return None


class _Timeline:
    """Bars in order; earlier times than the last end add nothing, so that none overlap."""

    def __init__(self, record: RequestRecord) -> None:
        self.bars: list[Bar] = []
        self._arrived_at_s = record.arrived_at_s
        self._last_end_s = 0.0
        self._end_s = max(0.0, record.ended_at_s - record.arrived_at_s)

    def add_until(
        self,
        part: Part,
        replica_id: str,
        at_s: float,
        *,
        predicted_s: float | None = None,
        is_estimated: bool = False,
    ) -> None:
        """Add a bar that ends at `at_s`, if that is later than the last end."""
        to_s = min(at_s - self._arrived_at_s, self._end_s)
        if to_s > self._last_end_s:
            self.bars.append(
                Bar(
                    part=part,
                    replica_id=replica_id,
                    from_s=self._last_end_s,
                    to_s=to_s,
                    predicted_s=predicted_s,
                    is_estimated=is_estimated,
                )
            )
            self._last_end_s = to_s


def _lost_placements(record: RequestRecord) -> Collection[int]:
    """Placements without output that another placement followed, or that failed."""
    if not record.resumes and record.outcome in _USEFUL_PHASES:
        return ()
    productive = {leg.route_index for leg in record.legs if leg.output_tokens}
    if record.outcome in _USEFUL_PHASES:
        productive.add(len(record.routes) - 1)
    return {leg.route_index for leg in record.legs} - productive


def _add_leg(timeline: _Timeline, leg: LegRecord, option: RouteOption | None) -> None:
    wait_part, compute_part = _leg_parts(leg)
    replica_id, first_at_s = leg.replica_id, leg.first_output_at_s
    if first_at_s is None:
        # The leg ended while it waited or computed; no report says which.
        is_lost = leg.outcome in _INTERRUPTED
        timeline.add_until(
            Part.LOST if is_lost else wait_part,
            replica_id,
            leg.ended_at_s,
            is_estimated=not is_lost,
        )
        return
    waited_s = first_at_s - leg.started_at_s
    predicted = _predicted_s(option, wait_part), _predicted_s(option, compute_part)
    if leg.engine_times is not None:
        compute_s = min(leg.engine_times.compute_s, waited_s)
    else:
        compute_s = waited_s if predicted[1] is None else min(predicted[1], waited_s)
    is_estimated = leg.engine_times is None
    timeline.add_until(
        wait_part,
        replica_id,
        first_at_s - compute_s,
        predicted_s=predicted[0],
        is_estimated=is_estimated,
    )
    timeline.add_until(
        compute_part, replica_id, first_at_s, predicted_s=predicted[1], is_estimated=is_estimated
    )
    if leg.outcome in _INTERRUPTED and leg.last_output_at_s is not None:
        timeline.add_until(Part.DECODE, replica_id, leg.last_output_at_s)
        timeline.add_until(Part.LOST, replica_id, leg.ended_at_s)
    else:
        timeline.add_until(Part.DECODE, replica_id, leg.ended_at_s)


def _leg_parts(leg: LegRecord) -> tuple[Part, Part]:
    if leg.kind is not LegKind.DECODE:
        return Part.QUEUE, Part.PREFILL
    # After a prefix fetch it computes the rest of the prompt. A single missing token is the prefill
    # leg's first output, which a decode step computes.
    fetches_all = leg.fetched_tokens + 1 >= leg.prompt_tokens
    return Part.TRANSFER, Part.DECODE if fetches_all else Part.PREFILL


def _predicted_s(option: RouteOption | None, part: Part) -> float | None:
    if option is None:
        return None
    match part:
        case Part.QUEUE:
            return option.queue_s + option.adapter_load_s
        case Part.PREFILL:
            return option.prefill_s
        case Part.TRANSFER:
            return option.transfer_s
        case Part.DECODE:
            return option.decode_s
        case Part.INGRESS_WAIT | Part.LOST:
            return None
