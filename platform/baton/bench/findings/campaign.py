"""A benchmark: runs at several rates, each several times, or a search for the knee.

Theory of operation: every run has lengths and arrivals that depend on the seed and its repeat
alone, so that rates differ by nothing but the rate; and texts of its own, so that no run finds the
prompts of another in a cache. A run begins when the one before has ended and all its answers are
in. When one is stopped none follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never

from baton.bench.client.samples import Sample
from baton.bench.driver import Driven
from baton.bench.findings.metrics import Figures, Promise, figures, measured_of
from baton.bench.knee import Knee, KneeOptions, KneeSearch
from baton.bench.load import Length, Pace, Plan, Recorded, Source, WarmUp, starts
from baton.domain.errors import OperatorError
from baton.simulator.outcome import mean
from baton.simulator.workloads.trace import Trace


class LoadUnusable(OperatorError):
    """A load cannot be made as it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Requests come at a rate, whatever the endpoint does."""

    rates_per_s: tuple[float, ...]
    pace: Pace = Pace.POISSON
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """So many requests are under way at any time."""

    streams: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Requests come when a trace says, and are what it says."""

    make: Callable[[float | None, int], Trace]
    """The trace at a rate, for a repeat; None leaves its rate as it is."""
    rates_per_s: tuple[float | None, ...] = (None,)


Arrivals = OpenLoop | ClosedLoop | Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What is run."""

    source: Callable[[str, str], Source]
    """Of requests, given a seed of lengths and one of texts."""
    arrivals: Arrivals
    length: Length
    """Of each run; a trace has its own."""
    warm_up: WarmUp = field(default_factory=WarmUp)
    turns: int = 1
    think_s: float = 0.0
    repeats: int = 1
    seed: int = 0
    promise: Promise = field(default_factory=Promise)
    knee: KneeOptions | None = None
    """To search from its first rate on, instead of the rates of an open loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, and what it amounts to."""

    rate_per_s: float | None
    """That was asked for; None in closed loop and for a trace's own times."""
    streams: int | None
    repeat: int
    figures: Figures
    samples: tuple[Sample, ...]
    """That were measured."""

    @property
    def level(self) -> str:
        """The load of this run in a word."""
        return level_text(self.rate_per_s, self.streams)


def level_text(rate_per_s: float | None, streams: int | None) -> str:
    """A load in a word: `4/s`, `16 streams`, `as recorded`."""
    if streams is not None:
        return f"{streams} stream{'s' if streams > 1 else ''}"
    return "as recorded" if rate_per_s is None else f"{rate_per_s:.4g}/s"


@dataclass(slots=True, kw_only=True)
class Findings:
    """What came of a benchmark."""

    runs: list[Run] = field(default_factory=list)
    knee: Knee | None = None

    @property
    def partial(self) -> bool:
        """Whether it was stopped before its end."""
        return any(run.figures.partial for run in self.runs)

    @property
    def invalid(self) -> tuple[str, ...]:
        """What is wrong with runs, each with the run; empty when all can be believed."""
        return tuple(
            f"{run.level}, run {run.repeat + 1}: {why}"
            for run in self.runs
            for why in run.figures.invalid
        )

    def levels(self) -> dict[str, list[Run]]:
        """Runs by load, the lowest first; those of one load are its repeats."""
        ordered = sorted(self.runs, key=lambda run: (run.rate_per_s or 0.0, run.streams or 0))
        found: dict[str, list[Run]] = {}
        for run in ordered:
            found.setdefault(run.level, []).append(run)
        return found


class Send(Protocol):
    """Sends a plan and returns what came of it."""

    def __call__(self, plan: Plan, what: str) -> Driven:
        """`what` names the run, for whoever looks on."""
        ...


def carry_out(benchmark: Benchmark, send: Send) -> Findings:
    """Run it all, or until a run is stopped."""
    findings = Findings()
    if benchmark.knee is not None:
        _search(benchmark, benchmark.knee, send, findings)
        return findings
    match benchmark.arrivals:
        case OpenLoop() | Traced():
            rates = benchmark.arrivals.rates_per_s
            levels: Sequence[tuple[float | None, int | None]] = [(rate, None) for rate in rates]
        case ClosedLoop(streams=several):
            levels = [(None, streams) for streams in several]
        case _:
            assert_never(benchmark.arrivals)
    for rate, streams in levels:
        if not _repeat(benchmark, rate, streams, send, findings):
            break
    return findings


def _search(benchmark: Benchmark, options: KneeOptions, send: Send, findings: Findings) -> None:
    """Look for the knee; a rate's attainment is the mean of its repeats'."""
    search = KneeSearch(options)
    while (rate := search.next_rate()) is not None:
        before = len(findings.runs)
        whole = _repeat(benchmark, rate, None, send, findings)
        told = [run.figures for run in findings.runs[before:]]
        if not whole:
            break
        search.tell(
            rate,
            mean([one.attainment for one in told]),
            valid=not any(one.invalid for one in told),
        )
    findings.knee = search.knee()


def _repeat(
    benchmark: Benchmark, rate: float | None, streams: int | None, send: Send, findings: Findings
) -> bool:
    """All repeats of one load; returns whether none was stopped."""
    for repeat in range(benchmark.repeats):
        plan = plan_of(benchmark, rate, streams, repeat=repeat, number=len(findings.runs))
        what = level_text(rate, streams)
        if benchmark.repeats > 1:
            what += f", run {repeat + 1} of {benchmark.repeats}"
        driven = send(plan, what)
        findings.runs.append(
            Run(
                rate_per_s=rate,
                streams=streams,
                repeat=repeat,
                figures=figures(driven, plan, benchmark.promise),
                samples=tuple(measured_of(driven, plan)),
            )
        )
        if driven.stopped:
            return False
    return True


def plan_of(
    benchmark: Benchmark, rate: float | None, streams: int | None, *, repeat: int, number: int
) -> Plan:
    """The load of one run, the `number`-th of all.

    Raises:
        LoadUnusable: no request would be measured.
    """
    seed = f"{benchmark.seed} {repeat}"
    plan = Plan(
        source=benchmark.source(seed, f"{seed} {number}"),
        turns=benchmark.turns,
        think_s=benchmark.think_s,
        warm_up=benchmark.warm_up,
    )
    match benchmark.arrivals:
        case Traced(make=make):
            trace = make(rate, repeat)
            source = replace(
                plan.source, what=Recorded(trace.requests), block_tokens=trace.block_tokens
            )
            first_s = trace.requests[0].at_s if trace.requests else 0.0
            times_s = tuple(one.at_s - first_s for one in trace.requests)
            return _measuring(replace(plan, source=source, starts_s=times_s), "the trace")
        case ClosedLoop():
            assert streams is not None, "a closed loop without streams"
            return _closed(plan, benchmark, streams)
        case OpenLoop(pace=pace, burstiness=burstiness):
            assert rate is not None, "an open loop without a rate"
            return _open(plan, benchmark, rate, (pace, burstiness), seed=seed)
        case _:
            assert_never(benchmark.arrivals)


def _open(
    plan: Plan, benchmark: Benchmark, rate: float, how: tuple[Pace, float], *, seed: str
) -> Plan:
    """A conversation's turns are requests too: with several, fewer threads make the same rate."""
    turns = benchmark.turns
    pace, burstiness = how
    length, warm_up = benchmark.length, benchmark.warm_up
    times_s = starts(
        pace,
        rate / turns,
        burstiness,
        warm_up=replace(warm_up, requests=-(-warm_up.requests // turns)),
        length=length
        if length.requests is None
        else replace(length, requests=-(-length.requests // turns)),
        seed=seed,
    )
    return _measuring(replace(plan, starts_s=times_s), f"{rate:.4g}/s")


def _measuring(plan: Plan, what: str) -> Plan:
    """The plan, if any request of it is measured."""
    starts_s = enumerate(plan.starts_s)
    if not any(plan.counts(at * plan.turns, due_s) for at, due_s in starts_s):
        raise LoadUnusable(
            f"{what}: no request comes in the measured time",
            "give a longer --duration, more --requests or a shorter --warm-up",
        )
    return plan


def _closed(plan: Plan, benchmark: Benchmark, streams: int) -> Plan:
    length, warm_up, turns = benchmark.length, benchmark.warm_up, benchmark.turns
    plan = replace(plan, streams=streams)
    if length.requests is not None:
        if warm_up.duration_s:
            raise LoadUnusable(
                "in closed loop nobody knows how many requests a warm-up of some seconds takes",
                "give --warm-up as a number of requests, or --duration instead of --requests",
            )
        return replace(plan, threads=-(-(warm_up.requests + length.requests) // turns))
    assert length.duration_s is not None, "neither a number of requests nor a duration"
    return replace(plan, until_s=warm_up.duration_s + length.duration_s)
