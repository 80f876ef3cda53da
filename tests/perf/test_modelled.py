"""The timing that decisions ask, over a model of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.modelled import ModelledTiming
from baton.perf.steps.roofline import Roofline
from tests.perf.shapes import H100, LLAMA_8B

STEPS = Roofline(LLAMA_8B, H100)
TIMING = ModelledTiming(steps=STEPS, max_batched_tokens=2048, host_block_s=1e-4)


@given(st.integers(1, 30_000), st.integers(0, 300), st.integers(1, 2000))
def test_a_prompt_takes_as_long_as_all_its_chunks(tokens: int, running: int, context: int) -> None:
    done, expected = 0, 0.0
    while done < tokens:
        chunk = min(2048 - running, tokens - done)
        expected += STEPS.step_s(
            StepBatch(
                prefill_tokens=chunk,
                prefill_requests=1,
                prefill_pairs=attention_pairs(chunk, done),
                prefill_context_tokens=done,
                decode_requests=running,
                decode_context_tokens=running * context,
                finished_prefills=int(done + chunk == tokens),
            )
        )
        done += chunk
    asked = TIMING.prefill_s(tokens, running=running, context_tokens=running * context)
    assert asked == pytest.approx(expected, rel=1e-9)


def test_a_prompt_of_twice_the_length_takes_more_than_twice_as_long() -> None:
    assert TIMING.prefill_s(65_536) > 2.3 * TIMING.prefill_s(32_768)


def test_prompts_beside_decodes_come_in_pieces_of_the_smaller_budget() -> None:
    two = replace(TIMING, max_batched_tokens_while_decoding=512)
    small = replace(TIMING, max_batched_tokens=512)
    beside = {"running": 8, "context_tokens": 8000}
    assert two.prefill_s(5000, **beside) == small.prefill_s(5000, **beside)
    assert two.prefill_s(5000) == TIMING.prefill_s(5000) < small.prefill_s(5000)
    larger = replace(small, max_batched_tokens_while_decoding=8192)
    assert larger.prefill_s(5000, **beside) == small.prefill_s(5000, **beside)


def test_nothing_takes_no_time() -> None:
    assert TIMING.prefill_s(0) == 0
    assert TIMING.host_load_s(0) == 0
    assert TIMING.host_load_s(-1) == 0
    assert TIMING.host_load_s(30) == pytest.approx(3e-3)


def test_decodes_that_fill_the_budget_leave_room_for_one_token() -> None:
    assert TIMING.prefill_s(2, running=4000) > TIMING.prefill_s(1, running=4000) > 0


@given(st.integers(1, 200), st.integers(0, 100_000), st.integers(0, 50_000))
def test_one_more_decode_adds_what_a_step_with_it_takes_more(
    running: int, context: int, more: int
) -> None:
    before = TIMING.step_s(running=running, context_tokens=context)
    after = TIMING.step_s(running=running + 1, context_tokens=context + more)
    assert TIMING.decode_request_s(context_tokens=more) == pytest.approx(
        after - before, rel=0.6, abs=1.5e-4
    )


# ------------------------------------------------------------------ queues of prompts


@given(st.integers(1, 40), st.integers(64, 1500), st.integers(0, 300))
def test_a_queue_of_prompts_takes_about_as_long_as_its_steps_one_by_one(
    prompts: int, length: int, running: int
) -> None:
    """The slow twin: full steps are filled with prompts in order, each from where it was left."""
    room, expected, left = 2048 - running, 0.0, [(length, 0)] * prompts
    while left:
        budget, batch, todo = room, [], []
        for missing, before in left:
            chunk = min(budget, missing)
            budget -= chunk
            if chunk:
                batch.append((chunk, before))
            if missing > chunk:
                todo.append((missing - chunk, before + chunk))
        left = todo
        expected += STEPS.step_s(
            StepBatch(
                prefill_tokens=sum(chunk for chunk, _ in batch),
                prefill_requests=len(batch),
                prefill_pairs=sum(attention_pairs(*item) for item in batch),
                prefill_context_tokens=sum(before for _, before in batch),
                decode_requests=running,
                decode_context_tokens=running * 1000,
                finished_prefills=len(batch),
            )
        )
    asked = TIMING.prefill_s(
        prompts * length, running=running, context_tokens=running * 1000, length_tokens=length
    )
    assert asked == pytest.approx(expected, rel=0.05)


def test_many_short_prompts_take_less_than_one_as_long_as_all_of_them() -> None:
    one, many = TIMING.prefill_s(65_536), TIMING.prefill_s(65_536, length_tokens=1024)
    assert many < 0.9 * one


@given(st.integers(1, 5000), st.integers(0, 10_000))
def test_a_queue_of_one_prompt_is_that_prompt(tokens: int, more: int) -> None:
    assert TIMING.prefill_s(tokens, length_tokens=tokens + more) == TIMING.prefill_s(tokens)


class OnlyPairs:
    """Steps that take as long as their pairs of tokens alone need."""

    def step_s(self, batch: StepBatch) -> float:
        return 1e-9 * batch.prefill_pairs


@given(st.integers(2, 40), st.integers(1, 6000))
def test_tokens_of_a_queue_attend_to_their_own_prompts_only(prompts: int, length: int) -> None:
    timing = ModelledTiming(steps=OnlyPairs(), max_batched_tokens=2048, host_block_s=0.0)
    asked = timing.prefill_s(prompts * length, length_tokens=length)
    assert asked == pytest.approx(1e-9 * prompts * attention_pairs(length, 0))
