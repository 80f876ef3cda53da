"""What a request was promised and got, as its story tells it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.commands import RequestRecord
from baton.domain.handoff import Decision, HandoffMode, HitSource, Option, Route, RouteReason
from baton.domain.request import Phase
from baton.domain.slo import Judgement, Slo
from baton.telemetry.promises import missed, objectives, ttft_parts
from baton.telemetry.records import headline

PULL = Route(
    mode=HandoffMode.PULL,
    prefill_replica_id="p",
    decode_replica_id="d",
    reason=RouteReason.DISAGGREGATED,
)
RECORD = RequestRecord(
    request_id="r",
    outcome=Phase.FINISHED,
    reason="stop",
    routes=(PULL,),
    decisions=(),
    prompt_tokens=10,
    cached_tokens=0,
    output_tokens=3,
    resumes=0,
    arrived_at_s=100.0,
    first_token_at_s=101.0,
    last_token_at_s=101.5,
    ended_at_s=102.0,
    prefill_done_at_s=None,
    handed_off_blocks=0,
)


def decision(at_s: float, *, prefill_s: float = 0.125, decode_s: float = 0.0625) -> Decision:
    option = Option(
        mode=HandoffMode.PULL,
        prefill_replica_id="p",
        decode_replica_id="d",
        hit_tokens=0,
        hit_source=HitSource.NONE,
        hit_age_s=0.0,
        queue_s=0.0,
        prefill_s=prefill_s,
        transfer_s=0.0,
        decode_s=decode_s,
        harm_s=0.0,
    )
    return Decision(route=PULL, policy="predicted", at_s=at_s, options=(option,), considered=1)


SECONDS = st.floats(0.0, 5.0)


@given(
    spent_s=st.tuples(SECONDS, st.none() | SECONDS, SECONDS, st.none() | SECONDS),
    predicted_s=st.tuples(SECONDS, SECONDS),
)
def test_the_parts_of_a_ttft_add_up_to_it(
    spent_s: tuple[float, float | None, float, float | None], predicted_s: tuple[float, float]
) -> None:
    held_s, lost_s, engine_s, rest_s = spent_s
    prefill_s, decode_s = predicted_s
    placed = [decision(100.0 + held_s, prefill_s=prefill_s, decode_s=decode_s)]
    if lost_s is not None:
        placed.append(replace(placed[0], at_s=placed[0].at_s + lost_s))
    done_at_s = placed[-1].at_s + engine_s
    told = replace(
        RECORD,
        decisions=tuple(placed),
        prefill_done_at_s=None if rest_s is None else done_at_s,
        first_token_at_s=done_at_s + (rest_s or 0.0),
    )
    parts = ttft_parts(told)
    assert parts is not None
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(done_at_s + (rest_s or 0.0) - 100.0, abs=1e-5)


def test_what_a_handoff_took_is_split_where_the_prompt_was_done() -> None:
    told = replace(RECORD, decisions=(decision(100.25),), prefill_done_at_s=100.75)
    assert ttft_parts(told) == {
        "held_s": 0.25,
        "lost_s": 0.0,
        "queue_s": 0.375,
        "prefill_s": 0.125,
        "transfer_s": 0.1875,
        "decode_s": 0.0625,
    }


def test_a_prompt_that_was_done_before_the_last_placement_is_not_of_it() -> None:
    made = (decision(100.0), decision(100.5))
    parts = ttft_parts(replace(RECORD, decisions=made, prefill_done_at_s=100.25))
    assert parts is not None
    assert (parts["lost_s"], parts["prefill_s"], parts["transfer_s"]) == (0.5, 0.125, 0.0)


def test_without_a_first_token_there_are_no_parts() -> None:
    assert ttft_parts(replace(RECORD, first_token_at_s=None, decisions=(decision(100.0),))) is None


def test_a_policy_that_predicts_nothing_leaves_the_queue_within_the_prefill() -> None:
    made = replace(decision(100.0), options=())
    parts = ttft_parts(replace(RECORD, decisions=(made,)))
    assert parts is not None
    assert (parts["queue_s"], parts["prefill_s"]) == (0.0, 1.0)


def test_only_what_is_promised_is_an_objective() -> None:
    told = replace(RECORD, slo=Slo(name="chat", tpot_s=0.5))
    assert objectives(told) == [
        {"objective": "tpot", "promised_s": 0.5, "got_s": 0.25, "met": True}
    ]


def test_slow_gaps_are_told_with_how_many_were_allowed() -> None:
    told = replace(RECORD, slo=Slo(itl_p99_s=0.5), output_tokens=301, slow_gaps=2, worst_gap_s=0.7)
    (row,) = objectives(told)
    assert (row["got_s"], row["slow_gaps"], row["allowed_gaps"]) == (0.7, 2, 3)


def test_the_headline_says_whose_it_was_and_how_it_was_judged() -> None:
    judgement = Judgement(served=False, ttft_met=False, tpot_met=True, itl_met=True)
    told = headline(
        replace(
            RECORD, tenant="acme", slo=Slo(name="chat"), judgement=judgement, held_s=0.5, gpu_s=2.0
        )
    )
    assert (told["tenant"], told["slo_class"]) == ("acme", "chat")
    assert (told["verdict"], told["missed"]) == ("missed", "served,ttft")
    assert (told["held_s"], told["gpu_s"], told["tpot_s"]) == (0.5, 2.0, 0.25)


def test_each_objective_that_was_broken_is_named() -> None:
    none_met = Judgement(served=False, ttft_met=False, tpot_met=False, itl_met=False)
    assert missed(replace(RECORD, judgement=none_met)) == ("served", "ttft", "tpot", "itl")
    assert missed(RECORD) == ()
