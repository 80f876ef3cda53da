"""One engine alone: queueing theory's closed forms, loops, and what clients see."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev

import pytest

from baton.perf.step_timing import StepBatch
from baton.simulator.outcome import Outcome
from baton.simulator.single_engine import ServedPhases, simulate_engine
from baton.simulator.v1.settings import Scheduling, V1Settings
from baton.simulator.workloads.trace import TraceRequest
from tests.simulator.v1_cores import LinearStepTiming, with_changes

WIDE = V1Settings(
    timing=LinearStepTiming(),
    kv_blocks=4000,
    kv_block_bytes=1000,
    max_batched_tokens=512,
    max_running_requests=64,
    max_len_tokens=4096,
)


def poisson(rate: float, number: int, prompt: int, output: int = 1) -> list[TraceRequest]:
    rng, at_s, requests = random.Random(7), 0.0, []
    for _ in range(number):
        at_s += rng.expovariate(rate)
        requests.append(TraceRequest(at_s, prompt, output))
    return requests


# ---------------------------------------------------------------------- closed forms
@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_prompts_of_one_length_wait_as_in_an_md1_queue(busy: float) -> None:
    # Source: Pollaczek and Khinchine; with constant service s the mean wait is s r / (2 (1 - r)).
    service_s = WIDE.timing.step_s(StepBatch(512, 1))
    outcomes = simulate_engine(
        WIDE, poisson(busy / service_s, 12_000, 512), phases=ServedPhases.PREFILL
    )
    waits = [outcome.ttft_s - service_s for outcome in outcomes]
    batches = [fmean(waits[start : start + 600]) for start in range(0, len(waits), 600)]
    error_s = 3 * stdev(batches) / math.sqrt(len(batches))
    assert abs(fmean(batches) - service_s * busy / (2 * (1 - busy))) < error_s
    assert error_s < 0.2 * service_s


def test_one_request_alone_takes_the_sum_of_its_steps() -> None:
    (one,) = simulate_engine(WIDE, [TraceRequest(3.0, 100, 200)])
    first_s = WIDE.timing.step_s(StepBatch(100, 1))
    steps = [WIDE.timing.step_s(StepBatch(0, 0, 0, 0, 1, 100 + n)) for n in range(1, 200)]
    assert one.arrived_at_s == 3.0
    assert one.ttft_s == pytest.approx(first_s)
    assert one.tpot_s == pytest.approx(fmean(steps))
    assert one.e2e_s == pytest.approx(first_s + sum(steps))
    assert one.max_itl_s == pytest.approx(steps[-1], rel=0.01)
    assert (one.prompt_tokens, one.cached_tokens, one.output_tokens, one.ok) == (100, 0, 200, True)


def test_a_full_batch_of_decodes_makes_its_tokens_per_second() -> None:
    config = with_changes(
        WIDE, timing=LinearStepTiming(0.02, 0.0, 0.001, 0.0), max_running_requests=10
    )
    requests = [TraceRequest(0.0, 16, 101)] * 40
    outcomes = simulate_engine(config, requests, phases=ServedPhases.DECODE)
    # Four batches of ten, a step for each token: 10 tokens every 20 + 10 ms.
    assert max(outcome.e2e_s for outcome in outcomes) == pytest.approx(4 * 101 * 0.03)


# ---------------------------------------------------------------------- phases
def test_an_engine_that_only_decodes_prefills_nothing() -> None:
    (one,) = simulate_engine(WIDE, [TraceRequest(0.0, 4000, 3)], phases=ServedPhases.DECODE)
    assert one.ttft_s == WIDE.timing.step_s(StepBatch(0, 0, 0, 0, 1, 4000))
    assert one.output_tokens == 3


def test_an_engine_that_only_decodes_waits_for_memory() -> None:
    config = with_changes(WIDE, kv_blocks=300)
    outcomes = simulate_engine(
        config, [TraceRequest(0.0, 4000, 10)] * 2, phases=ServedPhases.DECODE
    )
    assert outcomes[1].ttft_s > outcomes[0].e2e_s


def test_an_engine_that_only_prefills_ends_requests_with_their_first_token() -> None:
    config = with_changes(WIDE, kv_blocks=64)
    outcomes = simulate_engine(
        config, [TraceRequest(0.0, 1000, 500)] * 3, phases=ServedPhases.PREFILL
    )
    assert [outcome.output_tokens for outcome in outcomes] == [1, 1, 1]
    assert all(outcome.tpot_s == 0.0 and outcome.e2e_s == outcome.ttft_s for outcome in outcomes)


# ---------------------------------------------------------------------- loops
def test_clients_ask_again_when_they_are_answered() -> None:
    outcomes = simulate_engine(WIDE, [TraceRequest(0.0, 100, 50)] * 12, clients=3)
    arrivals = sorted(outcome.arrived_at_s for outcome in outcomes)
    ends = sorted(outcome.arrived_at_s + outcome.e2e_s for outcome in outcomes)
    assert arrivals[:3] == [0.0] * 3
    assert arrivals[3:] == pytest.approx(ends[:9])


def test_outcomes_are_in_the_order_of_requests_and_not_of_their_ends() -> None:
    requests = [TraceRequest(0.0, 100, 300), TraceRequest(0.5, 10, 2), TraceRequest(9.0, 7, 1)]
    outcomes = simulate_engine(WIDE, requests)
    assert [(outcome.prompt_tokens, outcome.output_tokens) for outcome in outcomes] == [
        (100, 300),
        (10, 2),
        (7, 1),
    ]
    assert [outcome.arrived_at_s for outcome in outcomes] == [0.0, 0.5, 9.0]


def test_a_request_that_does_not_fit_is_a_failed_outcome() -> None:
    outcomes = simulate_engine(WIDE, [TraceRequest(0.0, 5000, 5), TraceRequest(0.1, 50, 5)])
    assert [outcome.ok for outcome in outcomes] == [False, True]
    assert outcomes[0].ttft_s == math.inf
    assert outcomes[0].arrived_at_s == 0.0


def test_no_requests_have_no_outcomes() -> None:
    assert simulate_engine(WIDE, []) == []


def test_shared_blocks_are_computed_once() -> None:
    ids = tuple(range(6))
    requests = [TraceRequest(float(at), 384, 4, ids) for at in range(3)]
    cached = [outcome.cached_tokens for outcome in simulate_engine(WIDE, requests, block_tokens=64)]
    assert cached == [0, 368, 368]


def test_a_prompt_of_another_request_shows_as_the_worst_gap() -> None:
    config = with_changes(WIDE, max_batched_tokens=2048)
    outcomes = simulate_engine(config, [TraceRequest(0.0, 16, 100), TraceRequest(0.2, 2000, 1)])
    assert outcomes[0].max_itl_s == pytest.approx(outcomes[1].ttft_s, abs=0.01)
    assert outcomes[0].max_itl_s > 0.2


def test_prefill_first_delays_decodes_and_chunks_delay_prompts() -> None:
    requests = [TraceRequest(0.01 * n, 400, 60) for n in range(30)]
    chunked = simulate_engine(WIDE, requests)
    first = simulate_engine(with_changes(WIDE, scheduling=Scheduling.PREFILL_FIRST), requests)

    def mean(outcomes: list[Outcome], what: str) -> float:
        return fmean(getattr(outcome, what) for outcome in outcomes)

    assert mean(first, "ttft_s") < mean(chunked, "ttft_s")
    assert mean(first, "tpot_s") > mean(chunked, "tpot_s")


def test_the_same_requests_have_the_same_outcomes() -> None:
    requests = poisson(20.0, 200, 300, 40)
    assert simulate_engine(WIDE, requests) == simulate_engine(WIDE, requests)


def test_time_behind_the_engine_delays_all_tokens_alike() -> None:
    (plain,) = simulate_engine(WIDE, [TraceRequest(3.0, 100, 200)])
    (late,) = simulate_engine(with_changes(WIDE, first_token_s=0.5), [TraceRequest(3.0, 100, 200)])
    assert late.ttft_s == pytest.approx(plain.ttft_s + 0.5)
    assert late.e2e_s == pytest.approx(plain.e2e_s + 0.5)
    assert late.tpot_s == pytest.approx(plain.tpot_s)


def test_a_prompt_keeps_to_one_rank_of_a_group_that_steps_together() -> None:
    group = WIDE.for_ranks(4)
    prompt = [TraceRequest(0.0, 1024, 1)]
    assert simulate_engine(group, prompt) == simulate_engine(WIDE, prompt)
    together = simulate_engine(group, [TraceRequest(0.0, 512, 1)] * 4)
    assert {outcome.ttft_s for outcome in together} == {group.timing.step_s(StepBatch(2048, 4))}


def test_a_request_must_have_room_in_one_rank() -> None:
    group = with_changes(WIDE, kv_blocks=10).for_ranks(8)
    fits, does_not = simulate_engine(group, [TraceRequest(0.0, 150, 5), TraceRequest(0.0, 200, 5)])
    assert fits.ok
    assert not does_not.ok
