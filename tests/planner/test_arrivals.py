"""Samples of traffic: their rate, their lengths, and what stays shared."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.planner.rates.arrivals import TrafficSampler
from baton.simulator.workloads.presets import synthetic
from baton.simulator.workloads.trace import Trace, TraceRequest

CONV = synthetic("conv", rate_per_s=10, duration_s=200)
PAUSED = Trace(
    name="paused",
    requests=tuple(TraceRequest(at_s, 100, 10) for at_s in (*(n / 100 for n in range(999)), 1e4)),
)
"""All but one at the beginning: about 0.1 a second in the mean."""


@pytest.mark.parametrize("rate", [0.5, 3.0, 10.0, 47.0, 400.0])
def test_a_sample_has_the_rate_and_about_the_number_that_were_asked_for(rate: float) -> None:
    sample = TrafficSampler(CONV).sample(rate, 2_000)

    assert len(sample) == pytest.approx(2_000, rel=0.1)
    assert sample.rate_per_s == pytest.approx(rate, rel=0.1)
    assert sample.requests[0].at_s >= 0


def test_a_sample_has_the_lengths_of_the_trace() -> None:
    sample = TrafficSampler(CONV).sample(50.0, 4_000)
    mean = sum(request.prompt_tokens for request in sample.requests) / len(sample)
    whole = sum(request.prompt_tokens for request in CONV.requests) / len(CONV)

    assert mean == pytest.approx(whole, rel=0.1)


def test_the_same_seed_gives_the_same_sample_and_another_another() -> None:
    assert TrafficSampler(CONV, 1).sample(5.0, 300) == TrafficSampler(CONV, 1).sample(5.0, 300)
    assert TrafficSampler(CONV, 1).sample(5.0, 300) != TrafficSampler(CONV, 2).sample(5.0, 300)


def test_a_little_more_rate_adds_requests_and_takes_none_away() -> None:
    sparse, dense = (TrafficSampler(CONV).sample(rate, 500) for rate in (4.0, 4.4))
    end_s = min(sparse.requests[-1].at_s, dense.requests[-1].at_s)
    kept = [
        {request for request in each.requests if request.at_s <= end_s} for each in (sparse, dense)
    ]

    assert kept[0] < kept[1]


def test_a_trace_that_is_too_short_begins_anew_with_prompts_of_its_own() -> None:
    short = Trace(
        name="short",
        requests=tuple(TraceRequest(float(n), 1024, 10, (n, n + 100), f"s{n}") for n in range(10)),
    )
    sample = TrafficSampler(short).sample(1.0, 45)
    blocks = [block for request in sample.requests for block in request.block_ids]

    assert len(sample) == pytest.approx(45, abs=3)
    assert len(set(blocks)) == len(blocks)
    assert len({request.session_id for request in sample.requests}) == len(sample)


def test_copies_share_nothing_but_what_they_shared_within() -> None:
    twice = Trace(
        name="twice",
        requests=tuple(TraceRequest(n / 10, 1024, 10, (7, n)) for n in range(1_000)),
    )
    sample = TrafficSampler(twice).sample(19.0, 100)  # two copies, neither of which ends

    assert len({request.block_ids[0] for request in sample.requests}) == 2


def test_half_a_conversation_is_never_drawn() -> None:
    chat = synthetic("chat", rate_per_s=10, duration_s=300)
    sample = TrafficSampler(chat).sample(3.0, 300)
    whole, drawn = gaps(chat), gaps(sample)

    assert sum(map(bool, drawn.values())) > 10
    for session, waits in drawn.items():
        every = whole[session.partition("/")[0]]
        starts = range(len(every) - len(waits) + 1)
        assert any(every[at : at + len(waits)] == waits for at in starts), "a turn is missing"


def test_where_whole_sessions_are_too_few_for_a_rate_single_requests_are_drawn() -> None:
    three = Trace(
        name="three",
        requests=tuple(TraceRequest(n / 10, 100, 10, session_id=f"s{n % 3}") for n in range(3_000)),
    )
    samples = [TrafficSampler(three, seed).sample(2.0, 400) for seed in range(8)]

    assert all(len(sample) == pytest.approx(400, rel=0.2) for sample in samples)


def test_a_pause_that_no_request_arrives_in_is_an_empty_sample() -> None:
    assert not TrafficSampler(PAUSED).sample(0.1, 20).requests


def gaps(trace: Trace) -> dict[str, list[float]]:
    """The times between the turns of each session."""
    times: dict[str, list[float]] = {}
    for request in trace.requests:
        times.setdefault(str(request.session_id), []).append(request.at_s)
    return {
        session: [round(later - earlier, 6) for earlier, later in pairwise(each)]
        for session, each in times.items()
    }


def test_scaled_traffic_keeps_arrivals_and_what_is_shared() -> None:
    longer = TrafficSampler(CONV).scaled(prompts=2.0, outputs=0.5).trace

    assert [request.at_s for request in longer.requests] == [
        request.at_s for request in CONV.requests
    ]
    assert longer.requests[5].prompt_tokens == 2 * CONV.requests[5].prompt_tokens
    assert longer.requests[5].output_tokens == max(1, round(CONV.requests[5].output_tokens / 2))
