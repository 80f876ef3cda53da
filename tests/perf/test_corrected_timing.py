from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, ReplicaView, StepTotals
from baton.perf.fitting.engine_timings import (
    CachedTiming,
    CorrectedTiming,
    CorrectionFactor,
    EngineTimings,
    predicted_busy_s,
)
from baton.perf.steps.step_costs import PRIOR_COSTS, FittedTiming
from tests.fakes.facts import replica_facts

MODEL = FittedTiming(costs=PRIOR_COSTS, max_batched_tokens=2048, host_block_s=0.001)
FACTS = replica_facts("a")
POOL = FACTS.pool


class Counting:
    """A timing that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        self.asked += 1
        return tokens + 1000.0 * running + 1e6 * context_tokens

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        self.asked += 1
        return running + 1000.0 * context_tokens

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        self.asked += 1
        return 1.0 + context_tokens

    def host_load_s(self, blocks: int) -> float:
        return float(blocks)


def work(steps: int, *, factor: float = 1.0) -> StepTotals:
    """So many decode steps for four with 4,000 tokens, and as many that prefill 100 tokens."""
    took_s = MODEL.step_s(running=4, context_tokens=4000) + MODEL.prefill_s(100)
    return StepTotals(
        steps=2 * steps,
        busy_s=steps * took_s * factor,
        prefill_tokens=100 * steps,
        decode_tokens=4 * steps,
        context_tokens=4000 * steps,
        prefill_steps=steps,
        decode_steps=steps,
    )


def test_busy_seconds_are_those_of_all_steps() -> None:
    assert predicted_busy_s(MODEL, work(10)) == pytest.approx(work(10).busy_s)


def test_steps_that_do_both_cost_what_a_prefill_beside_decodes_does() -> None:
    both = StepTotals(
        steps=3,
        prefill_tokens=300,
        decode_tokens=12,
        context_tokens=12_000,
        prefill_steps=3,
        decode_steps=3,
    )
    model = Counting()
    one_s = model.prefill_s(100, running=4, context_tokens=4000)
    assert predicted_busy_s(model, both) == pytest.approx(3 * one_s)
    assert predicted_busy_s(MODEL, StepTotals()) == 0.0


@given(st.floats(0.3, 3.5))
def test_the_factor_becomes_what_engines_take_for_each_predicted_second(factor: float) -> None:
    correction = CorrectionFactor()
    for _ in range(1000):
        assert correction.observe(factor * 0.5, 0.5)
    assert correction.factor == pytest.approx(factor, rel=0.02)
    assert correction.error == pytest.approx(0.0, abs=0.1)


def test_an_engine_that_has_changed_is_followed() -> None:
    correction = CorrectionFactor()
    for factor in (1.0, 2.0):
        for _ in range(1000):
            correction.observe(factor * 0.5, 0.5)
    assert correction.factor == pytest.approx(2.0, rel=0.01)


def test_the_factor_is_bounded() -> None:
    for actual_s, bound in ((100.0, 4.0), (0.001, 0.25)):
        correction = CorrectionFactor()
        for _ in range(2000):
            correction.observe(actual_s, 1.0)
        assert correction.factor == bound


@pytest.mark.parametrize(
    "wrong", [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_what_means_nothing_is_not_learned_from(wrong: tuple[float, float]) -> None:
    correction = CorrectionFactor()
    assert not correction.observe(*wrong)
    assert (correction.factor, correction.reports) == (1.0, 0)


def test_all_that_the_engine_does_is_corrected_and_the_hosts_part_is_not() -> None:
    twice = CorrectedTiming(MODEL, 2.0)
    assert twice.prefill_s(300, running=2) == 2 * MODEL.prefill_s(300, running=2)
    assert twice.step_s(running=3, context_tokens=9) == 2 * MODEL.step_s(
        running=3, context_tokens=9
    )
    assert twice.decode_request_s(context_tokens=7) == 2 * MODEL.decode_request_s(context_tokens=7)
    assert twice.host_load_s(3) == MODEL.host_load_s(3)


def test_the_costs_that_are_shown_are_those_of_a_linear_model() -> None:
    shown = CorrectedTiming(MODEL).costs()
    for name in ("decode_step_s", "prefill_step_s", "prefill_token_s", "decode_request_s"):
        assert getattr(shown, name) == pytest.approx(getattr(PRIOR_COSTS, name)), name
    assert shown.context_token_s == pytest.approx(PRIOR_COSTS.context_token_s)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_what_is_remembered_is_what_was_said(tokens: int, running: int, context: int) -> None:
    model = Counting()
    remembered = CachedTiming(model)
    for _ in range(2):
        assert remembered.prefill_s(
            tokens, running=running, context_tokens=context
        ) == Counting().prefill_s(tokens, running=running, context_tokens=context)
        assert remembered.step_s(running=running, context_tokens=context) == Counting().step_s(
            running=running, context_tokens=context
        )
        assert remembered.decode_request_s(context_tokens=context) == 1.0 + context
    assert model.asked == (4 if context else 3)
    assert remembered.host_load_s(tokens) == tokens


def view() -> ReplicaView:
    return ReplicaView(facts=FACTS, load_received_at_s=0.0)


def test_a_pool_with_a_model_starts_from_it_and_others_from_what_is_usual() -> None:
    book = EngineTimings({POOL: replace(MODEL, host_block_s=1.0)})
    other = ReplicaView(facts=replace(FACTS, pool="other"), load_received_at_s=0.0)
    assert book.of(view()).step_s(running=1) == MODEL.step_s(running=1)
    assert book.of(view()).host_load_s(2) == 2.0
    assert book.of(other).host_load_s(2) != 2.0


def test_a_pools_model_is_corrected_by_what_its_replicas_report() -> None:
    book = EngineTimings({POOL: MODEL})
    for report in range(1, 400):
        load = Load(steps=work(50 * report, factor=1.5))
        book.observe(FACTS, load, float(report))
    assert book.of(view()).step_s(running=4) == pytest.approx(
        1.5 * MODEL.step_s(running=4), rel=0.03
    )
    (quality,) = book.quality()
    assert (quality.pool, quality.reports, quality.rejected_reports) == (POOL, 398, 0)
    assert quality.costs.prefill_token_s == pytest.approx(1.5 * 5e-5, rel=0.03)


def test_totals_that_went_back_teach_nothing() -> None:
    book = EngineTimings({POOL: MODEL})
    book.observe(FACTS, Load(steps=work(50)), 0.0)
    book.observe(FACTS, Load(steps=work(10, factor=9.0)), 1.0)
    assert book.of(view()).step_s(running=4) == MODEL.step_s(running=4)


def test_predicted_times_to_first_token_are_compared_for_such_a_pool_too() -> None:
    book = EngineTimings({POOL: MODEL})
    book.of(view())
    book.observe_ttft(POOL, predicted_s=2.0, actual_s=1.0)
    (quality,) = book.quality()
    assert (quality.ttft_count, quality.ttft_error, quality.ttft_bias) == (1, 1.0, 1.0)
