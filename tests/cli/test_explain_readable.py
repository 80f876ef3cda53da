"""What `baton explain route` shows to a person."""

from __future__ import annotations

from pathlib import Path

from baton.cli.explain.explain import report_lines
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
from baton.domain.slo import ALL_MET, Slo, SloResult
from baton.domain.value import evolve
from baton.telemetry.requests.request_log import request_report

REMOTE = Route(
    mode=HandoffMode.PULL,
    prefill_replica_id="p-1",
    decode_replica_id="d-1",
    reason=RouteReason.DISAGGREGATED,
)
LOCAL = Route(
    mode=HandoffMode.LOCAL,
    prefill_replica_id=None,
    decode_replica_id="d-2",
    reason=RouteReason.LOCAL_ONLY,
)
PULLED = RouteOption(
    mode=HandoffMode.PULL,
    prefill_replica_id="p-1",
    decode_replica_id="d-1",
    hit_tokens=3008,
    hit_source=HitSource.REPORTED,
    hit_age_s=0.4,
    queue_s=0.01,
    prefill_s=0.15,
    transfer_s=0.02,
    decode_s=0.03,
    interference_s=0.0,
    cost_s=1.4,
)
ALONE = RouteOption(
    mode=HandoffMode.LOCAL,
    prefill_replica_id=None,
    decode_replica_id="d-1",
    hit_tokens=0,
    hit_source=HitSource.NONE,
    hit_age_s=0.0,
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
PREFILL = LegRecord(
    leg_id="chatcmpl-r-1-1a2b3c4d~1",
    kind=LegKind.PREFILL,
    replica_id="p-1",
    route_index=0,
    started_at_s=10.0003,
    first_output_at_s=10.1,
    last_output_at_s=None,
    ended_at_s=10.1,
    prompt_tokens=3990,
    fetched_tokens=0,
    cached_tokens=3008,
    output_tokens=0,
    engine_times=LegTimes(0.008, 0.09),
    outcome=LegOutcome.COMPLETED,
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
RECORD = RequestRecord(
    request_id="chatcmpl-r-1-1a2b3c4d",
    outcome=Phase.FINISHED,
    reason="stop",
    routes=(REMOTE,),
    decisions=(DECISION,),
    prompt_tokens=3990,
    cached_tokens=3008,
    output_tokens=64,
    resumes=0,
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


def line_with(part: str, *records: RequestRecord) -> str:
    (line,) = [line for line in shown(*records).splitlines() if part in line]
    return line.strip()


def test_the_example_in_the_documents_is_what_is_shown() -> None:
    document = Path(__file__).parents[2] / "docs" / "operations" / "routing.md"
    assert shown(RECORD) in document.read_text(encoding="utf-8")


def test_a_prediction_that_was_too_short_is_called_so() -> None:
    late = evolve(RECORD, first_token_at_s=10.4203)
    assert line_with("TTFT from", late).endswith("actual 420 ms (predicted 50% too short)")


def test_a_route_whose_decode_replica_was_chosen_again_says_so() -> None:
    changed = evolve(RECORD, routes=(evolve(REMOTE, decode_replica_id="d-9"),))
    assert line_with("changed", changed) == (
        "route changed: decoded on d-9, not d-1: the decode replica is chosen again at the handoff"
    )


def test_a_route_that_became_quite_another_says_why() -> None:
    changed = evolve(RECORD, routes=(LOCAL,))
    assert line_with("changed", changed) == "route changed: p-1 -> d-1 became d-2, local_only"


def test_a_request_that_was_placed_again_says_why_and_when() -> None:
    again = PlacementDecision(route=LOCAL, policy="predicted", at_s=10.15)
    resumed = evolve(
        RECORD,
        routes=(REMOTE, LOCAL),
        decisions=(DECISION, again),
        resumes=1,
        resume_reasons=("p-1 was lost",),
    )
    assert "resumes: 1" in shown(resumed)
    assert line_with("placement 1", resumed) == "placement 1 of 2"
    assert line_with("placement 2", resumed) == "placement 2 of 2, because p-1 was lost"
    assert line_with("150 ms after", resumed) == (
        "policy predicted, 150 ms after arrival: d-2, local_only"
    )
    assert [line.strip() for line in shown(resumed).splitlines() if "TTFT from" in line] == [
        "TTFT from then on: predicted 210 ms, actual no first token",
        "TTFT from then on: predicted nothing, actual 50 ms",
    ]


def test_each_resume_has_its_own_reason() -> None:
    decisions = tuple(evolve(DECISION, at_s=at_s) for at_s in (10.0, 10.1, 10.15))
    resumed = evolve(
        RECORD,
        routes=(REMOTE,) * 3,
        decisions=decisions,
        resumes=2,
        resume_reasons=("first", "second"),
    )
    assert line_with("placement 2", resumed).endswith("because first")
    assert line_with("placement 3", resumed).endswith("because second")


def test_a_request_that_found_no_replica_again_says_after_what() -> None:
    lost = evolve(RECORD, resumes=1, resume_reasons=("p-1 was lost",))
    assert shown(lost).endswith("\n\nnot placed again after: p-1 was lost")
    assert "because" not in shown(lost)


def test_a_prefix_that_is_fetched_says_who_prefills_what() -> None:
    fetch = evolve(REMOTE, reason=RouteReason.PREFIX_FETCH, prefill_tokens=2992)
    fetched = evolve(RECORD, routes=(fetch,), decisions=(evolve(DECISION, route=fetch),))
    assert line_with("rest", fetched) == "p-1 prefills the first 2992 tokens, d-1 the rest"


def test_a_policy_that_predicts_nothing_says_so() -> None:
    plain = evolve(RECORD, decisions=(evolve(DECISION, policy="random", options=()),))
    assert line_with("options:", plain) == "options: none kept, this policy predicts nothing"
    assert line_with("TTFT from", plain).endswith("predicted nothing, actual 200 ms")


def test_a_request_that_was_refused_is_one_paragraph() -> None:
    refused = evolve(
        RECORD,
        outcome=Phase.SHED,
        reason="the queue is full",
        routes=(),
        decisions=(),
        first_token_at_s=None,
        cached_tokens=None,
    )
    text = shown(refused)
    assert "placement" not in text
    assert line_with("shed", refused).endswith("shed (the queue is full)")
    assert line_with("tokens:", refused) == "tokens: 3990 prompt (unknown cached), 64 output"
    assert line_with("no first token", refused) == "no first token in 1 s"


def test_the_choices_of_a_request_are_one_paragraph_each() -> None:
    text = shown(RECORD, evolve(RECORD, request_id="1_chatcmpl-r-1-1a2b3c4d"))
    assert "\n\n1_chatcmpl-r-1-1a2b3c4d: finished" in text


def test_every_objective_that_was_broken_is_named_with_what_came() -> None:
    slo = Slo(name="chat", ttft_s=0.15, tpot_s=0.01, itl_p99_s=0.05)
    judgement = SloResult(was_served=True, ttft_met=False, tpot_met=False, itl_met=False)
    broken = evolve(RECORD, slo=slo, slo_result=judgement, itl_violations=9, max_itl_s=0.3)
    assert line_with("class chat", broken) == (
        "class chat of tenant acme: missed: TTFT 200 ms, promised 150 ms;"
        " TPOT 12.7 ms, promised 10 ms; 9 gaps above 50 ms, 0 allowed"
    )


def test_a_request_that_was_refused_says_that_it_was_not_served() -> None:
    refused = evolve(
        RECORD,
        outcome=Phase.SHED,
        first_token_at_s=None,
        last_token_at_s=None,
        output_tokens=0,
        slo_result=SloResult(was_served=False, ttft_met=True, tpot_met=True, itl_met=True),
    )
    assert line_with("class chat", refused).endswith("missed: not served")
    assert "TTFT: " not in shown(refused)


def test_a_client_that_left_in_time_with_nothing_counts_neither_way() -> None:
    left = evolve(
        RECORD,
        outcome=Phase.CANCELLED,
        first_token_at_s=None,
        last_token_at_s=None,
        output_tokens=0,
        slo_result=SloResult(was_served=True, ttft_met=True, tpot_met=True, itl_met=True),
    )
    assert line_with("class chat", left).endswith("tenant acme: excluded")


def test_a_request_that_met_everything_is_called_good() -> None:
    good = evolve(RECORD, slo=Slo(name="chat", ttft_s=0.5), slo_result=ALL_MET)
    assert line_with("class chat", good).endswith("tenant acme: good")


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
