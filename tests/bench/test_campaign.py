"""Whole benchmarks of an endpoint that is a queue in virtual time, whose knee is known."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client.samples import RequestSample
from baton.bench.driver import LoadResult
from baton.bench.findings.campaign import (
    Benchmark,
    BenchmarkResult,
    ClosedLoop,
    LoadUnusable,
    OpenLoop,
    TraceReplay,
    build_plan,
    run_benchmark,
)
from baton.bench.findings.metrics import SloObjectives
from baton.bench.knee import Knee, KneeOptions, KneeSearch
from baton.bench.load import ArrivalProcess, LoadPlan, MeasuredLength, RequestFactory, WarmUp
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.bench.samples import sample, source

SERVICE_S = 0.1


class Queue:
    """One server that takes each request for 0.1 s, in order (M/D/1 with Poisson arrivals)."""

    def __init__(self, *, client_most_per_s: float = math.inf, stop_after: int = 1000) -> None:
        self.plans: list[LoadPlan] = []
        self.names: list[str] = []
        self._client_most_per_s = client_most_per_s
        self._stop_after = stop_after

    def __call__(self, plan: LoadPlan, label: str) -> LoadResult:
        self.plans.append(plan)
        self.names.append(label)
        free_s, samples = 0.0, []
        for number, due_s in enumerate(plan.starts_s):
            free_s = max(free_s, due_s) + SERVICE_S
            samples.append(answered(number, due_s, free_s))
        rate = len(plan.starts_s) / plan.starts_s[-1]
        lag_s = 0.001 if rate <= self._client_most_per_s else 1.0
        stopped = len(self.plans) >= self._stop_after
        return LoadResult(samples=samples, loop_lags_s=array("d", [lag_s]), stopped=stopped)


def answered(number: int, due_s: float, at_s: float) -> RequestSample:
    return sample(
        number, due_s, first_token_s=at_s, last_token_s=at_s, ended_s=at_s, output_tokens=1
    )


def benchmark(**fields: object) -> Benchmark:
    whole = {
        "make_source": lambda seed, texts: source(seed=seed, text_seed=texts),
        "arrivals": OpenLoop(rates_per_s=(2.0, 5.0)),
        "length": MeasuredLength(requests=3_000),
        "slo": SloObjectives(objectives={"default": Objectives(ttft_s=0.5)}, target=0.9),
    }
    return Benchmark(**whole | fields)  # type: ignore[arg-type]  # a test's


def mean_wait_s(rate: float) -> float:
    """Pollaczek and Khinchine's, for constant service."""
    load = rate * SERVICE_S
    return load * SERVICE_S / (2 * (1 - load))


def share_waiting_at_most(wait_s: float, rate: float) -> float:
    """Erlang's, for M/D/1: P(W <= t)."""
    load, turns = rate * SERVICE_S, int(wait_s / SERVICE_S)
    terms = (
        (rate * (k * SERVICE_S - wait_s)) ** k
        / math.factorial(k)
        * math.exp(-rate * (k * SERVICE_S - wait_s))
        for k in range(turns + 1)
    )
    return (1 - load) * sum(terms)


def test_the_wait_in_a_queue_is_what_theory_says() -> None:
    found = run_benchmark(benchmark(), Queue())
    for run in found.runs:
        assert run.rate_per_s is not None
        waited_s = run.metrics.ttft.mean - SERVICE_S
        assert waited_s == pytest.approx(mean_wait_s(run.rate_per_s), rel=0.1)
        known = share_waiting_at_most(0.4, run.rate_per_s)
        assert run.metrics.attainment == pytest.approx(known, abs=0.01)


def test_the_knee_of_a_queue_is_where_theory_says() -> None:
    options = KneeOptions(initial_rate_per_s=1.0, target=0.9)
    found = run_benchmark(benchmark(knee=options), Queue()).knee
    assert found is not None
    assert found.is_bracketed
    rates = [rate / 100 for rate in range(100, 1000)]
    known = max(rate for rate in rates if share_waiting_at_most(0.4, rate) >= 0.9)
    assert found.rate_per_s == pytest.approx(known, rel=0.08)
    assert [probe.rate_per_s for probe in found.probes][:4] == [1, 2, 4, 8]


def test_a_knee_beyond_the_client_is_not_claimed() -> None:
    options = KneeOptions(initial_rate_per_s=1.0, target=0.9)
    what = run_benchmark(benchmark(knee=options), Queue(client_most_per_s=3.0))
    assert what.knee is not None
    assert not what.knee.is_bracketed
    assert "the client, not the endpoint" in what.knee.description
    assert any("read late" in reason for reason in what.invalid_reasons)


def test_a_stopped_search_says_what_it_knows() -> None:
    options = KneeOptions(initial_rate_per_s=1.0, target=0.9)
    what = run_benchmark(benchmark(knee=options), Queue(stop_after=3))
    assert what.is_partial
    assert what.knee is not None
    assert [probe.rate_per_s for probe in what.knee.probes] == [1, 2]


def test_a_stop_ends_a_sweep() -> None:
    queue = Queue(stop_after=2)
    what = run_benchmark(benchmark(repeats=3), queue)
    assert queue.names == ["2/s, run 1 of 3", "2/s, run 2 of 3"]
    assert what.is_partial


def test_rates_differ_by_nothing_but_the_rate_and_repeats_by_all() -> None:
    queue = Queue()
    run_benchmark(benchmark(repeats=2, length=MeasuredLength(requests=50)), queue)
    slow, slow_again, fast, _ = queue.plans
    assert slow.starts_s == pytest.approx([2.5 * at_s for at_s in fast.starts_s])
    assert slow.source.seed == fast.source.seed != slow_again.source.seed
    assert len({plan.source.text_seed for plan in queue.plans}) == 4


def test_the_same_benchmark_sends_the_very_same_loads() -> None:
    first, second, other = Queue(), Queue(), Queue()
    run_benchmark(benchmark(length=MeasuredLength(requests=50)), first)
    run_benchmark(benchmark(length=MeasuredLength(requests=50)), second)
    run_benchmark(benchmark(length=MeasuredLength(requests=50), seed=1), other)
    assert first.plans == second.plans
    assert first.plans[0].starts_s != other.plans[0].starts_s
    prompts = [
        RequestFactory(queue.plans[0].source)
        .build_completion_request(0, RequestFactory(queue.plans[0].source).request(0))
        .prompt
        for queue in (first, second, other)
    ]
    assert prompts[0] == prompts[1] != prompts[2]


def test_levels_hold_repeats_in_order_of_rate() -> None:
    what = run_benchmark(
        benchmark(
            arrivals=OpenLoop(rates_per_s=(5.0, 2.0)), repeats=2, length=MeasuredLength(requests=9)
        ),
        Queue(),
    )
    assert {level: [run.repeat for run in runs] for level, runs in what.runs_by_load().items()} == {
        "2/s": [0, 1],
        "5/s": [0, 1],
    }
    assert BenchmarkResult().runs_by_load() == {}


def test_a_trace_is_sent_as_it_says() -> None:
    trace = Trace(
        name="t",
        requests=tuple(TraceRequest(3 + at, 10 + at, 2, (at,)) for at in range(5)),
        block_tokens=64,
    )
    asked: list[tuple[float | None, int]] = []

    def make(rate: float | None, repeat: int) -> Trace:
        asked.append((rate, repeat))
        return trace

    queue = Queue()
    run_benchmark(benchmark(arrivals=TraceReplay(make_trace=make), repeats=2), queue)
    assert asked == [(None, 0), (None, 1)]
    assert list(queue.plans[0].starts_s) == [0, 1, 2, 3, 4]
    assert queue.plans[0].source.block_tokens == 64
    assert RequestFactory(queue.plans[0].source).request(3).prompt_tokens == 13


def test_conversations_come_so_rarely_that_their_turns_make_the_rate() -> None:
    what = benchmark(
        turns=4,
        warm_up=WarmUp(requests=8),
        length=MeasuredLength(requests=400),
        arrivals=OpenLoop(rates_per_s=(8.0,), process=ArrivalProcess.CONSTANT),
    )
    plan = build_plan(what, 8.0, None, repeat=0, run_index=0)
    assert len(plan.starts_s) == 102
    assert plan.starts_s[1] == 0.5
    assert not plan.is_measured(7, 0.9)
    assert plan.is_measured(8, 1.0)


def test_a_closed_loop_has_as_many_threads_as_there_shall_be_requests() -> None:
    what = benchmark(
        arrivals=ClosedLoop(concurrencies=(4,)),
        length=MeasuredLength(requests=10),
        warm_up=WarmUp(requests=3),
    )
    plan = build_plan(what, None, 4, repeat=0, run_index=0)
    assert (plan.concurrency, plan.max_conversations, len(plan.starts_s)) == (4, 13, 0)
    timed = replace(what, length=MeasuredLength(duration_s=5), warm_up=WarmUp(duration_s=2))
    plan = build_plan(timed, None, 4, repeat=0, run_index=0)
    assert (plan.max_conversations, plan.stop_starting_s) == (None, 7)


def test_a_closed_loop_that_cannot_say_when_it_ends_is_refused() -> None:
    what = benchmark(
        arrivals=ClosedLoop(concurrencies=(4,)),
        length=MeasuredLength(requests=10),
        warm_up=WarmUp(duration_s=3),
    )
    with pytest.raises(LoadUnusable, match="cannot tell how many requests"):
        build_plan(what, None, 4, repeat=0, run_index=0)


def test_a_load_of_which_nothing_is_measured_is_refused() -> None:
    short = benchmark(length=MeasuredLength(duration_s=0.1), arrivals=OpenLoop(rates_per_s=(0.01,)))
    with pytest.raises(LoadUnusable, match=r"0\.01/s: no request comes in the measured time"):
        build_plan(short, 0.01, None, repeat=0, run_index=0)


# ---------- the search for the knee: what it finds, and what it says where it cannot
OPTIONS = KneeOptions(initial_rate_per_s=1.0, target=0.99, max_runs=40)


def found(
    attainment: Callable[[float], float],
    *,
    options: KneeOptions = OPTIONS,
    client_most_per_s: float = float("inf"),
) -> Knee:
    search = KneeSearch(options)
    while (rate := search.next_rate()) is not None:
        search.add_probe(rate, attainment(rate), valid=rate <= client_most_per_s)
    return search.knee()


def edge(at: float) -> Callable[[float], float]:
    return lambda rate: 1.0 if rate <= at else 0.5


@given(knee=st.floats(0.01, 1000), first=st.floats(0.1, 100))
def test_an_edge_is_found_wherever_it_is(knee: float, first: float) -> None:
    options = KneeOptions(initial_rate_per_s=first, target=0.99, max_runs=60)
    what = found(edge(knee), options=options)
    assert what.is_bracketed
    assert what.rate_per_s is not None
    assert what.lowest_failing_per_s is not None
    assert what.rate_per_s <= knee < what.lowest_failing_per_s <= what.rate_per_s * 1.05


def test_few_runs_are_enough() -> None:
    assert len(found(edge(13.0)).probes) <= 10


def test_an_endpoint_that_keeps_up_with_all_that_is_tried_is_not_bracketed() -> None:
    what = found(lambda _: 1.0, options=KneeOptions(initial_rate_per_s=1, target=0.9, max_runs=4))
    assert (what.rate_per_s, what.lowest_failing_per_s, what.is_bracketed) == (8, None, False)
    assert what.description == "not bracketed: at least 8/s, the highest rate tried"


def test_an_endpoint_that_never_meets_its_objective_is_not_bracketed() -> None:
    what = found(lambda _: 0.7, options=KneeOptions(initial_rate_per_s=1, target=0.9, max_runs=4))
    assert (what.rate_per_s, what.lowest_failing_per_s, what.is_bracketed) == (None, 0.125, False)
    assert "even 0.125/s, the lowest rate tried, met the objectives for 70.0%" in what.description


def test_runs_that_run_out_say_how_far_they_came() -> None:
    what = found(edge(13.0), options=KneeOptions(initial_rate_per_s=1, target=0.9, max_runs=6))
    assert not what.is_bracketed
    assert what.description == "not near enough: between 11.31/s and 16/s after 6 runs"


def test_a_client_that_cannot_send_more_finds_no_knee() -> None:
    what = found(edge(1000.0), client_most_per_s=30.0)
    assert not what.is_bracketed
    assert what.rate_per_s == pytest.approx(30, rel=0.05)
    assert "the client, not the endpoint, was what was measured" in what.description


def test_a_client_that_cannot_send_at_all_says_so() -> None:
    what = found(
        edge(1000.0),
        options=KneeOptions(initial_rate_per_s=8, target=0.9, max_runs=2),
        client_most_per_s=1.0,
    )
    assert "is more than the client can send" in what.description


def test_an_objective_that_is_reached_exactly_is_met() -> None:
    what = found(lambda rate: 0.99 if rate <= 2 else 0.98999)
    assert what.rate_per_s == pytest.approx(2, rel=0.05)


def test_luck_above_a_rate_that_failed_ends_the_search() -> None:
    search = KneeSearch(OPTIONS)
    for rate, attainment in ((1.0, 1.0), (2.0, 0.5), (2.0**0.5, 1.0)):
        assert search.next_rate() == pytest.approx(rate)
        search.add_probe(rate, attainment, valid=True)
    assert 2**0.5 < (search.next_rate() or 0) < 2


def test_nothing_tried_is_nothing_found() -> None:
    assert KneeSearch(OPTIONS).knee().description == "nothing was tried"
