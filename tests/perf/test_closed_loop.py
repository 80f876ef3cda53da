"""The closed loop that calibration uses, against a plain twin and closed forms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.perf.capacity.closed_loop import ClosedLoop, RequestLengths, simulate_closed_loop
from baton.perf.step_timing import StepBatch
from baton.perf.steps.roofline import StepParts


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
        self.queue: list[One] = []
        self.running: list[One] = []
        self.ttfts: dict[int, float] = {}
        self.tpots: dict[int, float] = {}

    def means(self) -> tuple[float, float]:
        """Of times to first tokens and per output token, once all is done."""
        while self.to_come or self.queue or self.running:
            if not self.queue and not self.running:
                self.now = max(self.now, min(self.free_at))
            self.arrive()
            self.step()
        skipped = self.how.warm_up_requests
        ttfts = [ttft for number, ttft in self.ttfts.items() if number >= skipped]
        tpots = [tpot for number, tpot in self.tpots.items() if number >= skipped]
        return sum(ttfts) / len(ttfts), sum(tpots) / len(tpots) if tpots else 0.0

    def arrive(self) -> None:
        for at in sorted(self.free_at):
            if at <= self.now and self.to_come:
                self.free_at.remove(at)
                number, (prompt, out) = self.to_come.pop(0)
                self.queue.append(One(number, at, prompt, out))

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
        for stream in list(self.running):
            stream.left -= 1
            stream.context += 1
            self.end(stream)
        for stream, chunk in chunks:
            stream.done += chunk
            if stream.done == stream.prompt:
                self.begin(stream)

    def begin(self, one: One) -> None:
        self.queue.remove(one)
        # The loop counts from when the client turned to its next request.
        self.ttfts[one.number] = self.now - one.at + (self.how.think_time_s if one.at else 0.0)
        one.first, one.context, one.left = self.now, one.prompt + 1, one.out - 1
        self.running.append(one)
        self.end(one)

    def end(self, one: One) -> None:
        if one.left > 0:
            return
        self.running.remove(one)
        if one.out > 1:
            self.tpots[one.number] = (self.now - one.first) / (one.out - 1)
        self.free_at.append(self.now + self.how.think_time_s)


LENGTHS = st.lists(
    st.builds(RequestLengths, st.integers(1, 3000), st.integers(1, 40)), min_size=1, max_size=20
)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 6))
def test_many_steps_at_once_are_as_one_at_a_time(
    requests: list[RequestLengths], clients: int, places: int
) -> None:
    how = replace(loop(clients), max_running_requests=places, warm_up_requests=len(requests) // 2)
    seen = simulate_closed_loop(Plain(), requests, how)
    ttft_s, tpot_s = Twin(Plain(), requests, how).means()
    assert sum(seen.tpot) == pytest.approx(tpot_s, rel=1e-6, abs=1e-9)
    idle_s = (
        how.think_time_s
    )  # with nobody else there, no step accounts for the client's being away
    assert sum(seen.ttft) == pytest.approx(ttft_s, rel=1e-6, abs=idle_s + 1e-9)


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


def test_prompts_that_gather_wait_for_so_many_steps() -> None:
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
    with pytest.raises(ValueError, match="2 requests, of which 2 are not measured"):
        simulate_closed_loop(
            Plain(), [RequestLengths(1, 2)] * 2, replace(loop(1), warm_up_requests=2)
        )
