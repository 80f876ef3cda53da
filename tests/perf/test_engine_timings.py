"""Seconds by five coefficients, and the book that learns them from load reports."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, ReplicaFacts, ReplicaView, Role, StepTotals
from baton.perf.fitting.decayed_sum import DecayedSum
from baton.perf.fitting.engine_timings import (
    HORIZON_S,
    CachedTiming,
    CorrectionFactor,
    EngineTimings,
    OutputLengths,
    PrefillShare,
    predicted_busy_s,
)
from baton.perf.fitting.lateness import LatenessHistogram
from baton.perf.steps.step_costs import PRIOR_COSTS, FittedTiming, StepCosts
from baton.policy.placement.port import TimingEstimates
from tests.fakes.facts import replica_facts
from tests.fakes.timings import LinearTiming, replica_view

COSTS = StepCosts(
    decode_step_s=0.01,
    prefill_step_s=0.02,
    prefill_token_s=1e-4,
    decode_request_s=1e-3,
    context_token_s=1e-6,
)
TIMING = FittedTiming(costs=COSTS, max_batched_tokens=100, host_block_s=0.5)


def in_steps(tokens: int, running: int, context_tokens: int) -> float:
    """The slow twin of `prefill_s`: one step after the other."""
    took_s = 0.0
    while tokens > 0:
        chunk = min(tokens, max(1, TIMING.max_batched_tokens - running))
        took_s += 0.02 + chunk * 1e-4
        if running:
            took_s += 0.01 + running * 1e-3 + context_tokens * 1e-6
        tokens -= chunk
    return took_s


@given(tokens=st.integers(-5, 1000), running=st.integers(0, 120), context=st.integers(0, 10**5))
def test_a_prefill_takes_its_chunks_and_the_decodes_beside_them(
    tokens: int, running: int, context: int
) -> None:
    predicted_s = TIMING.prefill_s(tokens, running=running, context_tokens=context)
    assert predicted_s == pytest.approx(in_steps(tokens, running, context), rel=1e-9, abs=0.0)


def test_a_step_and_one_more_request_cost_what_the_coefficients_say() -> None:
    assert TIMING.step_s(running=3, context_tokens=2000) == pytest.approx(0.01 + 0.003 + 0.002)
    assert TIMING.decode_request_s(context_tokens=500) == pytest.approx(1.5e-3)
    assert TIMING.host_load_s(4) == 2.0
    assert TIMING.host_load_s(-1) == 0.0


# -------------------------------------------------------------------- the book


class Engine:
    """Adds up what an engine of known speed has done, as its replica would report it."""

    def __init__(self, facts: ReplicaFacts, costs: StepCosts, *, says_context: bool = True) -> None:
        self.facts = facts
        self.costs = costs
        self.says_context = says_context
        self.totals = StepTotals()

    def work(self, *, steps: int, prefill: int = 0, running: int = 1, context: int = 0) -> Load:
        costs, attended = self.costs, steps * running * context
        decoding = steps if running else 0
        prefilling = min(steps, -(-prefill // 500))
        busy_s = (
            decoding * costs.decode_step_s
            + prefilling * costs.prefill_step_s
            + prefill * costs.prefill_token_s
            + steps * running * costs.decode_request_s
            + attended * costs.context_token_s
        )
        done = self.totals
        self.totals = StepTotals(
            steps=done.steps + steps,
            busy_s=done.busy_s + busy_s,
            prefill_tokens=done.prefill_tokens + prefill,
            decode_tokens=done.decode_tokens + steps * running,
            context_tokens=done.context_tokens + attended * self.says_context,
            prefill_steps=done.prefill_steps + prefilling,
            decode_steps=done.decode_steps + decoding,
        )
        return self.load()

    def load(self) -> Load:
        return Load(steps=self.totals)


def engine(
    replica_id: str = "d0", role: Role = Role.DECODE, *, says_context: bool = True
) -> Engine:
    return Engine(replica_facts(replica_id, role), COSTS, says_context=says_context)


def serve(book: EngineTimings, at: Engine, *, reports: int = 120) -> None:
    """Under a load that varies, so that the coefficients can be told apart."""
    for number in range(reports):
        load = at.work(
            steps=1 + number % 7,
            prefill=(number * 131) % 1500 if number % 3 else 0,
            running=(number * 17) % 30,
            context=100 + (number * 37) % 900,
        )
        book.observe(at.facts, load, 0.25 * number)


def view(facts: ReplicaFacts) -> ReplicaView:
    return ReplicaView(facts=facts, load_received_at_s=0.0)


def costs_of(book: EngineTimings, facts: ReplicaFacts) -> StepCosts:
    timing = book.of(view(facts))
    assert isinstance(timing, FittedTiming)
    return timing.costs


def test_placement_gets_timings_from_the_timings_table() -> None:
    timings: TimingEstimates = EngineTimings()
    assert timings.of(view(replica_facts("d0"))).step_s(running=0) > 0


@pytest.mark.parametrize("role", list(Role))
def test_before_any_report_the_prior_stands(role: Role) -> None:
    assert costs_of(EngineTimings(), replica_facts("r", role)) == PRIOR_COSTS


def test_reports_teach_the_pool_its_coefficients() -> None:
    book, at = EngineTimings(), engine()
    serve(book, at)
    learned = costs_of(book, at.facts)
    assert learned.decode_step_s == pytest.approx(0.01, rel=0.1)
    assert learned.prefill_step_s == pytest.approx(0.02, rel=0.1)
    assert learned.prefill_token_s == pytest.approx(1e-4, rel=0.1)
    assert learned.decode_request_s == pytest.approx(1e-3, rel=0.1)
    assert learned.context_token_s == pytest.approx(1e-6, rel=0.1)


def test_measurements_of_a_replica_hold_for_its_pool_and_for_no_other() -> None:
    book, at = EngineTimings(), engine("d0")
    serve(book, at)
    assert costs_of(book, replica_facts("d1", Role.DECODE)) == costs_of(book, at.facts)
    assert costs_of(book, replica_facts("p0", Role.PREFILL)) == PRIOR_COSTS


def test_the_prior_stands_until_eight_reports_were_learned_from() -> None:
    book, at = EngineTimings(), engine()
    serve(book, at, reports=8)  # the first only sets the base
    assert costs_of(book, at.facts) == PRIOR_COSTS
    book.observe(at.facts, at.work(steps=3), 9.0)
    assert costs_of(book, at.facts) != PRIOR_COSTS


def test_lost_reports_hardly_change_the_timings() -> None:
    """One that covers three windows teaches nearly what the three would have."""
    complete, lossy = EngineTimings(), EngineTimings()
    one, two = engine(), engine()
    for number in range(720):
        work = {"steps": 1 + number % 5, "running": number % 20, "prefill": (number * 71) % 900}
        complete.observe(one.facts, one.work(**work), 0.25 * number)
        load = two.work(**work)
        if number % 3 == 0:
            lossy.observe(two.facts, load, 0.25 * number)
    for running in (5, 10, 30):
        seconds = [b.of(view(one.facts)).step_s(running=running) for b in (complete, lossy)]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.15)


def reports_of(book: EngineTimings) -> int:
    return sum(quality.reports for quality in book.quality())


def refused_of(book: EngineTimings) -> int:
    return sum(quality.rejected_reports for quality in book.quality())


def test_the_first_report_of_a_replica_only_sets_the_base() -> None:
    book, at = EngineTimings(), engine()
    at.totals = StepTotals(steps=10_000, busy_s=9e9)
    book.observe(at.facts, at.load(), 0.0)
    assert reports_of(book) == 0


def test_a_report_without_new_steps_teaches_nothing() -> None:
    book, at = EngineTimings(), engine()
    book.observe(at.facts, at.work(steps=5), 0.0)
    book.observe(at.facts, at.load(), 1.0)
    assert (reports_of(book), refused_of(book)) == (0, 0)


@pytest.mark.parametrize("field", StepTotals._fields)
def test_totals_that_went_back_are_a_new_base(field: str) -> None:
    book, at = EngineTimings(), engine()
    book.observe(at.facts, at.work(steps=50, prefill=500, running=5, context=100), 0.0)
    before = at.totals
    at.work(steps=5, prefill=50, running=5, context=100)
    at.totals = at.totals._replace(**{field: getattr(before, field) / 2})
    book.observe(at.facts, at.load(), 1.0)
    assert (reports_of(book), refused_of(book)) == (0, 0)
    book.observe(at.facts, at.work(steps=5, prefill=50, running=5, context=100), 2.0)
    assert reports_of(book) == 1


def test_a_returned_replica_counts_from_zero() -> None:
    book, at = EngineTimings(), engine()
    book.observe(at.facts, at.work(steps=5), 0.0)
    book.remove_replica(at.facts.replica_id)
    book.remove_replica("never there")
    book.observe(at.facts, at.work(steps=5), 1.0)
    assert reports_of(book) == 0


@pytest.mark.parametrize("busy_s", [nan, inf])
def test_a_meaningless_report_is_counted_and_does_not_poison_what_follows(busy_s: float) -> None:
    book, at = EngineTimings(), engine()
    book.observe(at.facts, at.work(steps=5), 0.0)
    sane = at.totals
    at.work(steps=5)
    at.totals = at.totals._replace(busy_s=busy_s)
    book.observe(at.facts, at.load(), 1.0)
    (quality,) = book.quality()
    assert (quality.reports, quality.rejected_reports) == (0, 1)
    at.totals = sane
    serve(book, at)
    assert costs_of(book, at.facts).decode_step_s == pytest.approx(0.01, rel=0.1)


def test_an_engine_that_never_says_its_context_is_not_charged_for_it_twice() -> None:
    book, at = EngineTimings(), engine(says_context=False)
    serve(book, at)
    timing = book.of(view(at.facts))
    assert timing.step_s(running=5, context_tokens=10**6) == timing.step_s(running=5)


def test_a_pool_that_has_not_decoded_yet_keeps_its_belief_about_context() -> None:
    book, at = EngineTimings(), engine()
    for number in range(20):
        book.observe(at.facts, at.work(steps=2, prefill=100, running=0), float(number))
    assert costs_of(book, at.facts).context_token_s == PRIOR_COSTS.context_token_s


def test_a_report_takes_over_the_shape_that_its_replica_says() -> None:
    book, at = EngineTimings(host_bytes_per_s=1e6), engine()
    at.facts = replace(at.facts, max_batched_tokens=512, kv_block_bytes=2_000_000)
    book.observe(at.facts, at.load(), 0.0)
    timing = book.of(view(at.facts))
    assert timing.host_load_s(3) == 6.0
    steps = [timing.prefill_s(512), timing.prefill_s(513)]
    assert steps[1] - steps[0] == pytest.approx(
        PRIOR_COSTS.prefill_step_s + PRIOR_COSTS.prefill_token_s
    )


def test_a_report_takes_over_that_steps_are_shorter_beside_decodes() -> None:
    book, at = EngineTimings(), engine()
    at.facts = replace(at.facts, max_batched_tokens=4096, max_batched_tokens_while_decoding=512)
    book.observe(at.facts, at.load(), 0.0)
    timing = book.of(view(at.facts))
    assert isinstance(timing, FittedTiming)
    small = replace(timing, max_batched_tokens=512, max_batched_tokens_while_decoding=None)
    assert timing.prefill_s(4000, running=2) == small.prefill_s(4000, running=2)
    assert timing.prefill_s(4000) < small.prefill_s(4000)


def test_predicted_first_tokens_are_compared_with_measured_ones() -> None:
    book = EngineTimings()
    book.of(view(replica_facts("d0", Role.DECODE)))
    book.observe_ttft("decode", predicted_s=1.5, actual_s=1.0)
    book.observe_ttft("decode", predicted_s=0.5, actual_s=1.0)
    book.observe_ttft("no such pool", predicted_s=9.0, actual_s=1.0)
    book.observe_ttft("decode", predicted_s=nan, actual_s=1.0)
    (quality,) = book.quality()
    assert (quality.pool, quality.ttft_count) == ("decode", 2)
    assert quality.ttft_error == pytest.approx(0.5)
    assert quality.ttft_bias == pytest.approx(0.0)


def test_old_first_tokens_fade_from_the_quality() -> None:
    book = EngineTimings()
    book.of(view(replica_facts("d0", Role.DECODE)))
    for _ in range(100):
        book.observe_ttft("decode", predicted_s=11.0, actual_s=1.0)
    for _ in range(1000):
        book.observe_ttft("decode", predicted_s=1.0, actual_s=1.0)
    (quality,) = book.quality()
    assert quality.ttft_error < 0.01


# -------------------------------------------------------------------- output lengths


def test_the_first_prediction_is_half_of_max_tokens_and_at_most_512() -> None:
    lengths = OutputLengths()
    assert lengths.expected(100) == 50
    assert lengths.expected(100_000) == 512
    assert lengths.expected(1) == 1


def test_the_expectation_follows_what_requests_of_its_class_generated() -> None:
    lengths = OutputLengths()
    for _ in range(300):
        lengths.observe(20, 100)
    assert lengths.expected(100) == pytest.approx(20, rel=0.05)
    assert lengths.expected(127) == pytest.approx(20, rel=0.05)
    assert lengths.expected(128) == 64
    assert lengths.expected(63) == 31.5


def test_the_expectation_is_a_mean_and_not_the_last_that_came() -> None:
    lengths = OutputLengths()
    for number in range(1000):
        lengths.observe(10 if number % 2 else 50, 100)
    assert lengths.expected(100) == pytest.approx(30, rel=0.02)


def test_no_request_counts_with_more_tokens_than_it_was_allowed() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.observe(5000, 100)
    assert lengths.expected(127) <= 100


def test_the_expectation_follows_a_change() -> None:
    lengths = OutputLengths()
    for tokens in (*[200] * 5000, *[20] * 1000):
        lengths.observe(tokens, 1000)
    assert lengths.expected(1000) == pytest.approx(20, rel=0.1)


@given(
    seen=st.lists(st.tuples(st.integers(-5, 5000), st.integers(-1, 2000)), max_size=40),
    max_tokens=st.integers(1, 2000),
)
def test_an_expectation_is_at_least_one_token_and_at_most_what_is_allowed(
    seen: list[tuple[int, int]], max_tokens: int
) -> None:
    lengths = OutputLengths()
    for tokens, allowed in seen:
        lengths.observe(tokens, allowed)
    assert 1 <= lengths.expected(max_tokens) <= max_tokens


def test_output_lengths_are_learned_too() -> None:
    book = EngineTimings()
    for _ in range(300):
        book.observe_output(20, 100)
    assert book.expected_output_tokens(100) == pytest.approx(20, rel=0.05)


# ---------------------------------------------------------------- what streams attend to


def test_the_context_of_streams_is_that_of_the_last_report_with_decodes() -> None:
    book, facts = EngineTimings(), replica_facts("a", Role.DECODE)
    assert book.stream_context(view(facts)) is None
    totals = StepTotals(steps=10, busy_s=1.0)
    book.observe(facts, Load(steps=totals), 0.0)
    totals = totals._replace(steps=20, busy_s=2.0, decode_tokens=200, context_tokens=400_000)
    book.observe(facts, Load(steps=totals), 1.0)
    assert book.stream_context(view(facts)) == 2000.0
    prefilled = totals._replace(steps=21, busy_s=2.1, prefill_tokens=100)
    book.observe(facts, Load(steps=prefilled), 2.0)
    assert book.stream_context(view(facts)) == 2000.0
    book.remove_replica("a")
    assert book.stream_context(view(facts)) is None


def test_an_engine_that_does_not_say_what_streams_attend_to_leaves_it_unknown() -> None:
    book, facts = EngineTimings(), replica_facts("a", Role.DECODE)
    for steps in (10, 20):
        totals = StepTotals(steps=steps, busy_s=steps / 10, decode_tokens=steps)
        book.observe(facts, Load(steps=totals), steps / 10)
    assert book.stream_context(view(facts)) is None


# --------------------------------------------------------------------------- prompt share
PROMPT_SHARE_TIMING = LinearTiming(per_token_s=0.0001)


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
        wanted = min(0.95, kept * (chunk - 1) * PROMPT_SHARE_TIMING.per_token_s / HORIZON_S)
    # A mean just between two whole chunks may be rounded either way.
    assert share.share(PROMPT_SHARE_TIMING, asked_s) == pytest.approx(
        wanted, abs=(kept + 1) * PROMPT_SHARE_TIMING.per_token_s / HORIZON_S
    )


def test_a_steady_stream_of_prompts_takes_its_share() -> None:
    share = PrefillShare()
    for beat in range(1, 200):  # every 0.25 s, 100 ms of it: ten chunks of 101 tokens
        share.observe(done(10, 1010), beat * 0.25)
    assert share.share(PROMPT_SHARE_TIMING, 199 * 0.25) == pytest.approx(0.42, rel=0.05)


def test_without_prompts_for_long_a_replica_has_no_share_left() -> None:
    share = PrefillShare()
    assert share.share(PROMPT_SHARE_TIMING, 0.0) == 0
    share.observe(done(10, 10_000), 1.0)
    assert share.share(PROMPT_SHARE_TIMING, 1.0) == pytest.approx(10 * 1000 * 0.0001 / HORIZON_S)
    assert share.share(PROMPT_SHARE_TIMING, 1.0 + 20 * HORIZON_S) < 1e-6


def test_there_is_always_some_time_left_to_decode() -> None:
    share = PrefillShare()
    share.observe(done(1000, 1_000_000), 1.0)
    assert share.share(PROMPT_SHARE_TIMING, 1.0) == 0.95


def test_an_engine_that_starts_again_teaches_nothing() -> None:
    share = PrefillShare()
    share.observe(StepTotals(steps=-3, prefill_steps=5, prefill_tokens=500), 1.0)
    assert share.share(PROMPT_SHARE_TIMING, 1.0) == 0


def test_timings_are_kept_for_each_replica_and_forgotten_with_it() -> None:
    book, busy, idle = EngineTimings(), replica_view("a"), replica_view("b")
    for view in (busy, idle):
        book.observe(view.facts, Load(), 0.0)
    worked = StepTotals(steps=10, busy_s=1.0, prefill_steps=10, prefill_tokens=5000)
    book.observe(busy.facts, Load(steps=worked), 1.0)
    assert 0 < book.prefill_time_fraction(busy, 2.0) < book.prefill_time_fraction(busy, 1.0)
    assert book.prefill_time_fraction(idle, 1.0) == 0
    book.remove_replica("a")
    assert book.prefill_time_fraction(busy, 1.0) == 0


# ---------- sums that forget, and how late things come
def test_a_steady_rate_is_what_a_sum_comes_to_in_its_memory() -> None:
    total = DecayedSum(5.0)
    for tenth in range(1000):
        total.add(0.3, tenth / 10)
    assert total.rate(99.9) == pytest.approx(3.0, rel=0.02)
    assert total.value(99.9) == pytest.approx(15.0, rel=0.02)


def test_after_its_memory_a_third_is_left() -> None:
    total = DecayedSum(2.0)
    total.add(10.0, 0.0)
    assert total.value(2.0) == pytest.approx(3.6788, rel=1e-3)
    assert total.value(-5.0) == 10.0


def test_a_late_report_does_not_age_twice() -> None:
    total = DecayedSum(2.0)
    total.add(1.0, 10.0)
    total.add(1.0, 5.0)
    assert total.value(10.0) == 2.0


def test_a_quantile_is_the_edge_above_it() -> None:
    seen, rng = LatenessHistogram(), random.Random(1)
    late_s = [rng.expovariate(10.0) for _ in range(900)]
    for value in late_s:
        seen.observe(value)
    true_s = sorted(late_s)[890]
    assert true_s <= seen.quantile_s(0.99) * 1.05
    assert seen.quantile_s(0.99) <= true_s * 1.3
    assert seen.quantile_s(0.5) < seen.quantile_s(0.99)


@pytest.mark.parametrize("late_s", [60.0, 600.0, 86_400.0])
def test_delays_over_half_a_minute_keep_their_size(late_s: float) -> None:
    seen = LatenessHistogram()
    for _ in range(100):
        seen.observe(late_s)
    assert seen.quantile_s(0.99) == pytest.approx(late_s, rel=0.25)


def test_of_a_few_nothing_is_said() -> None:
    seen = LatenessHistogram()
    for _ in range(49):
        seen.observe(3.0)
    assert seen.quantile_s(0.99) == 0.0
    seen.observe(3.0)
    assert seen.quantile_s(0.99) == pytest.approx(3.0, rel=0.25)


def test_an_early_arrival_is_not_late() -> None:
    seen = LatenessHistogram()
    for _ in range(100):
        seen.observe(-0.5)
    assert seen.quantile_s(0.99) == 0.0


def test_old_values_are_forgotten_and_senseless_ones_ignored() -> None:
    seen = LatenessHistogram()
    for _ in range(1000):
        seen.observe(2.0)
    for _ in range(8000):
        seen.observe(0.01)
        seen.observe(float("nan"))
    assert seen.quantile_s(0.99) < 0.02
    for _ in range(1000):
        seen.observe(float("inf"))
    assert seen.quantile_s(0.99) < float("inf")


# --------------------------------------------------------------------------- corrected timing
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
def test_a_meaningless_report_teaches_nothing(wrong: tuple[float, float]) -> None:
    correction = CorrectionFactor()
    assert not correction.observe(*wrong)
    assert (correction.factor, correction.reports) == (1.0, 0)


def test_all_that_the_engine_does_is_corrected_and_the_hosts_part_is_not() -> None:
    twice = CachedTiming(MODEL, 2.0)
    assert twice.prefill_s(300, running=2) == 2 * MODEL.prefill_s(300, running=2)
    assert twice.step_s(running=3, context_tokens=9) == 2 * MODEL.step_s(
        running=3, context_tokens=9
    )
    assert twice.decode_request_s(context_tokens=7) == 2 * MODEL.decode_request_s(context_tokens=7)
    assert twice.host_load_s(3) == MODEL.host_load_s(3)


def test_the_costs_that_are_shown_are_those_of_a_linear_model() -> None:
    shown = CachedTiming(MODEL).costs()
    for name in ("decode_step_s", "prefill_step_s", "prefill_token_s", "decode_request_s"):
        assert getattr(shown, name) == pytest.approx(getattr(PRIOR_COSTS, name)), name
    assert shown.context_token_s == pytest.approx(PRIOR_COSTS.context_token_s)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_remembered_totals_are_the_reported_ones(
    tokens: int, running: int, context: int
) -> None:
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
    assert model.asked == 3 + (context > 0) + (running > 1)
    assert remembered.host_load_s(tokens) == tokens


def corrected_timing_view() -> ReplicaView:
    return ReplicaView(facts=FACTS, load_received_at_s=0.0)


def test_a_pool_with_a_model_starts_from_it_and_others_from_defaults() -> None:
    book = EngineTimings({POOL: replace(MODEL, host_block_s=1.0)})
    other = ReplicaView(facts=replace(FACTS, pool="other"), load_received_at_s=0.0)
    assert book.of(corrected_timing_view()).step_s(running=1) == MODEL.step_s(running=1)
    assert book.of(corrected_timing_view()).host_load_s(2) == 2.0
    assert book.of(other).host_load_s(2) != 2.0


def test_pools_of_one_model_share_its_answers_and_not_their_corrections() -> None:
    model = Counting()
    other = replace(FACTS, pool="other")
    book = EngineTimings({POOL: model, other.pool: model})
    first, second = (book.of(view(facts)).prefill_s(5) for facts in (FACTS, other))
    assert (first, model.asked) == (second, 1)
    for report in range(1, 400):
        book.observe(FACTS, Load(steps=work(50 * report, factor=1.5)), float(report))
    assert book.of(view(FACTS)).prefill_s(5) != book.of(view(other)).prefill_s(5) == second


def test_a_pools_model_is_corrected_by_reports_of_its_replicas() -> None:
    book = EngineTimings({POOL: MODEL})
    for report in range(1, 400):
        load = Load(steps=work(50 * report, factor=1.5))
        book.observe(FACTS, load, float(report))
    assert book.of(corrected_timing_view()).step_s(running=4) == pytest.approx(
        1.5 * MODEL.step_s(running=4), rel=0.03
    )
    (quality,) = book.quality()
    assert (quality.pool, quality.reports, quality.rejected_reports) == (POOL, 398, 0)
    assert quality.costs.prefill_token_s == pytest.approx(1.5 * 5e-5, rel=0.03)


def test_totals_that_went_back_teach_nothing() -> None:
    book = EngineTimings({POOL: MODEL})
    book.observe(FACTS, Load(steps=work(50)), 0.0)
    book.observe(FACTS, Load(steps=work(10, factor=9.0)), 1.0)
    assert book.of(corrected_timing_view()).step_s(running=4) == MODEL.step_s(running=4)


def test_predicted_times_to_first_token_are_compared_for_such_a_pool_too() -> None:
    book = EngineTimings({POOL: MODEL})
    book.of(corrected_timing_view())
    book.observe_ttft(POOL, predicted_s=2.0, actual_s=1.0)
    (quality,) = book.quality()
    assert (quality.ttft_count, quality.ttft_error, quality.ttft_bias) == (1, 1.0, 1.0)
