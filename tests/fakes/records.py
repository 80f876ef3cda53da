"""What is kept of a request and of its legs, for tests that care about one or two fields."""

from __future__ import annotations

from baton.domain.commands import RequestRecord
from baton.domain.handoff import LegKind
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import Phase
from baton.domain.value import evolve

_REQUEST = RequestRecord(
    request_id="r",
    outcome=Phase.FINISHED,
    reason="stop",
    routes=(),
    decisions=(),
    prompt_tokens=3,
    cached_tokens=None,
    output_tokens=2,
    resumes=0,
    arrived_at_s=10.0,
    first_token_at_s=10.5,
    last_token_at_s=11.0,
    ended_at_s=11.0,
    prefill_done_at_s=None,
    handed_off_blocks=0,
)
_LEG = LegRecord(
    leg_id="r#1",
    kind=LegKind.PREFILL,
    replica_id="p",
    route_index=0,
    started_at_s=10.0,
    first_output_at_s=10.2,
    last_output_at_s=None,
    ended_at_s=10.2,
    prompt_tokens=3,
    fetched_tokens=0,
    cached_tokens=None,
    output_tokens=0,
    engine_times=None,
    outcome=LegOutcome.COMPLETED,
)


def request_record(**changes: object) -> RequestRecord:
    """One that finished within a second."""
    return evolve(_REQUEST, **changes)  # type: ignore[arg-type]  # fields of it


def leg_record(**changes: object) -> LegRecord:
    """A prefill leg."""
    return evolve(_LEG, **changes)  # type: ignore[arg-type]  # likewise
