"""Workloads that are made up: rates, lengths, what prompts share, and the same again by seed."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.hashed_prompt import HashedPrompt
from baton.simulator.workloads import arrivals, scaling
from baton.simulator.workloads.arrivals import RateStep
from baton.simulator.workloads.generators import (
    Conversations,
    ToolAgents,
    TrafficPhase,
    phased_traffic,
)
from baton.simulator.workloads.lengths import Lognormal, fixed
from baton.simulator.workloads.presets import WORKLOADS, synthetic
from baton.simulator.workloads.statistics import describe, reused_tokens
from baton.simulator.workloads.trace import Trace, TraceRequest, to_request

SHORT = Lognormal(40, 0.5)


def conversations(**changes: float) -> Conversations:
    return Conversations(
        turns=changes.get("turns", 5.0),
        system_tokens=int(changes.get("system_tokens", 100)),
        message=SHORT,
        output=SHORT,
        think_s_mean=10.0,
        max_context_tokens=int(changes.get("most_context_tokens", 1 << 15)),
    )


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_arrivals_have_the_rate_and_the_burstiness_of_vllms_benchmark(
    burstiness: float,
) -> None:
    times = list(islice(arrivals.gamma(8.0, burstiness, random.Random(3)), 20_000))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert list(islice(arrivals.constant(4.0), 4)) == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate_per_s"):
        arrivals.poisson(rate, random.Random(1))


def test_arrivals_follow_a_rate_that_changes() -> None:
    steps = [RateStep(from_s=at, rate_per_s=rate) for at, rate in ((0, 20.0), (100, 0.0), (150, 5))]
    times = list(arrivals.piecewise_poisson(steps, 350, random.Random(5)))
    assert times == sorted(times)
    counts = Counter("a" if at < 100 else "b" if at < 150 else "c" for at in times)
    assert counts["a"] == pytest.approx(2000, rel=0.08)
    assert counts["b"] == 0
    assert counts["c"] == pytest.approx(1000, rel=0.1)
    assert times[-1] < 350


def test_lognormal_lengths_have_their_mean_and_spread() -> None:
    rng = random.Random(7)
    drawn = [Lognormal(1000, 0.8).draw(rng) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(1000, rel=0.03)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(0.8, rel=0.06)


@given(st.floats(1, 1e4), st.floats(0, 3), st.integers(1, 5000), st.integers())
def test_lengths_are_at_least_one_and_never_above_their_limit(
    mean: float, cv: float, most: int, seed: int
) -> None:
    assert 1 <= Lognormal(mean, cv, most).draw(random.Random(seed)) <= most


@settings(max_examples=30)
@given(st.integers(), st.integers(0, 300), st.floats(1, 8))
def test_a_turn_begins_with_all_that_was_said_before(
    seed: int, system_tokens: int, turns: float
) -> None:
    made = conversations(system_tokens=system_tokens, turns=turns)
    trace = made.generate("chat", [0.0, 1.0, 2.0], random.Random(seed))
    sessions: dict[str | None, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        sessions[request.session_id].append(request)
    shared = system_tokens // trace.block_tokens
    assert len(sessions) == 3
    for turns_of_it in sessions.values():
        for turn in turns_of_it:
            said = turn.prompt_tokens + turn.output_tokens
            assert len(turn.block_ids) == -(-said // trace.block_tokens)
            assert turn.block_ids[:shared] == trace.requests[0].block_ids[:shared]
        for request, following in pairwise(turns_of_it):
            assert following.block_ids[: len(request.block_ids)] == request.block_ids
            assert following.prompt_tokens > request.prompt_tokens + request.output_tokens
            assert following.at_s > request.at_s
    own = [set(turns_of_it[-1].block_ids[shared:]) for turns_of_it in sessions.values()]
    assert len(own[0] | own[1] | own[2]) == sum(map(len, own))


def test_generated_tokens_begin_the_next_turns_prompt() -> None:
    trace = conversations().generate("chat", [0.0], random.Random(1))
    first, second = (
        to_request(request, number, block_tokens=trace.block_tokens)
        for number, request in enumerate(trace.requests[:2])
    )
    outline, later = first.prompt_token_ids, second.prompt_token_ids
    assert isinstance(outline, HashedPrompt)
    assert isinstance(later, HashedPrompt)
    said = outline.extended(trace.requests[0].output_tokens)
    assert list(later[: len(said)]) == list(said)
    assert later.chain_hashes(0, 16)[: len(said) // 16] == said.chain_hashes(0, 16)


def test_conversations_have_their_mean_number_of_turns_and_think_in_between() -> None:
    trace = conversations(turns=3.0).generate("chat", range(2000), random.Random(4))
    assert len(trace) == pytest.approx(6000, rel=0.06)
    sessions: dict[str | None, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        sessions[request.session_id].append(request)
    thinking = [
        later.at_s - request.at_s - request.output_tokens * 0.03
        for turns in sessions.values()
        for request, later in pairwise(turns)
    ]
    assert min(thinking) > 0
    assert fmean(thinking) == pytest.approx(10.0, rel=0.06)


def test_a_session_ends_before_its_context_is_too_long() -> None:
    made = conversations(turns=1000.0, most_context_tokens=2000)
    trace = made.generate("chat", range(20), random.Random(4))
    longest = max(request.prompt_tokens + request.output_tokens for request in trace.requests)
    assert 1500 < longest <= 2000


def test_turns_that_would_come_too_late_are_left_out() -> None:
    trace = conversations().generate("chat", range(30), random.Random(4), until_s=60.0)
    assert len(trace) > 30
    assert trace.requests[-1].at_s < 60


def test_agents_share_prompts_by_a_zipf_law_and_nothing_else() -> None:
    agents = ToolAgents(
        shared_prompts=8,
        zipf_exponent=1.0,
        shared_prompt=Lognormal(300, 0.5),
        own_prompt=SHORT,
        output=SHORT,
    )
    trace = agents.generate("a", range(8000), random.Random(6))
    by_front = Counter(request.block_ids[0] for request in trace.requests)
    weights = [count for _, count in by_front.most_common()]
    harmonic = sum(1 / k for k in range(1, 9))
    assert weights == pytest.approx([8000 / harmonic / k for k in range(1, 9)], rel=0.15)
    uses = Counter(block for request in trace.requests for block in request.block_ids)
    for request in trace.requests[:200]:
        assert len(request.block_ids) == -(-request.prompt_tokens // trace.block_tokens)
        front = [uses[block] > 1 for block in request.block_ids]
        assert front == sorted(front, reverse=True)
        assert uses[request.block_ids[-1]] == 1


def test_phases_change_the_rate_and_the_mix() -> None:
    kinds = {"code": fixed(2000, 10), "conv": fixed(500, 200)}
    phases = [
        TrafficPhase(duration_s=100, rate_per_s=10, shares=(("code", 3), ("conv", 1))),
        TrafficPhase(duration_s=100, rate_per_s=40, shares=(("conv", 1),)),
    ]
    trace = phased_traffic("p", phases, kinds, random.Random(9))
    early = [request for request in trace.requests if request.at_s < 100]
    late = trace.requests[len(early) :]
    assert (len(early), len(late)) == pytest.approx((1000, 4000), rel=0.1)
    assert sum(request.slo_class == "code" for request in early) / len(early) == pytest.approx(
        0.75, abs=0.05
    )
    assert {request.slo_class for request in late} == {"conv"}
    lengths = {"code": (2000, 10), "conv": (500, 200)}
    assert all(lengths[request.slo_class or ""] == request[1:3] for request in trace.requests)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_named_workload_has_its_rate_and_is_the_same_for_the_same_seed(name: str) -> None:
    made = synthetic(name, rate_per_s=4, duration_s=500, seed=1)
    assert made == synthetic(name, rate_per_s=4, duration_s=500, seed=1)
    assert made != synthetic(name, rate_per_s=4, duration_s=500, seed=2)
    assert made.requests[-1].at_s < 500
    # Sessions are still starting; and Azure's code comes in bursts.
    loose = {"chat": 0.35, "code-bursty": 0.8}.get(name, 0.12)
    assert len(made) == pytest.approx(2000, rel=loose)


def test_an_unknown_workload_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="expected one of conv, code"):
        synthetic("poems", rate_per_s=1, duration_s=1)
    with pytest.raises(ValueError, match="duration_s"):
        synthetic("conv", rate_per_s=1, duration_s=0)


# ---------- traces made rarer, denser and shorter, and what is measured of them
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
def test_requests_of_a_thin_trace_stay_in_a_denser_one_and_sessions_stay_whole(
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
