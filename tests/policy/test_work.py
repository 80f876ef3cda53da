"""Device-seconds of requests: what a prompt and a stream take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import StepTotals
from baton.policy.placement.device_seconds import (
    decode_device_s,
    mean_decode_batch,
    prefill_device_s,
)
from tests.fakes.timings import LinearTiming

TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.001, per_stream_s=0.002)


def test_a_prompt_costs_what_its_uncached_tokens_take_on_all_devices() -> None:
    assert prefill_device_s(TIMING, 100) == pytest.approx(0.11)
    assert prefill_device_s(TIMING, 100, devices=4.0) == pytest.approx(0.44)


@pytest.mark.parametrize("tokens", [0, -5])
def test_what_is_cached_costs_nothing(tokens: int) -> None:
    assert prefill_device_s(TIMING, tokens) == 0.0


def test_streams_share_their_steps() -> None:
    # Ten streams: a step takes 0.03 s, a tenth of it is one stream's.
    assert decode_device_s(TIMING, 50, running=10) == pytest.approx(50 * 0.003)
    assert decode_device_s(TIMING, 50, running=10, devices=2.0) == pytest.approx(50 * 0.006)


def test_a_stream_alone_pays_for_whole_steps() -> None:
    assert decode_device_s(TIMING, 50, running=0) == decode_device_s(TIMING, 50, running=1)
    assert decode_device_s(TIMING, 50, running=1) == pytest.approx(50 * 0.012)


@given(st.integers(1, 40), st.integers(1, 100))
def test_what_streams_pay_together_is_what_their_steps_take(streams: int, tokens: int) -> None:
    paid_s = sum(decode_device_s(TIMING, tokens, running=streams) for _ in range(streams))
    assert paid_s == pytest.approx(tokens * TIMING.step_s(running=streams))


def test_the_crowd_between_two_reports_is_their_mean_batch() -> None:
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
def test_where_no_steps_were_counted_or_totals_went_back_there_is_no_crowd(
    after: StepTotals,
) -> None:
    before = StepTotals(decode_steps=10, decode_tokens=40, context_tokens=400)
    assert mean_decode_batch(before, after) is None
