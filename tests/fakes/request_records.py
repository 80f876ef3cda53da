"""A request that was prefilled on one replica and decoded on another, as its record tells it."""

from __future__ import annotations

from baton.domain.commands import RequestRecord
from baton.domain.handoff import (
    HandoffMode,
    HitSource,
    LegKind,
    LegTimes,
    PlacementDecision,
    Route,
    RouteOption,
    RouteReason,
)
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import Phase
from baton.domain.value import evolve

PULL = Route(
    mode=HandoffMode.PULL,
    prefill_replica_id="p",
    decode_replica_id="d",
    reason=RouteReason.DISAGGREGATED,
)
ALONE = Route(
    mode=HandoffMode.LOCAL,
    prefill_replica_id=None,
    decode_replica_id="d",
    reason=RouteReason.LOCAL_ONLY,
)
OPTION = RouteOption(
    mode=HandoffMode.PULL,
    prefill_replica_id="p",
    decode_replica_id="d",
    hit_tokens=0,
    hit_source=HitSource.NONE,
    hit_age_s=0.0,
    queue_s=0.5,
    prefill_s=0.125,
    transfer_s=0.25,
    decode_s=0.0625,
    interference_s=0.0,
)
DECISION = PlacementDecision(
    route=PULL, policy="predicted", at_s=100.0, options=(OPTION,), options_considered=1
)
PREFILL = LegRecord(
    leg_id="r~1",
    kind=LegKind.PREFILL,
    replica_id="p",
    route_index=0,
    started_at_s=100.25,
    first_output_at_s=101.0,
    last_output_at_s=None,
    ended_at_s=101.0,
    prompt_tokens=10,
    fetched_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    engine_times=LegTimes(0.25, 0.25),
    outcome=LegOutcome.COMPLETED,
)
DECODE = evolve(
    PREFILL,
    leg_id="r~2",
    kind=LegKind.DECODE,
    replica_id="d",
    started_at_s=101.0,
    first_output_at_s=101.5,
    last_output_at_s=103.0,
    ended_at_s=103.0,
    fetched_tokens=10,
    output_tokens=3,
    engine_times=LegTimes(0.25, 0.125),
)
RECORD = RequestRecord(
    request_id="r",
    outcome=Phase.FINISHED,
    reason="stop",
    routes=(PULL,),
    decisions=(DECISION,),
    prompt_tokens=10,
    cached_tokens=0,
    output_tokens=3,
    resumes=0,
    arrived_at_s=100.0,
    first_token_at_s=101.5,
    last_token_at_s=103.0,
    ended_at_s=103.0,
    prefill_done_at_s=101.0,
    handed_off_blocks=1,
    legs=(PREFILL, DECODE),
)
LOCAL = evolve(DECODE, kind=LegKind.LOCAL, fetched_tokens=0)
