"""What `baton explain route` shows to a person."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.explain.explain import report_lines
from baton.domain.commands import RequestRecord
from baton.domain.handoff import (
    HandoffMode,
    HitSource,
    LegKind,
    LegTimes,
    PlacementDecision,
    RouteReason,
)
from baton.domain.leg_record import LegOutcome
from baton.domain.request import Phase
from baton.domain.slo import ALL_MET, Slo, SloResult
from baton.domain.value import evolve
from baton.telemetry.requests.request_log import request_report
from tests.cli.as_shown import AsShown, differences
from tests.fakes import request_records

REMOTE = evolve(request_records.PULL, prefill_replica_id="p-1", decode_replica_id="d-1")
LOCAL = evolve(request_records.ALONE, decode_replica_id="d-2")
PULLED = evolve(
    request_records.OPTION,
    prefill_replica_id="p-1",
    decode_replica_id="d-1",
    hit_tokens=3008,
    hit_source=HitSource.REPORTED,
    hit_age_s=0.4,
    queue_s=0.01,
    prefill_s=0.15,
    transfer_s=0.02,
    decode_s=0.03,
    cost_s=1.4,
)
ALONE = evolve(
    request_records.OPTION,
    mode=HandoffMode.LOCAL,
    prefill_replica_id=None,
    decode_replica_id="d-1",
    queue_s=0.0,
    prefill_s=0.61,
    transfer_s=0.0,
    decode_s=0.0,
    interference_s=1.25,
    cost_s=3.06,
)
DECISION = PlacementDecision(
    route=REMOTE, policy="predicted", at_s=10.0003, options=(PULLED, ALONE), options_considered=6
)
PREFILL = evolve(
    request_records.PREFILL,
    leg_id="chatcmpl-r-1-1a2b3c4d~1",
    replica_id="p-1",
    started_at_s=10.0003,
    first_output_at_s=10.1,
    ended_at_s=10.1,
    prompt_tokens=3990,
    cached_tokens=3008,
    engine_times=LegTimes(0.008, 0.09),
)
DECODE = evolve(
    PREFILL,
    leg_id="chatcmpl-r-1-1a2b3c4d~2",
    kind=LegKind.DECODE,
    replica_id="d-1",
    started_at_s=10.1,
    first_output_at_s=10.2,
    last_output_at_s=11.0,
    ended_at_s=11.0,
    fetched_tokens=3990,
    cached_tokens=3989,
    output_tokens=64,
    engine_times=LegTimes(0.068, 0.03),
)
RECORD = evolve(
    request_records.RECORD,
    request_id="chatcmpl-r-1-1a2b3c4d",
    routes=(REMOTE,),
    decisions=(DECISION,),
    prompt_tokens=3990,
    cached_tokens=3008,
    output_tokens=64,
    arrived_at_s=10.0,
    first_token_at_s=10.2,
    last_token_at_s=11.0,
    ended_at_s=11.0,
    prefill_done_at_s=10.1,
    handed_off_blocks=250,
    tenant="acme",
    slo=Slo(name="chat", ttft_s=0.15, tpot_s=0.03),
    slo_result=SloResult(was_served=True, ttft_met=False, tpot_met=True, itl_met=True),
    max_itl_s=0.031,
    gpu_s=0.24,
    legs=(PREFILL, DECODE),
)


def shown(*records: RequestRecord) -> str:
    told = [request_report(record) for record in records]
    return "\n".join(report_lines({"request_id": "r-1", "requests": told}))


def test_the_example_in_the_documents_is_what_is_shown() -> None:
    document = Path(__file__).parents[2] / "docs" / "operations" / "routing.md"
    assert shown(RECORD) in document.read_text(encoding="utf-8")


def test_the_choices_of_a_request_are_one_paragraph_each() -> None:
    text = shown(RECORD, evolve(RECORD, request_id="1_chatcmpl-r-1-1a2b3c4d"))
    assert "\n\n1_chatcmpl-r-1-1a2b3c4d: finished" in text


AGAIN = PlacementDecision(route=LOCAL, policy="predicted", at_s=10.15)
FETCH = evolve(REMOTE, reason=RouteReason.PREFIX_FETCH, prefill_tokens=2992)
UNSERVED = evolve(RECORD, first_token_at_s=None, last_token_at_s=None, output_tokens=0)
CASES = {
    "a prediction that was too short is called so": evolve(RECORD, first_token_at_s=10.4203),
    "a route whose decode replica was chosen again says so": evolve(
        RECORD, routes=(evolve(REMOTE, decode_replica_id="d-9"),)
    ),
    "a route that became quite another says why": evolve(RECORD, routes=(LOCAL,)),
    "a request that was placed again says why and when": evolve(
        RECORD,
        routes=(REMOTE, LOCAL),
        decisions=(DECISION, AGAIN),
        resumes=1,
        resume_reasons=("p-1 was lost",),
    ),
    "each resume has its own reason": evolve(
        RECORD,
        routes=(REMOTE,) * 3,
        decisions=tuple(evolve(DECISION, at_s=at_s) for at_s in (10.0, 10.1, 10.15)),
        resumes=2,
        resume_reasons=("first", "second"),
    ),
    "a request that found no replica again says after what": evolve(
        RECORD, resumes=1, resume_reasons=("p-1 was lost",)
    ),
    "a prefix that is fetched says who prefills what": evolve(
        RECORD, routes=(FETCH,), decisions=(evolve(DECISION, route=FETCH),)
    ),
    "a policy that predicts nothing says so": evolve(
        RECORD, decisions=(evolve(DECISION, policy="random", options=()),)
    ),
    "a request that was refused is one paragraph": evolve(
        RECORD,
        outcome=Phase.SHED,
        reason="the queue is full",
        routes=(),
        decisions=(),
        first_token_at_s=None,
        cached_tokens=None,
    ),
    "every objective that was broken is named with what came": evolve(
        RECORD,
        slo=Slo(name="chat", ttft_s=0.15, tpot_s=0.01, itl_p99_s=0.05),
        slo_result=SloResult(was_served=True, ttft_met=False, tpot_met=False, itl_met=False),
        itl_violations=9,
        max_itl_s=0.3,
    ),
    "a request that was refused says that it was not served": evolve(
        UNSERVED,
        outcome=Phase.SHED,
        slo_result=SloResult(was_served=False, ttft_met=True, tpot_met=True, itl_met=True),
    ),
    "a client that left in time with nothing counts neither way": evolve(
        UNSERVED, outcome=Phase.CANCELLED, slo_result=ALL_MET
    ),
    "a request that met everything is called good": evolve(
        RECORD, slo=Slo(name="chat", ttft_s=0.5), slo_result=ALL_MET
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_another_request_shows_what_is_other_about_it(case: str, as_shown: AsShown) -> None:
    """As lines that differ from what is shown of `RECORD`, which is in the documents."""
    plain, other = shown(RECORD).splitlines(), shown(CASES[case]).splitlines()
    as_shown("explain_route", case, CASES, differences(plain, other))


def test_time_that_was_lost_on_another_replica_is_a_part_of_its_own() -> None:
    again = evolve(DECISION, at_s=10.15)
    lost = evolve(PREFILL, ended_at_s=10.15, first_output_at_s=None, outcome=LegOutcome.FAILED)
    legs = (
        lost,
        evolve(
            PREFILL, route_index=1, started_at_s=10.1503, first_output_at_s=10.18, ended_at_s=10.18
        ),
        evolve(DECODE, route_index=1, started_at_s=10.18),
    )
    resumed = evolve(
        RECORD, decisions=(DECISION, again), routes=(REMOTE, REMOTE), legs=legs, resumes=1
    )
    bars = [line for line in shown(resumed).splitlines() if line.startswith("  lost ")]
    assert [" ".join(line.split()[-3:]) for line in bars] == ["150 ms -"]
