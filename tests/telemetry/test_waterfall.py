"""Where the time of a request went, as bars without gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.commands import RequestRecord
from baton.domain.handoff import LegKind, LegTimes
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import Phase
from baton.domain.value import evolve
from baton.telemetry.requests.error_budget import ttft_parts
from baton.telemetry.requests.waterfall import Bar, Part, waterfall
from tests.fakes.request_records import DECISION, DECODE, LOCAL, PREFILL, PULL, RECORD


def told(*legs: LegRecord, outcome: Phase = Phase.FINISHED) -> RequestRecord:
    placements = max((leg.route_index for leg in legs), default=-1) + 1
    return evolve(
        RECORD,
        legs=legs,
        outcome=outcome,
        routes=(PULL,) * placements,
        decisions=(DECISION,) * placements,
        resumes=max(0, placements - 1),
    )


def brief(record: RequestRecord) -> list[tuple[str, str, float, float]]:
    return [(str(bar.part), bar.replica_id, bar.from_s, bar.to_s) for bar in waterfall(record)]


def test_a_handoff_is_told_part_by_part_as_its_engines_said() -> None:
    assert waterfall(RECORD) == (
        Bar(Part.INGRESS_WAIT, "", 0.0, 0.25),
        Bar(Part.QUEUE, "p", 0.25, 0.75, 0.5),
        Bar(Part.PREFILL, "p", 0.75, 1.0, 0.125),
        Bar(Part.TRANSFER, "d", 1.0, 1.375, 0.25),
        Bar(Part.DECODE, "d", 1.375, 1.5, 0.0625),
        Bar(Part.DECODE, "d", 1.5, 3.0),
    )


def test_where_an_engine_says_nothing_predictions_part_the_bars_and_they_say_so() -> None:
    silent = told(evolve(PREFILL, engine_times=None), DECODE)
    assert waterfall(silent)[1:4] == (
        Bar(Part.QUEUE, "p", 0.25, 0.875, 0.5, is_estimated=True),
        Bar(Part.PREFILL, "p", 0.875, 1.0, 0.125, is_estimated=True),
        Bar(Part.TRANSFER, "d", 1.0, 1.375, 0.25),
    )


def test_where_nothing_was_predicted_either_all_of_a_wait_counts_as_computing() -> None:
    silent = evolve(told(evolve(PREFILL, engine_times=None)), decisions=())
    assert Bar(Part.PREFILL, "p", 0.25, 1.0, is_estimated=True) in waterfall(silent)


def test_the_rest_of_a_prompt_whose_front_was_fetched_is_prefill() -> None:
    fetched = told(evolve(DECODE, fetched_tokens=4))
    assert [bar.part for bar in waterfall(fetched)][1:3] == [Part.TRANSFER, Part.PREFILL]


def test_a_request_that_was_never_placed_was_held_all_along() -> None:
    refused = evolve(told(outcome=Phase.EVICTED), ended_at_s=107.0)
    assert brief(refused) == [("ingress_wait", "", 0.0, 7.0)]


def test_a_failed_attempt_is_lost_time_and_the_wait_after_it_is_queue_time() -> None:
    broken = evolve(DECODE, outcome=LegOutcome.FAILED, output_tokens=0, ended_at_s=101.25)
    again = evolve(LOCAL, route_index=1, started_at_s=102.0, first_output_at_s=102.5)
    assert brief(told(PREFILL, evolve(broken, first_output_at_s=None), again)) == [
        ("ingress_wait", "", 0.0, 0.25),
        ("lost", "p", 0.25, 1.0),
        ("lost", "d", 1.0, 1.25),
        ("ingress_wait", "", 1.25, 2.0),
        ("queue", "d", 2.0, 2.375),
        ("prefill", "d", 2.375, 2.5),
        ("decode", "d", 2.5, 3.0),
    ]


def test_of_a_stream_that_broke_off_the_time_since_its_last_token_is_lost() -> None:
    broken = evolve(DECODE, outcome=LegOutcome.TIMED_OUT, last_output_at_s=101.75, ended_at_s=102.0)
    again = evolve(LOCAL, route_index=1, started_at_s=102.0, first_output_at_s=102.5)
    assert brief(told(PREFILL, broken, again))[4:7] == [
        ("decode", "d", 1.375, 1.5),
        ("decode", "d", 1.5, 1.75),
        ("lost", "d", 1.75, 2.0),
    ]


def test_a_client_that_leaves_before_the_first_token_loses_nothing() -> None:
    left = evolve(LOCAL, first_output_at_s=None, outcome=LegOutcome.CANCELLED, output_tokens=0)
    assert waterfall(told(left, outcome=Phase.CANCELLED))[1:] == (
        Bar(Part.QUEUE, "d", 1.0, 3.0, is_estimated=True),
    )


def test_a_resumed_request_whose_client_left_did_not_lose_its_last_leg() -> None:
    broken = evolve(LOCAL, outcome=LegOutcome.FAILED, output_tokens=0, ended_at_s=102.0)
    left = evolve(LOCAL, route_index=1, started_at_s=102.0, first_output_at_s=None, output_tokens=0)
    cancelled = told(broken, evolve(left, outcome=LegOutcome.CANCELLED), outcome=Phase.CANCELLED)
    assert brief(cancelled)[1:] == [("lost", "d", 1.0, 2.0), ("queue", "d", 2.0, 3.0)]


def test_a_request_that_failed_lost_what_it_ran_for() -> None:
    failed = evolve(LOCAL, first_output_at_s=None, outcome=LegOutcome.FAILED, output_tokens=0)
    assert brief(told(failed, outcome=Phase.FAILED))[1:] == [("lost", "d", 1.0, 3.0)]


_ROUNDING_S = 1e-6
moments = st.floats(0.0, 50.0)
durations = st.floats(0.0, 1e6)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    """Any record whose legs follow each other; times that engines say may be anything."""
    arrived_at_s = draw(st.floats(0.0, 1e6))
    at_s, placement = arrived_at_s + draw(moments), 0
    legs: list[LegRecord] = []
    for number in range(draw(st.integers(0, 4))):
        placement += bool(legs) and draw(st.booleans())
        kind = draw(st.sampled_from(LegKind))
        first_s, last_s, end_s = at_s + draw(moments), draw(moments), draw(moments)
        tokens = 0 if kind is LegKind.PREFILL else draw(st.integers(0, 3))
        silent = not tokens and draw(st.booleans())
        legs.append(
            evolve(
                PREFILL,
                leg_id=f"r~{number + 1}",
                kind=kind,
                replica_id=draw(st.sampled_from("abc")),
                route_index=placement,
                started_at_s=at_s,
                first_output_at_s=None if silent else first_s,
                last_output_at_s=first_s + last_s if tokens else None,
                ended_at_s=first_s + last_s + end_s,
                fetched_tokens=draw(st.integers(0, 10)),
                output_tokens=tokens,
                engine_times=draw(st.none() | st.builds(LegTimes, durations, durations)),
                outcome=draw(st.sampled_from(LegOutcome)),
            )
        )
        at_s = legs[-1].ended_at_s + draw(moments)
    spoke = [leg.first_output_at_s for leg in legs if leg.output_tokens]
    outcome = draw(st.sampled_from((Phase.FINISHED, Phase.FAILED, Phase.CANCELLED)))
    placed_at_s = {leg.route_index: leg.started_at_s for leg in reversed(legs)}
    record = told(*legs, outcome=outcome)
    return evolve(
        record,
        decisions=tuple(evolve(DECISION, at_s=at_s) for _, at_s in sorted(placed_at_s.items())),
        resume_reasons=("why",) * record.resumes,
        arrived_at_s=arrived_at_s,
        ended_at_s=at_s,
        first_token_at_s=spoke[0] if spoke else None,
    )


@given(records())
def test_bars_leave_no_gap_and_add_up_to_the_time_from_arrival_to_end(
    record: RequestRecord,
) -> None:
    ends_s = 0.0
    for bar in waterfall(record):
        assert bar.from_s == ends_s < bar.to_s
        ends_s = bar.to_s
    assert ends_s == record.ended_at_s - record.arrived_at_s


@given(records())
def test_the_parts_of_a_ttft_add_up_to_it(record: RequestRecord) -> None:
    parts = ttft_parts(record)
    if record.first_token_at_s is None:
        assert parts is None
        return
    assert parts is not None
    assert min(parts.values()) >= 0
    assert abs(sum(parts.values()) - (record.first_token_at_s - record.arrived_at_s)) < 1e-5


@given(records())
def test_no_bar_is_where_no_leg_ran_at_that_time(record: RequestRecord) -> None:
    for bar in waterfall(record):
        if bar.to_s - bar.from_s < _ROUNDING_S:
            continue
        middle_s = record.arrived_at_s + (bar.from_s + bar.to_s) / 2
        runs = [leg for leg in record.legs if leg.started_at_s < middle_s < leg.ended_at_s]
        where = runs[0].replica_id if runs else ""
        assert bar.replica_id == where


def test_an_early_first_token_comes_before_the_transfer_and_the_rest_is_decode() -> None:
    gave = evolve(PREFILL, output_tokens=1, last_output_at_s=101.0)
    rest = evolve(DECODE, prompt_tokens=11, output_tokens=2)
    early = evolve(told(gave, rest), first_token_at_s=101.0)
    parts_in_order = list(dict.fromkeys(bar.part for bar in waterfall(early)))
    assert parts_in_order[-4:] == [Part.QUEUE, Part.PREFILL, Part.TRANSFER, Part.DECODE]
    parts = ttft_parts(early)
    assert parts is not None
    assert (parts["transfer_s"], parts["decode_s"]) == (0.0, 0.0)
    assert sum(parts.values()) == pytest.approx(1.0)


def test_a_decode_leg_that_was_given_up_after_an_early_token_is_time_lost() -> None:
    gave = evolve(PREFILL, output_tokens=1, last_output_at_s=101.0)
    given_up = evolve(
        DECODE,
        outcome=LegOutcome.TIMED_OUT,
        first_output_at_s=None,
        ended_at_s=102.0,
        output_tokens=0,
    )
    local = evolve(
        LOCAL, route_index=1, started_at_s=102.0, first_output_at_s=102.5, output_tokens=2
    )
    record = evolve(told(gave, given_up, local), first_token_at_s=101.0, resumes=1)
    (lost,) = [bar for bar in waterfall(record) if bar.part is Part.LOST]
    assert (lost.from_s, lost.to_s) == (1.0, 2.0)
    assert Part.TRANSFER not in {bar.part for bar in waterfall(record)}
