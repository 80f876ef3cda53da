"""What a replica can carry, and how many it takes for the tail."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.perf.capacity.capacity import (
    Pulls,
    Variability,
    decode_tokens_per_s,
    max_decode_streams,
    prefill_tokens_per_s,
    required_decode_replicas,
    required_prefill_replicas,
)
from baton.perf.capacity.closed_loop import ClosedLoop, RequestLengths, simulate_closed_loop
from baton.perf.step_timing import StepBatch
from baton.perf.steps.roofline import StepParts
from baton.perf.steps.step_costs import FittedTiming, StepCosts

TIMING = FittedTiming(
    costs=StepCosts(
        decode_step_s=0.010,
        prefill_step_s=0.001,
        prefill_token_s=5e-5,
        decode_request_s=1e-4,
        context_token_s=1e-8,
    ),
    max_batched_tokens=2048,
    host_block_s=0.0,
)

loads = st.floats(0.0, 200.0)
shares = st.floats(0.001, 0.2)
services = st.floats(0.005, 2.0)


def erlang_c(servers: int, load: float) -> float:
    """The probability that all are busy, by its recurrence: the slow and obvious twin."""
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def late_share(servers: int, load: float, *, patience: float, factor: float = 1.0) -> float:
    """The share of prompts that wait longer than `patience` services."""
    return erlang_c(servers, load) * math.exp(-(servers - load) * patience / factor)


def slow_need(load: float, *, patience: float, late: float, factor: float) -> int:
    """The least number of servers, tried one after another with the exact formula."""
    servers = math.floor(load) + 1
    while late_share(servers, load, patience=patience, factor=factor) > late:
        servers += 1
    return servers


def prefilled(tokens: float, *, running: int = 1000, ttft_s: float | None = None) -> float:
    return prefill_tokens_per_s(
        TIMING,
        mean_uncached_tokens=tokens,
        max_batched_tokens=TIMING.max_batched_tokens,
        max_running=running,
        ttft_s=ttft_s,
    )


def test_a_replica_prefills_one_long_prompt_after_another() -> None:
    tokens = TIMING.max_batched_tokens + 1000
    assert prefilled(tokens) == pytest.approx(tokens / TIMING.prefill_s(tokens))


def test_a_step_computes_as_many_short_prompts_as_fit_its_budget_and_its_slots() -> None:
    budget = TIMING.max_batched_tokens
    assert prefilled(100) == pytest.approx(budget / TIMING.prefill_s(budget))
    assert prefilled(100) > 1.15 * 100 / TIMING.prefill_s(100)
    assert prefilled(100, running=3) == pytest.approx(300 / TIMING.prefill_s(300))


def test_a_step_with_many_prompts_takes_a_quarter_of_the_objective_at_most() -> None:
    whole_s = TIMING.prefill_s(TIMING.max_batched_tokens)
    assert prefilled(100, ttft_s=4 * whole_s) == prefilled(100)
    assert prefilled(100, ttft_s=2 * whole_s) < prefilled(100)
    assert prefilled(100, ttft_s=1e-6) == pytest.approx(100 / TIMING.prefill_s(100))


def test_prompts_without_a_single_token_to_compute_count_as_one() -> None:
    assert prefilled(0.0) > 0


def streams(
    tpot_s: float | None,
    *,
    kv_tokens: int | None = None,
    running: int = 1000,
    pulls: Pulls | None = None,
) -> int:
    return max_decode_streams(
        TIMING,
        tpot_s=tpot_s,
        context_tokens=1000,
        max_running=running,
        kv_tokens=kv_tokens,
        pulls=pulls,
    )


def test_no_more_streams_run_than_begin_with_a_pull_while_one_lasts() -> None:
    """In each step 8 begin, and each lasts 20 steps."""
    assert streams(10.0, pulls=Pulls(at_once=8, output_tokens=20.0)) == 160
    assert streams(10.0, running=64, pulls=Pulls(at_once=8, output_tokens=20.0)) == 64
    assert streams(10.0, pulls=Pulls(at_once=8, output_tokens=0.0)) == 8


def test_a_replica_takes_the_most_streams_that_meet_the_objective() -> None:
    most = streams(0.02)
    assert TIMING.step_s(running=most, context_tokens=most * 1000) <= 0.02
    assert TIMING.step_s(running=most + 1, context_tokens=(most + 1) * 1000) > 0.02


def test_an_objective_that_is_just_met_is_met() -> None:
    assert streams(TIMING.step_s(running=50, context_tokens=50_000)) == 50


def test_the_batch_and_the_cache_bound_the_streams_too() -> None:
    assert streams(10.0, running=64) == 64
    assert streams(10.0, kv_tokens=50_999) == 50
    assert streams(None, kv_tokens=50_999) == 50


def test_an_objective_that_no_stream_meets_leaves_one() -> None:
    assert streams(0.001) == 1


def test_tokens_a_second_are_those_streams_over_their_step() -> None:
    rate = decode_tokens_per_s(TIMING, tpot_s=0.02, context_tokens=1000, max_running=1000)
    most = streams(0.02)
    assert rate == pytest.approx(most / TIMING.step_s(running=most, context_tokens=most * 1000))


@given(
    load=st.floats(0.05, 60.0),
    patience=st.floats(0.0, 50.0),
    late=shares,
    factor=st.floats(0.5, 8.0),
)
def test_the_need_rounded_up_is_that_of_the_formula_tried_one_by_one(
    load: float, patience: float, late: float, factor: float
) -> None:
    need = required_prefill_replicas(
        load,
        service_s=1.0,
        ttft_s=1.0 + patience,
        max_late_fraction=late,
        variability=Variability(arrival_scv=factor, service_scv=factor),
    )
    exact = slow_need(load, patience=patience, late=late, factor=factor)
    assert math.ceil(need - 1e-6) == exact


def waits(replicas: int, load: float, patience: float, rng: Random) -> float:
    """The share of waits beyond `patience` in a simulated queue of M/M/n."""
    free_at = [0.0] * replicas
    now, late, count = 0.0, 0, 20_000
    for _ in range(count):
        now += rng.expovariate(load)
        first = min(range(replicas), key=free_at.__getitem__)
        start = max(now, free_at[first])
        late += start - now > patience
        free_at[first] = start + rng.expovariate(1.0)
    return late / count


def test_the_share_of_long_waits_is_that_of_a_simulated_queue() -> None:
    for replicas, load, patience in ((1, 0.8, 3.0), (4, 3.2, 1.5), (10, 9.0, 1.0)):
        simulated = waits(replicas, load, patience, Random(5))
        assert late_share(replicas, load, patience=patience) == pytest.approx(simulated, abs=0.03)


@given(load=loads, more=st.floats(0.0, 50.0), late=shares, service_s=services)
def test_more_prompts_never_need_fewer_replicas(
    load: float, more: float, late: float, service_s: float
) -> None:
    def need(load: float) -> float:
        return required_prefill_replicas(
            load, service_s=service_s, ttft_s=2.0, max_late_fraction=late
        )

    assert need(load + more) >= need(load) - 1e-6


@given(load=st.floats(0.01, 200.0), late=shares, service_s=services)
def test_needs_exceed_loads_and_a_stricter_target_needs_more(
    load: float, late: float, service_s: float
) -> None:
    need = required_prefill_replicas(load, service_s=service_s, ttft_s=2.0, max_late_fraction=late)
    strict = required_prefill_replicas(
        load, service_s=service_s, ttft_s=2.0, max_late_fraction=late / 2
    )
    assert 0 < need <= strict + 1e-6
    assert load < math.ceil(need)
    crowd = required_decode_replicas(load, streams_per_replica=100.0, max_overload_fraction=late)
    assert (
        load
        < crowd
        < required_decode_replicas(load, streams_per_replica=100.0, max_overload_fraction=late / 2)
    )


def test_little_demand_needs_a_small_part_of_a_replica_and_needs_do_not_jump() -> None:
    def need(load: float) -> float:
        return required_prefill_replicas(load, service_s=0.1, ttft_s=2.0, max_late_fraction=0.01)

    assert 0 < need(0.01) < 0.25
    needs = [need(step / 100) for step in range(1, 800)]
    assert max(later - sooner for sooner, later in pairwise(needs)) < 0.1


def test_large_pools_run_fuller_than_small_ones() -> None:
    def full(load: float) -> float:
        return load / required_prefill_replicas(
            load, service_s=0.5, ttft_s=1.0, max_late_fraction=0.01
        )

    assert full(1.0) < full(4.0) < full(16.0) < full(64.0) < 1.0


def test_irregular_arrivals_need_more() -> None:
    def need(arrivals: float) -> float:
        return required_prefill_replicas(
            5.0,
            service_s=0.5,
            ttft_s=1.0,
            max_late_fraction=0.01,
            variability=Variability(arrival_scv=arrivals),
        )

    assert need(1.0) < need(4.0) < need(16.0)


def test_an_objective_that_the_prompt_alone_breaks_asks_for_no_wait_at_all() -> None:
    need = required_prefill_replicas(3.0, service_s=5.0, ttft_s=1.0, max_late_fraction=0.01)
    replicas = math.ceil(need)
    assert late_share(replicas, 3.0, patience=0.0) <= 0.01
    assert late_share(replicas - 1, 3.0, patience=0.0) > 0.01


def test_without_an_objective_a_pool_is_kept_from_being_full() -> None:
    assert required_prefill_replicas(
        8.5, service_s=1.0, ttft_s=None, max_late_fraction=0.01
    ) == pytest.approx(10.0)


def test_nothing_asked_for_needs_nothing() -> None:
    assert required_prefill_replicas(0.0, service_s=1.0, ttft_s=1.0, max_late_fraction=0.01) == 0.0
    assert (
        required_decode_replicas(0.0, streams_per_replica=10.0, max_overload_fraction=0.01) == 0.0
    )


def test_the_number_of_streams_varies_as_a_poisson_number() -> None:
    """250 streams on average, 100 a replica: few moments see more than the need holds."""
    need = required_decode_replicas(2.5, streams_per_replica=100.0, max_overload_fraction=0.05)
    rng = Random(3)
    crowded = 0
    for _ in range(2000):
        threshold, product, count = math.exp(-250.0), rng.random(), 0
        while product > threshold:
            product *= rng.random()
            count += 1
        crowded += count > need * 100.0
    assert crowded / 2000 == pytest.approx(0.05, abs=0.015)


@given(load=loads, more=st.floats(0.0, 50.0), late=shares)
def test_more_streams_never_need_fewer_replicas(load: float, more: float, late: float) -> None:
    def need(load: float) -> float:
        return required_decode_replicas(load, streams_per_replica=30.0, max_overload_fraction=late)

    assert need(load + more) >= need(load)


# ---------- the closed loop that calibration uses, against a plain twin and closed forms
@dataclass(frozen=True)
class Plain:
    """A step of a fixed time, a time per prompt token, per pair, per decode and its context."""

    step_s: float = 0.01
    token_s: float = 1e-4
    pair_s: float = 1e-8
    decode_s: float = 1e-3
    context_s: float = 1e-6

    def parts(self, batch: StepBatch) -> StepParts:
        return StepParts(
            self.step_s,
            self.decode_s * batch.decode_requests,
            self.token_s * batch.prefill_tokens,
            0.0,
            0.0,
            self.pair_s * batch.prefill_pairs + self.context_s * batch.decode_context_tokens,
            0.0,
            1e-4 * batch.finished_prefills,
        )


def loop(clients: int) -> ClosedLoop:
    return ClosedLoop(clients=clients, max_running_requests=clients, max_batched_tokens=1000)


@dataclass
class One:
    """A request of the twin."""

    number: int
    at: float
    prompt: int
    out: int
    done: int = 0
    first: float = 0.0
    context: int = 0
    left: int = 0


class Twin:
    """One step at a time, plain sums of seconds."""

    def __init__(self, timing: Plain, requests: list[RequestLengths], how: ClosedLoop) -> None:
        self.timing, self.how = timing, how
        self.now, self.free_at = 0.0, [0.0] * how.clients
        self.to_come = list(enumerate(requests))
        self.arriving: list[tuple[float, One]] = []
        self.frontend_free_at = 0.0
        self.queue: list[One] = []
        self.running: list[One] = []
        self.ttfts: dict[int, float] = {}
        self.tpots: dict[int, float] = {}

    def means(self) -> tuple[float, float]:
        """Of times to first tokens and per output token, once all is done."""
        while self.to_come or self.arriving or self.queue or self.running:
            if not self.queue and not self.running:
                if not self.arriving:
                    self.send(min(self.free_at))
                self.now = max(self.now, self.arriving[0][0])
            self.arrive()
            self.step()
        ttfts, tpots = list(self.ttfts.values()), list(self.tpots.values())
        return sum(ttfts) / len(ttfts), sum(tpots) / len(tpots) if tpots else 0.0

    def send(self, until: float) -> None:
        for at in sorted(self.free_at):
            if at <= until and self.to_come:
                self.free_at.remove(at)
                number, (prompt, out, cached) = self.to_come.pop(0)
                done = max(0, min(cached, prompt - 1))
                one = One(number, at, prompt, out, done=done)
                self.arriving.append((max(at, self.frontend_free_at), one))

    def arrive(self) -> None:
        self.send(self.now)
        while self.arriving and self.arriving[0][0] <= self.now:
            self.queue.append(self.arriving.pop(0)[1])

    def step(self) -> None:
        room = self.how.max_batched_tokens - len(self.running)
        chunks: list[tuple[One, int]] = []
        for stream in self.queue:
            if room > 0 and len(self.running) + len(chunks) < self.how.max_running_requests:
                chunks.append((stream, min(room, stream.prompt - stream.done)))
                room -= chunks[-1][1]
        self.now += sum(
            self.timing.parts(
                StepBatch(
                    prefill_tokens=sum(chunk for _, chunk in chunks),
                    prefill_pairs=sum(c * stream.done + c * (c + 1) / 2 for stream, c in chunks),
                    decode_requests=len(self.running),
                    decode_context_tokens=sum(stream.context for stream in self.running),
                    finished_prefills=sum(stream.done + c >= stream.prompt for stream, c in chunks),
                )
            )
        )
        self.send(self.now)
        tokens = len(self.running) + sum(stream.done + c >= stream.prompt for stream, c in chunks)
        seen = self.now
        if work := tokens * self.how.frontend_token_s:
            seen = self.frontend_free_at = max(self.frontend_free_at, self.now) + work
        for stream in list(self.running):
            stream.left -= 1
            stream.context += 1
            self.end(stream, seen)
        for stream, chunk in chunks:
            stream.done += chunk
            if stream.done == stream.prompt:
                self.begin(stream, seen)

    def begin(self, one: One, seen: float) -> None:
        self.queue.remove(one)
        # The loop counts from when the client turned to its next request.
        self.ttfts[one.number] = seen - one.at + (self.how.think_time_s if one.at else 0.0)
        one.first, one.context, one.left = seen, one.prompt + 1, one.out - 1
        self.running.append(one)
        self.end(one, seen)

    def end(self, one: One, seen: float) -> None:
        if one.left > 0:
            return
        self.running.remove(one)
        if one.out > 1:
            self.tpots[one.number] = (seen - one.first) / (one.out - 1)
        self.free_at.append(seen + self.how.think_time_s)


LENGTHS = st.lists(
    st.builds(RequestLengths, st.integers(1, 3000), st.integers(1, 40), st.integers(-9, 4000)),
    min_size=1,
    max_size=20,
)


MET_IN_THE_FRONTEND = [(1091, 16, 0), (349, 15, 0), (628, 2, 0), (1, 22, 3649), (1, 5, 0)]
"""Two of them are sent while a third holds the frontend, and the engine is idle."""


LONGER_AND_LONGER = [
    (2201, 2, 0),
    (1, 21, 0),
    (707, 1, 3087),
    (1, 2, 1088),
    (1, 1, 0),
    (2518, 2, 37),
    (1, 1, 279),
    (2912, 2, 0),
]
"""A prompt comes a step earlier than so many steps of the first's length take."""


@example([RequestLengths(*lengths) for lengths in MET_IN_THE_FRONTEND], 3, 5, 0.05)
@example([RequestLengths(*lengths) for lengths in LONGER_AND_LONGER], 5, 2, 0.05)
@given(LENGTHS, st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 1e-3, 7e-3, 0.05]))
def test_many_steps_at_once_are_as_one_at_a_time(
    requests: list[RequestLengths], clients: int, places: int, frontend_token_s: float
) -> None:
    how = replace(loop(clients), max_running_requests=places, frontend_token_s=frontend_token_s)
    seen = simulate_closed_loop(Plain(), requests, how)
    ttft_s, tpot_s = Twin(Plain(), requests, how).means()
    assert sum(seen.tpot) == pytest.approx(tpot_s, rel=1e-6, abs=1e-9)
    assert sum(seen.ttft) == pytest.approx(ttft_s, rel=1e-6, abs=1e-9)


def test_a_slow_frontend_bounds_the_tokens_of_all_clients_and_first_tokens_wait_for_it() -> None:
    requests = [RequestLengths(100, 200)] * 80
    quick = simulate_closed_loop(Plain(), requests, loop(8))
    slow = simulate_closed_loop(Plain(), requests, replace(loop(8), frontend_token_s=0.005))
    request_s = sum(slow.ttft) + 199 * sum(slow.tpot)
    assert 8 * 200 / request_s == pytest.approx(1 / 0.005, rel=0.05)
    assert sum(slow.ttft) > sum(quick.ttft) + 8 * 0.005 / 2


def test_a_frontend_that_keeps_up_delays_tokens_only_by_its_own_time() -> None:
    requests = [RequestLengths(100, 200)] * 16
    none = simulate_closed_loop(Plain(), requests, loop(8))
    quick = simulate_closed_loop(Plain(), requests, replace(loop(8), frontend_token_s=1e-4))
    assert sum(quick.tpot) == pytest.approx(sum(none.tpot), rel=0.01)
    assert 0 < sum(quick.ttft) - sum(none.ttft) < 2 * 8 * 1e-4


def test_one_client_waits_for_its_prompt_and_nothing_else() -> None:
    seen = simulate_closed_loop(Plain(), [RequestLengths(500, 11)], loop(1))
    prompt_s = 0.01 + 500e-4 + 1e-8 * 500 * 501 / 2 + 1e-4
    context = sum(range(501, 511))
    assert sum(seen.ttft) == pytest.approx(prompt_s)
    assert sum(seen.tpot) == pytest.approx(0.01 + 1e-3 + 1e-6 * context / 10)


def test_times_are_linear_in_the_parts() -> None:
    requests = [RequestLengths(700, 20)] * 12
    once, twice = (
        simulate_closed_loop(
            Plain(0.01 * f, 1e-4 * f, 1e-8 * f, 1e-3 * f, 1e-6 * f),
            requests,
            replace(loop(4), think_time_s=0.0),
        )
        for f in (1, 2)
    )
    assert twice.tpot[:-1] == pytest.approx([2 * part for part in once.tpot[:-1]])


def test_gathered_prompts_wait_for_their_number_of_steps() -> None:
    requests = [RequestLengths(100, 200), RequestLengths(100, 50), RequestLengths(100, 50)]
    eager = simulate_closed_loop(Plain(), requests, loop(2))
    patient = simulate_closed_loop(
        Plain(), requests, replace(loop(2), max_prefill_delay_steps=20, prefill_batch_tokens=900)
    )
    # The third comes while the first decodes alone, and is held for 20 of its steps.
    held_s = 20 * (0.01 + 1e-3 + 1e-6 * 170)
    assert 3 * (sum(patient.ttft) - sum(eager.ttft)) == pytest.approx(held_s, rel=0.02)


def test_prompts_do_not_gather_beyond_what_fills_a_step() -> None:
    requests = [RequestLengths(950, 50)] * 4
    how = replace(loop(2), max_prefill_delay_steps=20, prefill_batch_tokens=900)
    assert simulate_closed_loop(Plain(), requests, how) == simulate_closed_loop(
        Plain(), requests, loop(2)
    )


def test_there_must_be_something_to_measure() -> None:
    with pytest.raises(ValueError, match="got no requests, expected 1 or more"):
        simulate_closed_loop(Plain(), [], loop(1))


def test_cached_tokens_of_a_prompt_are_not_computed() -> None:
    fresh = simulate_closed_loop(Plain(), [RequestLengths(900, 5)] * 4, loop(1))
    cached = simulate_closed_loop(Plain(), [RequestLengths(900, 5, 800)] * 4, loop(1))
    assert sum(cached.ttft) < sum(fresh.ttft) - 0.07
    assert sum(cached.tpot) == pytest.approx(sum(fresh.tpot))


def test_new_requests_wait_until_the_engine_looks_for_them() -> None:
    rng = random.Random(1)
    requests = [RequestLengths(100, rng.randint(400, 600)) for _ in range(400)]
    eager = simulate_closed_loop(Plain(), requests, loop(20))
    seldom = simulate_closed_loop(
        Plain(), requests, replace(loop(20), receive_interval_steps=30, mixes_steps=False)
    )
    often = simulate_closed_loop(
        Plain(), requests, replace(loop(20), receive_interval_steps=1, mixes_steps=False)
    )
    step_s = sum(eager.tpot)
    # Half an interval, less the looks after prompts of others.
    assert 6 * step_s < sum(seldom.ttft) - sum(often.ttft) < 18 * step_s
    alone = [RequestLengths(100, 50)] * 5
    patient = replace(loop(1), receive_interval_steps=30)
    assert simulate_closed_loop(Plain(), alone, patient) == simulate_closed_loop(
        Plain(), alone, loop(1)
    )


@pytest.mark.parametrize("interval_steps", [1, 30])
def test_a_step_that_is_prepared_ahead_misses_what_arrives_during_the_one_before_it(
    interval_steps: int,
) -> None:
    rng = random.Random(1)
    requests = [RequestLengths(100, rng.randint(400, 600)) for _ in range(400)]
    looks = replace(loop(20), receive_interval_steps=interval_steps)
    at_once = simulate_closed_loop(Plain(), requests, looks)
    ahead = simulate_closed_loop(Plain(), requests, replace(looks, prepares_ahead=True))
    step_s = sum(at_once.tpot)
    # Less where requests come together, as an engine that seldom looks makes them.
    least_steps = 0.8 if interval_steps == 1 else 0.1
    assert least_steps * step_s < sum(ahead.ttft) - sum(at_once.ttft) < 2 * step_s
    assert sum(ahead.tpot) == pytest.approx(step_s, rel=0.01)
    alone = [RequestLengths(100, 50)] * 5
    assert simulate_closed_loop(
        Plain(), alone, replace(looks, clients=1, prepares_ahead=True)
    ) == simulate_closed_loop(Plain(), alone, loop(1))


def test_prompts_that_are_not_mixed_with_decodes_stop_these() -> None:
    requests = [RequestLengths(100, 2), RequestLengths(900, 20)] * 4
    mixed = simulate_closed_loop(Plain(), requests, loop(2))
    apart = simulate_closed_loop(Plain(), requests, replace(loop(2), mixes_steps=False))
    assert sum(apart.tpot) > sum(mixed.tpot)
