"""Totals of ended requests: everyone once, in a bounded number of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.accounting.accounts import OTHER, SloTotals
from baton.domain.commands import RequestRecord
from baton.domain.demand import LATENCY_BUCKET_BOUNDS_S, DemandTotals, Tally
from baton.domain.request import Phase
from baton.domain.slo import ALL_MET, Slo, SloResult
from baton.domain.value import evolve

RECORD = RequestRecord(
    request_id="r",
    outcome=Phase.FINISHED,
    reason="",
    routes=(),
    decisions=(),
    prompt_tokens=100,
    cached_tokens=40,
    output_tokens=11,
    resumes=0,
    arrived_at_s=10.0,
    first_token_at_s=10.5,
    last_token_at_s=11.5,
    ended_at_s=11.5,
    prefill_done_at_s=None,
    handed_off_blocks=0,
    tenant="acme",
    slo=Slo(name="chat"),
    gpu_s=0.25,
)
NOT_SERVED = SloResult(was_served=False, ttft_met=True, tpot_met=True, itl_met=True)
LATE = ALL_MET._replace(ttft_met=False)


def refused(outcome: Phase) -> RequestRecord:
    return evolve(
        RECORD,
        outcome=outcome,
        slo_result=NOT_SERVED,
        first_token_at_s=None,
        last_token_at_s=None,
        output_tokens=0,
        cached_tokens=None,
    )


def test_a_request_is_counted_with_its_class_tenant_model_and_pool() -> None:
    board = SloTotals()
    board.record_request(RECORD, "decode", "tiny")
    assert board.tallies() == (
        Tally(
            "chat",
            "acme",
            "tiny",
            "decode",
            evaluated=1,
            good=1,
            ttft_met=1,
            tpot_met=1,
            itl_met=1,
            prompt_tokens=100,
            cached_tokens=40,
            output_tokens=11,
            gpu_s=0.25,
        ),
    )


def test_misses_are_judged_and_not_good() -> None:
    board = SloTotals()
    for record in (
        evolve(RECORD, slo_result=LATE),
        refused(Phase.SHED),
        refused(Phase.EVICTED),
        refused(Phase.FAILED),
    ):
        board.record_request(record, "", "")
    (row,) = board.tallies()
    assert (row.evaluated, row.good, row.excluded, row.client_errors) == (4, 0, 0, 0)
    assert (row.shed, row.evicted, row.failed, row.ttft_met) == (1, 1, 1, 3)


def test_who_was_refused_for_its_own_doing_is_neither_good_nor_a_miss() -> None:
    board = SloTotals()
    board.record_request(refused(Phase.SHED), "", "", is_client_error=True)
    (row,) = board.tallies()
    assert (row.client_errors, row.evaluated, row.shed, row.excluded) == (1, 0, 0, 0)


def test_who_left_with_nothing_and_was_owed_nothing_is_excused() -> None:
    board = SloTotals()
    left = evolve(refused(Phase.CANCELLED), slo_result=ALL_MET)
    board.record_request(left, "", "")
    board.record_request(evolve(left, output_tokens=3), "", "")
    (row,) = board.tallies()
    assert (row.excluded, row.evaluated, row.good, row.cancelled) == (1, 1, 1, 2)


def test_a_prompt_that_no_replica_was_given_is_nothing_that_was_used() -> None:
    board = SloTotals()
    board.record_request(refused(Phase.SHED), "", "")
    (row,) = board.tallies()
    assert (row.evaluated, row.prompt_tokens) == (1, 0)


def test_latencies_fall_into_the_bucket_that_ends_at_or_above_them() -> None:
    board = SloTotals()
    for after_s in (LATENCY_BUCKET_BOUNDS_S[3], LATENCY_BUCKET_BOUNDS_S[3] * 1.01, 1e9):
        board.record_request(
            evolve(RECORD, first_token_at_s=10.0 + after_s, output_tokens=1), "", ""
        )
    seen = board.ttft_totals()
    assert [number for number, count in enumerate(seen.buckets) if count] == [
        3,
        4,
        len(LATENCY_BUCKET_BOUNDS_S),
    ]
    assert (seen.requests, len(seen.buckets)) == (3, len(LATENCY_BUCKET_BOUNDS_S) + 1)
    assert board.tpot_totals().requests == 0


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    board = SloTotals(max_rows=2)
    for number in range(10):
        board.record_request(evolve(RECORD, tenant=f"t{number}"), "decode", "tiny")
        board.add_gpu_s(f"t{number}", "decode", 1.0)
    by_tenant = {row.tenant: row.evaluated for row in board.tallies()}
    assert by_tenant == {"t0": 1, "t1": 1, OTHER: 8}
    assert {row.tenant: row.gpu_s for row in board.gpu_usage()} == {
        "t0": 1.0,
        "t1": 1.0,
        OTHER: 8.0,
    }
    board.add_gpu_s("t1", "decode", 0.5)
    assert {row.tenant: row.gpu_s for row in board.gpu_usage()}["t1"] == 1.5
    board.record_request(evolve(RECORD, tenant="t1"), "decode", "tiny")
    assert {row.tenant: row.evaluated for row in board.tallies()}["t1"] == 2


def test_demand_adds_up() -> None:
    board = SloTotals()
    board.record_request(RECORD, "", "", demand=DemandTotals(1, 100, 60.0, 11.0))
    board.record_request(RECORD, "", "", demand=DemandTotals(1, 50, 25.0, 4.5))
    assert board.demand == DemandTotals(2, 150, 85.0, 15.5)


JUDGEMENTS = st.builds(
    SloResult,
    was_served=st.booleans(),
    ttft_met=st.booleans(),
    tpot_met=st.booleans(),
    itl_met=st.booleans(),
)
ENDED = st.builds(
    lambda outcome, judgement, tenant, name, first_s, tokens: evolve(
        RECORD,
        outcome=outcome,
        slo_result=judgement,
        tenant=tenant,
        slo=Slo(name=name),
        first_token_at_s=None if first_s is None else 10.0 + first_s,
        output_tokens=0 if first_s is None else tokens,
    ),
    st.sampled_from([Phase.FINISHED, Phase.SHED, Phase.EVICTED, Phase.FAILED, Phase.CANCELLED]),
    JUDGEMENTS,
    st.sampled_from("abcdef"),
    st.sampled_from(["chat", "batch"]),
    st.none() | st.floats(0.0, 2000.0),
    st.integers(1, 9),
)


@given(st.lists(st.tuples(ENDED, st.booleans()), max_size=40), st.integers(1, 8))
def test_every_request_is_in_exactly_one_row_and_counted_one_way(
    ends: list[tuple[RequestRecord, bool]], most_rows: int
) -> None:
    board = SloTotals(max_rows=most_rows)
    for record, own_doing in ends:
        board.record_request(record, "d", "m", is_client_error=own_doing)
        board.check_integrity()
    rows = board.tallies()
    assert len(rows) <= most_rows + 2  # one more for each class, of everybody else
    assert sum(row.evaluated + row.excluded + row.client_errors for row in rows) == len(ends)
    assert all(row.good <= row.evaluated for row in rows)
    assert sum(row.client_errors for row in rows) == sum(own for _, own in ends)
    assert sum(row.prompt_tokens for row in rows) == 100 * sum(not own for _, own in ends)
    by_class = Counter(record.slo.name for record, _ in ends)
    told = Counter[str]()
    for row in rows:
        told[row.slo_class] += row.evaluated + row.excluded + row.client_errors
    assert +told == by_class
    took_s = [r.first_token_at_s - 10.0 for r, _ in ends if r.first_token_at_s is not None]
    wanted = Counter(bisect_left(LATENCY_BUCKET_BOUNDS_S, one_s) for one_s in took_s)
    assert {n: count for n, count in enumerate(board.ttft_totals().buckets) if count} == wanted
    assert board.ttft_totals().sum_s == pytest.approx(sum(took_s))
