from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, StepTotals
from baton.perf.fitting.engine_timings import HORIZON_S, EngineTimings, PrefillShare
from tests.fakes.timings import LinearTiming, replica_view

TIMING = LinearTiming(per_token_s=0.0001)


def done(steps: int, tokens: int) -> StepTotals:
    return StepTotals(steps=steps, prefill_steps=steps, prefill_tokens=tokens)


@given(
    st.lists(st.tuples(st.floats(0.01, 2.0), st.integers(0, 20), st.integers(2, 200)), max_size=12)
)
def test_the_share_is_every_report_faded_and_added_up(
    reports: list[tuple[float, int, int]],
) -> None:
    share, now_s = PrefillShare(), 0.0
    told: list[tuple[float, int, int]] = []
    for after_s, steps, chunk in reports:
        now_s += after_s
        share.observe(done(steps, steps * chunk), now_s)
        told.append((now_s, steps, steps * chunk))
    asked_s = now_s + 0.5
    faded = [(exp(-(asked_s - at) / HORIZON_S), steps, tokens) for at, steps, tokens in told]
    kept = sum(weight * steps for weight, steps, _ in faded)
    tokens = sum(weight * tokens for weight, _, tokens in faded)
    wanted = 0.0
    if kept > 0:
        chunk = round(tokens / kept)
        wanted = min(0.95, kept * (chunk - 1) * TIMING.per_token_s / HORIZON_S)
    # A mean just between two whole chunks may be rounded either way.
    assert share.share(TIMING, asked_s) == pytest.approx(
        wanted, abs=(kept + 1) * TIMING.per_token_s / HORIZON_S
    )


def test_a_steady_stream_of_prompts_takes_its_share() -> None:
    share = PrefillShare()
    for beat in range(1, 200):  # every 0.25 s, 100 ms of it: ten chunks of 101 tokens
        share.observe(done(10, 1010), beat * 0.25)
    assert share.share(TIMING, 199 * 0.25) == pytest.approx(0.42, rel=0.05)


def test_who_computed_no_prompts_for_long_has_no_share_left() -> None:
    share = PrefillShare()
    assert share.share(TIMING, 0.0) == 0
    share.observe(done(10, 10_000), 1.0)
    assert share.share(TIMING, 1.0) == pytest.approx(10 * 1000 * 0.0001 / HORIZON_S)
    assert share.share(TIMING, 1.0 + 20 * HORIZON_S) < 1e-6


def test_there_is_always_some_time_left_to_decode() -> None:
    share = PrefillShare()
    share.observe(done(1000, 1_000_000), 1.0)
    assert share.share(TIMING, 1.0) == 0.95


def test_an_engine_that_starts_again_teaches_nothing() -> None:
    share = PrefillShare()
    share.observe(StepTotals(steps=-3, prefill_steps=5, prefill_tokens=500), 1.0)
    assert share.share(TIMING, 1.0) == 0


def test_the_book_knows_each_replica_and_forgets_who_left() -> None:
    book, busy, idle = EngineTimings(), replica_view("a"), replica_view("b")
    for view in (busy, idle):
        book.observe(view.facts, Load(), 0.0)
    worked = StepTotals(steps=10, busy_s=1.0, prefill_steps=10, prefill_tokens=5000)
    book.observe(busy.facts, Load(steps=worked), 1.0)
    assert 0 < book.prefill_time_fraction(busy, 2.0) < book.prefill_time_fraction(busy, 1.0)
    assert book.prefill_time_fraction(idle, 1.0) == 0
    book.remove_replica("a")
    assert book.prefill_time_fraction(busy, 1.0) == 0
