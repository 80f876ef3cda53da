"""Where the time of one request went, phase by phase, without gaps from its arrival to its end.

When a leg began, first spoke and was over is known, by the coordinator's clock. How long its engine
then computed is what the engine said, counted back from the first output, so that the rest, the way
there and back among it, is time that the leg waited. Where an engine says nothing, what was
predicted for computing is taken to have been right, and the bars say so (`is_estimated`).
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
    """What a request was doing (a metric label, hence an enum)."""

    INGRESS_WAIT = "ingress_wait"
    """It waited at the ingress for its turn."""
    LOST = "lost"
    """A leg of it ran that came to nothing, or said nothing any more."""
    QUEUE = "queue"
    """It waited in an engine, or was on its way there."""
    PREFILL = "prefill"
    TRANSFER = "transfer"
    """Its blocks were on their way, or waited for their turn."""
    DECODE = "decode"


class Bar(NamedTuple):
    """One stretch of a request's time."""

    part: Part
    replica_id: str
    """Where; empty at the ingress."""
    from_s: float
    """Since arrival, as is the next."""
    to_s: float
    predicted_s: float | None = None
    """How long it was predicted to take; None where nothing was."""
    is_estimated: bool = False
    """Whether nobody said where it parts from its neighbour: predictions part them."""


_INTERRUPTED = frozenset({LegOutcome.FAILED, LegOutcome.TIMED_OUT, LegOutcome.MIGRATED})
_USEFUL_PHASES = frozenset({Phase.FINISHED, Phase.CANCELLED})


def waterfall(record: RequestRecord) -> tuple[Bar, ...]:
    """A record's time in order, each bar beginning where the one before it ends."""
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
    """What was predicted for a placement; None where nothing was."""
    if placement < len(record.decisions):
        return record.decisions[placement].chosen
    return None


class _Timeline:
    """Bars in order; times before the last one's end add nothing, so that none overlap."""

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
        """Add a bar to a moment of the coordinator's clock, if that is later than the last one."""
        to_s = min(at_s - self._arrived_at_s, self._end_s)
        if to_s > self._last_end_s:
            self.bars.append(
                Bar(part, replica_id, self._last_end_s, to_s, predicted_s, is_estimated)
            )
            self._last_end_s = to_s


def _lost_placements(record: RequestRecord) -> Collection[int]:
    """Those that gave no token to the client and after which it was placed anew, or failed."""
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
        # Its request ended, or it was given up, while it waited, or computed: nobody said which.
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
    """What a leg does until it computes, and what it then does until its first output."""
    if leg.kind is not LegKind.DECODE:
        return Part.QUEUE, Part.PREFILL
    # Where only the front of its prompt is fetched, it computes the rest; one token more than were
    # fetched, which the prefill leg gave, is what each step of decode computes.
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
