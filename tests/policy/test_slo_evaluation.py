"""Judging a request: by what came, and for who left, by what was due."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.commands import RequestRecord
from baton.domain.fleet import StepTotals
from baton.domain.request import Phase
from baton.domain.slo import ALL_MET, NO_SLO, Slo
from baton.domain.value import evolve
from baton.policy.admission.slo_evaluation import evaluate_slo, excluded, tpot_s, ttft_s
from baton.policy.placement.device_seconds import (
    decode_device_s,
    mean_decode_batch,
    prefill_device_s,
)
from tests.fakes.timings import LinearTiming

SLO = Slo(ttft_s=0.5, tpot_s=0.1, itl_p99_s=0.3)
REFUSED = [Phase.SHED, Phase.EVICTED, Phase.FAILED]


def ended(outcome: Phase = Phase.FINISHED, **changes: object) -> RequestRecord:
    """Arrived at 10, first token after 0.5 s, eleven tokens 0.1 s apart: just within `SLO`."""
    record = RequestRecord(
        request_id="r",
        outcome=outcome,
        reason="",
        routes=(),
        decisions=(),
        prompt_tokens=100,
        cached_tokens=0,
        output_tokens=11,
        resumes=0,
        arrived_at_s=10.0,
        first_token_at_s=10.5,
        last_token_at_s=11.5,
        ended_at_s=11.5,
        prefill_done_at_s=None,
        handed_off_blocks=0,
    )
    return evolve(record, **changes)  # type: ignore[arg-type]  # tests name them right


def nothing_came(outcome: Phase, *, after_s: float) -> RequestRecord:
    return ended(
        outcome,
        first_token_at_s=None,
        last_token_at_s=None,
        output_tokens=0,
        ended_at_s=10.0 + after_s,
    )


# ------------------------------------------------------------------------------ who finished


def test_a_pause_in_the_middle_counts_in_the_pace() -> None:
    assert evaluate_slo(ended(last_token_at_s=11.6), SLO) == ALL_MET._replace(tpot_met=False)


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_than_two_tokens_have_no_pace_to_miss(tokens: int) -> None:
    assert evaluate_slo(ended(output_tokens=tokens, ended_at_s=99.0), SLO).tpot_met


@pytest.mark.parametrize(("slow", "met"), [(0, True), (2, True), (3, False)])
def test_one_gap_in_a_hundred_may_be_slow(slow: int, *, met: bool) -> None:
    assert (
        evaluate_slo(ended(output_tokens=201, itl_violations=slow), Slo(itl_p99_s=0.3)).itl_met
        is met
    )


def test_an_objective_that_is_not_set_is_met() -> None:
    assert evaluate_slo(
        ended(first_token_at_s=99.0, last_token_at_s=999.0, itl_violations=9), NO_SLO
    ).is_good


# ------------------------------------------------------------------------------ who was not served


@pytest.mark.parametrize("outcome", REFUSED)
def test_a_rejected_request_is_a_miss_even_without_objectives(outcome: Phase) -> None:
    assert not evaluate_slo(nothing_came(outcome, after_s=0.0), NO_SLO).is_good
    assert not evaluate_slo(ended(outcome), SLO).was_served


def test_a_request_that_failed_before_its_first_token_has_waited_for_it() -> None:
    assert evaluate_slo(nothing_came(Phase.FAILED, after_s=0.4), SLO).ttft_met
    assert not evaluate_slo(nothing_came(Phase.FAILED, after_s=0.6), SLO).ttft_met


# ------------------------------------------------------------------------------ who left


def test_a_client_that_leaves_before_its_first_token_is_due_is_excused() -> None:
    left = nothing_came(Phase.CANCELLED, after_s=0.4)
    assert evaluate_slo(left, SLO).is_good
    assert excluded(left, evaluate_slo(left, SLO))


def test_a_client_that_leaves_after_its_first_token_was_due_is_a_miss() -> None:
    left = nothing_came(Phase.CANCELLED, after_s=0.6)
    assert evaluate_slo(left, SLO) == ALL_MET._replace(ttft_met=False)
    assert not excluded(left, evaluate_slo(left, SLO))


def test_a_client_that_has_read_enough_is_good() -> None:
    left = ended(Phase.CANCELLED, ended_at_s=11.59)
    assert evaluate_slo(left, SLO) == ALL_MET
    assert not excluded(left, evaluate_slo(left, SLO))


def test_a_client_that_leaves_when_the_next_token_was_due_is_a_miss() -> None:
    # Eleven tokens at 0.1 s: the twelfth was due 1.1 s after the first.
    assert evaluate_slo(ended(Phase.CANCELLED, ended_at_s=11.61), SLO) == ALL_MET._replace(
        tpot_met=False
    )


def test_a_disconnect_between_the_first_two_tokens_is_evaluated_by_that_gap() -> None:
    one = ended(Phase.CANCELLED, output_tokens=1, last_token_at_s=10.5)
    assert evaluate_slo(evolve(one, ended_at_s=10.55), SLO).tpot_met
    assert not evaluate_slo(evolve(one, ended_at_s=10.65), SLO).tpot_met


def test_a_stream_that_was_ahead_may_rest_until_its_next_token_is_due() -> None:
    fast = ended(Phase.CANCELLED, last_token_at_s=10.7, ended_at_s=11.5)
    assert evaluate_slo(fast, SLO).tpot_met


# ------------------------------------------------------------------------------ in general


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    tokens = draw(st.integers(0, 50))
    first_s, took_s, rest_s = (draw(st.floats(0, 10)) for _ in range(3))
    first_at_s = 10.0 + first_s if tokens else None
    last_at_s = None if first_at_s is None else first_at_s + (took_s if tokens > 1 else 0.0)
    outcomes = [Phase.FINISHED, Phase.CANCELLED, *REFUSED]
    return ended(
        draw(st.sampled_from(outcomes)),
        output_tokens=tokens,
        first_token_at_s=first_at_s,
        last_token_at_s=last_at_s,
        ended_at_s=(10.0 + first_s if last_at_s is None else last_at_s) + rest_s,
        itl_violations=draw(st.integers(0, tokens)),
    )


BOUND = st.none() | st.floats(0.001, 5.0)
SLOS = st.builds(Slo, ttft_s=BOUND, tpot_s=BOUND, itl_p99_s=BOUND)


@given(records(), SLOS, st.floats(1.0, 10.0))
def test_a_looser_objective_makes_no_good_request_a_miss(
    record: RequestRecord, slo: Slo, laxer: float
) -> None:
    lax = replace(
        slo,
        ttft_s=None if slo.ttft_s is None else slo.ttft_s * laxer,
        tpot_s=None if slo.tpot_s is None else slo.tpot_s * laxer,
    )
    strict, more = evaluate_slo(record, slo), evaluate_slo(record, lax)
    assert all(b or not a for a, b in zip(strict, more, strict=True))


@given(records(), SLOS)
def test_a_finished_request_is_evaluated_by_its_latencies_alone(
    record: RequestRecord, slo: Slo
) -> None:
    record = evolve(record, outcome=Phase.FINISHED)
    got = evaluate_slo(record, slo)
    assert got.was_served
    first_s, pace_s = ttft_s(record), tpot_s(record)
    if first_s is not None and slo.ttft_s is not None:
        assert got.ttft_met == (first_s <= slo.ttft_s + 1e-9)
    if slo.tpot_s is not None:
        assert got.tpot_met == (pace_s is None or pace_s <= slo.tpot_s + 1e-9)


@given(records(), SLOS, st.floats(0.0, 10.0))
def test_a_later_disconnect_without_more_tokens_is_never_evaluated_better(
    record: RequestRecord, slo: Slo, later_s: float
) -> None:
    left = evolve(record, outcome=Phase.CANCELLED)
    later = evolve(left, ended_at_s=left.ended_at_s + later_s)
    assert all(
        a or not b for a, b in zip(evaluate_slo(left, slo), evaluate_slo(later, slo), strict=True)
    )


# ---------- device-seconds of requests: what a prompt and a stream take
TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.001, per_stream_s=0.002)


def test_a_prompt_costs_what_its_uncached_tokens_take_on_all_devices() -> None:
    assert prefill_device_s(TIMING, 100) == pytest.approx(0.11)
    assert prefill_device_s(TIMING, 100, devices=4.0) == pytest.approx(0.44)


@pytest.mark.parametrize("tokens", [0, -5])
def test_cached_tokens_take_no_device_time(tokens: int) -> None:
    assert prefill_device_s(TIMING, tokens) == 0.0


def test_streams_share_their_steps() -> None:
    # Ten streams: a step takes 0.03 s, a tenth of it is one stream's.
    assert decode_device_s(TIMING, 50, running=10) == pytest.approx(50 * 0.003)
    assert decode_device_s(TIMING, 50, running=10, devices=2.0) == pytest.approx(50 * 0.006)


def test_a_stream_alone_pays_for_whole_steps() -> None:
    assert decode_device_s(TIMING, 50, running=0) == decode_device_s(TIMING, 50, running=1)
    assert decode_device_s(TIMING, 50, running=1) == pytest.approx(50 * 0.012)


@given(st.integers(1, 40), st.integers(1, 100))
def test_device_time_of_streams_adds_up_to_that_of_their_steps(streams: int, tokens: int) -> None:
    paid_s = sum(decode_device_s(TIMING, tokens, running=streams) for _ in range(streams))
    assert paid_s == pytest.approx(tokens * TIMING.step_s(running=streams))


def test_the_batch_between_two_reports_is_their_mean_batch() -> None:
    before = StepTotals(steps=10, decode_steps=10, decode_tokens=40, context_tokens=400)
    after = StepTotals(steps=20, decode_steps=15, decode_tokens=70, context_tokens=1400)
    assert mean_decode_batch(before, after) == (6.0, 200.0)


@pytest.mark.parametrize(
    "after",
    [
        StepTotals(decode_steps=10, decode_tokens=40, context_tokens=400),
        StepTotals(decode_steps=5, decode_tokens=10, context_tokens=100),
        StepTotals(decode_steps=11, decode_tokens=40, context_tokens=400),
        StepTotals(decode_steps=11, decode_tokens=50, context_tokens=300),
    ],
)
def test_without_counted_steps_or_after_a_reset_there_is_no_mean_batch(
    after: StepTotals,
) -> None:
    before = StepTotals(decode_steps=10, decode_tokens=40, context_tokens=400)
    assert mean_decode_batch(before, after) is None
