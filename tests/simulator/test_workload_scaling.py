"""Traces made rarer, denser and shorter, and what is measured of them."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.simulator.workloads import arrivals, scaling
from baton.simulator.workloads.statistics import describe, reused_tokens
from baton.simulator.workloads.trace import Trace, TraceRequest

REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        st.floats(0, 1000),
        st.integers(1, 100),
        st.integers(1, 50),
        st.lists(st.integers(0, 6), max_size=6).map(tuple),
        st.none() | st.sampled_from("abc"),
    ),
    min_size=2,
    max_size=30,
).map(lambda requests: sorted(requests, key=lambda request: request.at_s))


def trace_of(requests: list[TraceRequest], block_tokens: int = 16) -> Trace:
    return Trace(name="t", requests=tuple(requests), block_tokens=block_tokens, skipped_lines=3)


def steady(count: int) -> Trace:
    times = islice(arrivals.poisson(10.0, random.Random(0)), count)
    return trace_of([TraceRequest(at_s, 10, 5, (number,)) for number, at_s in enumerate(times)])


@given(REQUESTS, st.floats(0.01, 1), st.floats(0.01, 1), st.integers())
def test_what_stays_of_a_thin_trace_stays_in_a_denser_one_and_sessions_stay_whole(
    requests: list[TraceRequest], one: float, other: float, seed: int
) -> None:
    trace = trace_of(requests)
    few, many = (
        scaling.superpose(trace, share, random.Random(seed)).requests
        for share in sorted((one, other))
    )
    assert not set(few) - set(many)
    assert set(many) <= set(requests)
    for session in "abc":
        whole = [request for request in requests if request.session_id == session]
        assert [request for request in many if request.session_id == session] in ([], whole)


@given(REQUESTS, st.floats(0.1, 4), st.floats(0.1, 4), st.integers())
def test_fewer_copies_are_a_part_of_more(
    requests: list[TraceRequest], one: float, other: float, seed: int
) -> None:
    few, many = (
        list(scaling.superpose(trace_of(requests), copies, random.Random(seed)).requests)
        for copies in sorted((one, other))
    )
    for kept in few:
        many.remove(kept)


@given(REQUESTS, st.integers(2, 4), st.integers())
def test_copies_have_all_requests_once_and_share_nothing(
    requests: list[TraceRequest], copies: int, seed: int
) -> None:
    trace = scaling.superpose(trace_of(requests), copies, random.Random(seed))
    assert len(trace) == copies * len(requests)
    lengths = sorted(request[1:3] for request in requests)
    assert sorted(request[1:3] for request in trace.requests) == sorted(lengths * copies)
    kinds = {block for request in requests for block in request.block_ids}
    assert len(
        {block for request in trace.requests for block in request.block_ids}
    ) == copies * len(kinds)
    sessions = {request.session_id for request in requests} - {None}
    assert len({request.session_id for request in trace.requests} - {None}) == copies * len(
        sessions
    )


def test_copies_fill_the_whole_time_evenly() -> None:
    trace = scaling.superpose(steady(2000), 3, random.Random(1))
    span = steady(2000).span_s
    thirds = [
        sum(third * span / 3 <= request.at_s < (third + 1) * span / 3 for request in trace.requests)
        for third in range(3)
    ]
    assert thirds == pytest.approx([2000] * 3, rel=0.1)
    assert trace.span_s == pytest.approx(span, rel=0.01)


@pytest.mark.parametrize("rate", [0.7, 3.0, 10.0, 17.0, 40.0])
def test_a_trace_gets_the_rate_that_is_asked_for_without_squeezing_time(rate: float) -> None:
    trace = scaling.at_rate(steady(4000), rate, random.Random(2))
    assert trace.rate_per_s == pytest.approx(rate, rel=0.08)
    assert trace.span_s == pytest.approx(steady(4000).span_s, rel=0.02)


def test_its_own_rate_changes_nothing() -> None:
    trace = steady(100)
    assert scaling.at_rate(trace, trace.rate_per_s, random.Random(2)) == trace


def test_a_compressed_trace_is_squeezed_in_time() -> None:
    trace = scaling.compress(trace_of([TraceRequest(2, 1, 1), TraceRequest(6, 1, 1)]), 2)
    assert [request.at_s for request in trace.requests] == [1, 3]


def test_a_cut_counts_from_its_beginning_and_leaves_out_its_end() -> None:
    trace = scaling.cut(trace_of([TraceRequest(at, at, 1) for at in (1, 2, 3, 4)]), 2, 4)
    assert [request[:2] for request in trace.requests] == [(0, 2), (1, 3)]
    assert trace.skipped_lines == 3


@pytest.mark.parametrize(
    "scaled",
    [
        lambda trace: scaling.superpose(trace, 0, random.Random(1)),
        lambda trace: scaling.compress(trace, 0),
        lambda trace: scaling.at_rate(scaling.first(trace, 1), 2, random.Random(1)),
    ],
)
def test_a_scale_that_makes_no_sense_is_refused(scaled: object) -> None:
    assert callable(scaled)
    with pytest.raises(ValueError, match=r"expected|no rate"):
        scaled(steady(5))


@given(REQUESTS, st.sampled_from((8, 16)))
def test_reuse_is_what_a_slow_look_at_all_earlier_prompts_finds(
    requests: list[TraceRequest], block_tokens: int
) -> None:
    def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
        length = 0
        while length < min(len(one), len(other)) and one[length] == other[length]:
            length += 1
        return length

    slow = []
    for number, request in enumerate(requests):
        hits = max(
            (common(request.block_ids, other.block_ids) for other in requests[:number]), default=0
        )
        slow.append(min(hits * block_tokens, request.prompt_tokens))
    assert reused_tokens(trace_of(requests, block_tokens)) == slow


def test_statistics_of_a_trace_done_by_hand() -> None:
    requests = [TraceRequest(at, 32, 1 + at, (1, 2)) for at in (0, 10, 20, 21, 22, 40)]
    found = describe(trace_of(requests))
    assert (found.requests, found.span_s, found.rate_per_s) == (6, 40, 0.125)
    assert found.gap_cv == pytest.approx(6.4187 / 8, abs=1e-4)  # of 10 10 1 1 18
    assert found.peak_to_mean == 2.0  # 3 in [20, 30), 1.5 in the mean 10 s
    assert (found.output_tokens.p50, found.output_tokens.maximum) == (21.5, 41)
    assert found.reused_tokens_fraction == found.mean_reused_fraction == pytest.approx(5 / 6)
