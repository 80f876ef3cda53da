"""A benchmark: repeated runs at several rates, or a search for the knee.

*Theory of operation.* Lengths and arrivals of a run depend only on the seed and the repeat, so that
rates differ in nothing else. Each run has its own texts, so that no run finds prompts of another in
a cache. A run begins when all answers of the one before are in. A stopped run is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never

from baton.bench.client.samples import RequestSample
from baton.bench.driver import LoadResult
from baton.bench.findings.metrics import (
    BenchmarkMetrics,
    SloObjectives,
    calculate_metrics,
    measured_samples,
)
from baton.bench.knee import Knee, KneeOptions, KneeSearch
from baton.bench.load import (
    ArrivalProcess,
    LoadPlan,
    MeasuredLength,
    RecordedRequests,
    RequestSource,
    WarmUp,
    start_times,
)
from baton.domain.errors import OperatorError
from baton.domain.names.words import count_text
from baton.simulator.outcome import mean
from baton.simulator.workloads.trace import Trace


class LoadUnusable(OperatorError):
    """The requested load is impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Requests arrive at a rate, regardless of the endpoint."""

    rates_per_s: tuple[float, ...]
    process: ArrivalProcess = ArrivalProcess.POISSON
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """A constant number of requests in flight."""

    concurrencies: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """Requests and arrivals of a trace."""

    make_trace: Callable[[float | None, int], Trace]
    """The trace at a rate, for a repeat; None keeps its rate."""
    rates_per_s: tuple[float | None, ...] = (None,)


Arrivals = OpenLoop | ClosedLoop | TraceReplay


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The specification of a benchmark."""

    make_source: Callable[[str, str], RequestSource]
    """Of requests, given a seed of lengths and one of texts."""
    arrivals: Arrivals
    length: MeasuredLength
    """Of each run; a trace has its own."""
    warm_up: WarmUp = field(default_factory=WarmUp)
    turns: int = 1
    think_s: float = 0.0
    repeats: int = 1
    seed: int = 0
    slo: SloObjectives = field(default_factory=SloObjectives)
    knee: KneeOptions | None = None
    """Search from its first rate on, instead of the rates of an open loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRun:
    """One run and its metrics."""

    rate_per_s: float | None
    """None in closed loop and for a trace's own times."""
    concurrency: int | None
    repeat: int
    metrics: BenchmarkMetrics
    samples: tuple[RequestSample, ...]

    @property
    def load_label(self) -> str:
        """The load of this run in a word."""
        return _format_load(self.rate_per_s, self.concurrency)


def _format_load(rate_per_s: float | None, concurrency: int | None) -> str:
    """A load in a word: `4/s`, `16 streams`, `as recorded`."""
    if concurrency is not None:
        return count_text(concurrency, "stream")
    return "as recorded" if rate_per_s is None else f"{rate_per_s:.4g}/s"


@dataclass(slots=True, kw_only=True)
class BenchmarkResult:
    """Results of a benchmark."""

    runs: list[BenchmarkRun] = field(default_factory=list)
    knee: Knee | None = None

    @property
    def is_partial(self) -> bool:
        """Whether it was stopped."""
        return any(run.metrics.is_partial for run in self.runs)

    @property
    def invalid_reasons(self) -> tuple[str, ...]:
        """Why runs are invalid, each with the run; empty if all are valid."""
        return tuple(
            f"{run.load_label}, run {run.repeat + 1}: {reason}"
            for run in self.runs
            for reason in run.metrics.invalid_reasons
        )

    def runs_by_load(self) -> dict[str, list[BenchmarkRun]]:
        """Runs by load, the lowest first; runs of a load are its repeats."""
        ordered = sorted(self.runs, key=lambda run: (run.rate_per_s or 0.0, run.concurrency or 0))
        by_load: dict[str, list[BenchmarkRun]] = {}
        for run in ordered:
            by_load.setdefault(run.load_label, []).append(run)
        return by_load


class SendPlan(Protocol):
    """Sends a plan and returns the result."""

    def __call__(self, plan: LoadPlan, label: str) -> LoadResult:
        """`label` names the run in progress reports."""
        ...


def run_benchmark(benchmark: Benchmark, send: SendPlan) -> BenchmarkResult:
    """Run all, or until a run is stopped."""
    result = BenchmarkResult()
    if benchmark.knee is not None:
        _search_knee(benchmark, benchmark.knee, send, result)
        return result
    match benchmark.arrivals:
        case OpenLoop() | TraceReplay():
            rates = benchmark.arrivals.rates_per_s
            levels: Sequence[tuple[float | None, int | None]] = [(rate, None) for rate in rates]
        case ClosedLoop(concurrencies=concurrencies):
            levels = [(None, streams) for streams in concurrencies]
        case _:
            assert_never(benchmark.arrivals)
    for rate, streams in levels:
        if not _run_repeats(benchmark, rate, streams, send, result):
            break
    return result


def _search_knee(
    benchmark: Benchmark, options: KneeOptions, send: SendPlan, result: BenchmarkResult
) -> None:
    """A rate's attainment is the mean of its repeats."""
    search = KneeSearch(options)
    while (rate := search.next_rate()) is not None:
        runs_before = len(result.runs)
        completed = _run_repeats(benchmark, rate, None, send, result)
        metrics = [run.metrics for run in result.runs[runs_before:]]
        if not completed:
            break
        search.add_probe(
            rate,
            mean([metric.attainment for metric in metrics]),
            valid=not any(metric.invalid_reasons for metric in metrics),
        )
    result.knee = search.knee()


def _run_repeats(
    benchmark: Benchmark,
    rate: float | None,
    concurrency: int | None,
    send: SendPlan,
    result: BenchmarkResult,
) -> bool:
    """All repeats of one load; returns whether none was stopped."""
    for repeat in range(benchmark.repeats):
        plan = build_plan(benchmark, rate, concurrency, repeat=repeat, run_index=len(result.runs))
        label = _format_load(rate, concurrency)
        if benchmark.repeats > 1:
            label += f", run {repeat + 1} of {benchmark.repeats}"
        load_result = send(plan, label)
        result.runs.append(
            BenchmarkRun(
                rate_per_s=rate,
                concurrency=concurrency,
                repeat=repeat,
                metrics=calculate_metrics(load_result, plan, benchmark.slo),
                samples=tuple(measured_samples(load_result, plan)),
            )
        )
        if load_result.stopped:
            return False
    return True


def build_plan(
    benchmark: Benchmark,
    rate: float | None,
    concurrency: int | None,
    *,
    repeat: int,
    run_index: int,
) -> LoadPlan:
    """The load of run `run_index`.

    Raises:
        LoadUnusable: no request would be measured.
    """
    seed = f"{benchmark.seed} {repeat}"
    plan = LoadPlan(
        source=benchmark.make_source(seed, f"{seed} {run_index}"),
        turns=benchmark.turns,
        think_s=benchmark.think_s,
        warm_up=benchmark.warm_up,
    )
    match benchmark.arrivals:
        case TraceReplay(make_trace=make):
            trace = make(rate, repeat)
            source = replace(
                plan.source,
                requests=RecordedRequests(trace.requests),
                block_tokens=trace.block_tokens,
            )
            first_s = trace.requests[0].at_s if trace.requests else 0.0
            times_s = tuple(request.at_s - first_s for request in trace.requests)
            return _check_measured(replace(plan, source=source, starts_s=times_s), "the trace")
        case ClosedLoop():
            assert concurrency is not None, "a closed loop without streams"
            return _closed_loop_plan(plan, benchmark, concurrency)
        case OpenLoop() as arrivals:
            assert rate is not None, "an open loop without a rate"
            return _open_loop_plan(plan, benchmark, rate, arrivals, seed=seed)
        case _:
            assert_never(benchmark.arrivals)


def _open_loop_plan(
    plan: LoadPlan,
    benchmark: Benchmark,
    rate: float,
    arrivals: OpenLoop,
    *,
    seed: str,
) -> LoadPlan:
    """Turns are requests too, so conversations start at a fraction of the rate."""
    turns = benchmark.turns
    length, warm_up = benchmark.length, benchmark.warm_up
    times_s = start_times(
        arrivals.process,
        rate / turns,
        arrivals.burstiness,
        warm_up=replace(warm_up, requests=-(-warm_up.requests // turns)),
        length=length
        if length.requests is None
        else replace(length, requests=-(-length.requests // turns)),
        seed=seed,
    )
    return _check_measured(replace(plan, starts_s=times_s), f"{rate:.4g}/s")


def _check_measured(plan: LoadPlan, label: str) -> LoadPlan:
    starts_s = enumerate(plan.starts_s)
    if not any(plan.is_measured(index * plan.turns, due_s) for index, due_s in starts_s):
        raise LoadUnusable(
            f"{label}: no request comes in the measured time",
            "give a longer --duration, more --requests or a shorter --warm-up",
        )
    return plan


def _closed_loop_plan(plan: LoadPlan, benchmark: Benchmark, concurrency: int) -> LoadPlan:
    length, warm_up, turns = benchmark.length, benchmark.warm_up, benchmark.turns
    plan = replace(plan, concurrency=concurrency)
    if length.requests is not None:
        if warm_up.duration_s:
            raise LoadUnusable(
                "a closed loop cannot tell how many requests a warm-up of some seconds takes",
                "give --warm-up as a number of requests, or --duration instead of --requests",
            )
        return replace(plan, max_conversations=-(-(warm_up.requests + length.requests) // turns))
    assert length.duration_s is not None, "neither a number of requests nor a duration"
    return replace(plan, stop_starting_s=warm_up.duration_s + length.duration_s)
