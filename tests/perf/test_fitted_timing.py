"""Seconds by five coefficients, and the book that learns them from load reports."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, ReplicaFacts, ReplicaView, Role, StepTotals
from baton.perf.fitting.engine_timings import EngineTimings, OutputLengths
from baton.perf.steps.step_costs import PRIOR_COSTS, FittedTiming, StepCosts
from baton.policy.placement.port import TimingEstimates
from tests.fakes.facts import replica_facts

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


def test_the_book_is_what_placement_asks_for_timings() -> None:
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


def test_what_one_replica_teaches_holds_for_its_pool_and_for_no_other() -> None:
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


def test_lost_reports_do_no_harm() -> None:
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


def test_a_replica_that_left_counts_anew() -> None:
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


def test_predicted_first_tokens_are_compared_with_what_came() -> None:
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


def test_before_any_request_half_of_what_is_allowed_is_expected_but_not_more_than_512() -> None:
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


def test_the_book_learns_output_lengths_too() -> None:
    book = EngineTimings()
    for _ in range(300):
        book.observe_output(20, 100)
    assert book.expected_output_tokens(100) == pytest.approx(20, rel=0.05)


# ---------------------------------------------------------------- what streams attend to


def test_each_stream_attends_to_what_the_last_report_with_decodes_says() -> None:
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
