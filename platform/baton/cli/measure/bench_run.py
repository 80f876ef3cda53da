"""What `baton bench` was asked for, made into a benchmark, carried out and written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from baton.bench.client.client import ClientOptions
from baton.bench.driver import Driven
from baton.bench.findings.campaign import (
    Arrivals,
    Benchmark,
    ClosedLoop,
    Findings,
    OpenLoop,
    Traced,
    carry_out,
)
from baton.bench.findings.document import Background, document, request_lines, study_of
from baton.bench.knee import KneeOptions
from baton.bench.load import Length, MadeUp, Pace, Plan, Recorded, Rows, Source, Span, WarmUp
from baton.bench.prompts.datasets import shuffled
from baton.bench.provenance import provenance
from baton.bench.workers import Errand, drive, run_async
from baton.cli.measure.bench_args import Order
from baton.cli.measure.bench_prompts import Known, look
from baton.cli.model.simulate import progress_bar
from baton.cli.output import ProgressLines
from baton.cli.traces import TraceUnusable, load_or_pace, make_workload
from baton.simulator.workloads import scaling

if TYPE_CHECKING:
    from baton.simulator.workloads.trace import Trace


_USUAL_OUTPUT = Span(128, 128)
_LENGTH = Length(duration_s=30.0)


def benched(order: Order) -> tuple[Findings, Background]:
    """Carry it out.

    Raises:
        OperatorError: it cannot be done as it was asked for, or nothing answers.
    """
    say = ProgressLines()
    known = run_async(look(order))
    benchmark = _benchmark(order, known)
    options = ClientOptions(
        url=order.endpoint.url,
        deadline_s=order.endpoint.deadline_s,
        connections=order.endpoint.max_in_flight,
        headers=order.endpoint.headers,
    )

    def send(plan: Plan, what: str) -> Driven:
        errand = Errand(
            client=options,
            model=known.model,
            plan=plan,
            max_in_flight=order.endpoint.max_in_flight,
            clients=order.endpoint.clients,
        )
        planned = len(plan.starts_s) or plan.threads
        with progress_bar(what) as tell:
            driven = drive(
                errand,
                lambda done: tell(done / (planned * plan.turns)) if planned else None,
            )
        say(f"{what}: {len(driven.samples)} requests")
        return driven

    findings = carry_out(benchmark, send)
    return findings, _background(order, known)


def write_files(findings: Findings, background: Background, folder: Path) -> list[Path]:
    """Write `bench.json`, `bench.html` and `requests.jsonl` into a folder, made where needed.

    Raises:
        ReportUnwritable: they cannot be written there.
        PlotsMissing: matplotlib is not installed.
    """
    from baton.bench.report import write_report

    whole, page, lines = (folder / name for name in ("bench.json", "bench.html", "requests.jsonl"))
    whole.write_text(json.dumps(document(findings, background), indent=1) + "\n", encoding="utf-8")
    with lines.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in request_lines(findings))
    write_report(study_of(findings, background), page)
    return [whole, page, lines]


def check_folder(folder: Path) -> None:
    """Refuse, before the work is done, a folder that could not be written.

    Raises:
        ReportUnwritable: it cannot.
        PlotsMissing: matplotlib is not installed.
    """
    from baton.bench.report import check_report_path

    folder.mkdir(parents=True, exist_ok=True)
    check_report_path(folder / "bench.html")


# ------------------------------------------------------------------ the benchmark
def _benchmark(order: Order, known: Known) -> Benchmark:
    paced, asked = order.paced, order.asked
    length = paced.length
    if length == Length() and not (asked.trace and not paced.streams):
        length = _LENGTH
    knee = None
    if order.find_knee:
        knee = KneeOptions(first_per_s=paced.rates_per_s[0], target=order.promise.target)
    return Benchmark(
        source=_sources(order, known),
        arrivals=_arrivals(order, length),
        length=length,
        warm_up=paced.warm_up,
        turns=paced.turns,
        think_s=paced.think_s,
        repeats=order.repeats,
        seed=order.seed,
        promise=order.promise,
        knee=knee,
    )


def _arrivals(order: Order, length: Length) -> Arrivals:
    paced, asked = order.paced, order.asked
    if paced.streams:
        return ClosedLoop(streams=paced.streams)
    if asked.trace is not None or asked.workload is not None:
        return Traced(
            make=lambda rate, repeat: _trace(order, length, rate, repeat),
            rates_per_s=paced.rates_per_s or (None,),
        )
    return OpenLoop(rates_per_s=paced.rates_per_s, pace=paced.pace, burstiness=paced.burstiness)


def _sources(order: Order, known: Known) -> Callable[[str, str], Source]:
    """Makers of a source, given a seed of lengths and one of texts."""
    asked = order.asked
    names = {*order.promise.objectives, *(name for name, _ in asked.classes)}

    def make(seed: str, texts: str) -> Source:
        what: MadeUp | Recorded | Rows
        block_tokens = asked.shared_tokens or 16
        if known.rows:
            what = Rows(tuple(shuffled(known.rows, texts)))
        elif order.paced.streams and (asked.trace or asked.workload):
            trace = _trace(order, Length(requests=_PLENTY), 1.0, 0)
            what, block_tokens = Recorded(trace.requests), trace.block_tokens
        else:
            what = MadeUp(
                prompt=asked.prompt,
                output=asked.output or _USUAL_OUTPUT,
                shared_tokens=asked.shared_tokens,
                shared_prompts=asked.shared_prompts,
                classes=asked.classes,
            )
        return Source(
            what=what,
            api=order.endpoint.api,
            seed=seed,
            texts=texts,
            block_tokens=block_tokens,
            vocabulary=asked.vocabulary,
            words=known.words,
            classes=tuple(sorted(names)),
        )

    return make


_PLENTY = 10_000
"""Requests of a workload, of which a closed loop takes the lengths in turn."""


def _trace(order: Order, length: Length, rate: float | None, repeat: int) -> Trace:
    """The trace or workload, as much of it as is sent."""
    asked, warm_up, seed = order.asked, order.paced.warm_up, order.seed + repeat
    most = None if length.requests is None else warm_up.requests + length.requests
    until_s = None
    if length.duration_s is not None:
        until_s = warm_up.duration_s + length.duration_s
    if asked.workload is not None:
        if rate is None:
            raise TraceUnusable("--workload needs a rate", "give --rate, in requests per second")
        return make_workload(
            asked.workload, rate_per_s=rate, duration_s=until_s, most=most, seed=seed
        )
    assert asked.trace is not None, "neither a trace nor a workload"
    trace, paced = load_or_pace(asked.trace, skip_bad=asked.skip_bad, rate_per_s=rate, seed=seed)
    begins_s = trace.requests[0].at_s if trace.requests else 0.0
    if rate is not None and not paced and not order.paced.streams:
        if not trace.rate_per_s:
            raise TraceUnusable(f"{asked.trace}: has no rate to scale", "leave out --rate")
        trace = scaling.at_rate(trace, rate, Random(seed))  # noqa: S311 - a seed
    if until_s is not None:
        trace = scaling.cut(trace, until_s=begins_s + until_s)
    return trace if most is None else scaling.first(trace, most)


# ------------------------------------------------------------------ in words
def _background(order: Order, known: Known) -> Background:
    model, url = known.model.name, order.endpoint.url
    return Background(
        title=f"{model} at {url}",
        command=order.command,
        endpoint=url,
        model=model,
        load=_load_facts(order),
        provenance={"seed": order.seed, **provenance()},
        promise=order.promise,
        notes=known.notes,
    )


def _load_facts(order: Order) -> dict[str, object]:
    asked, paced = order.asked, order.paced
    made_up = asked.dataset is None and asked.trace is None and asked.workload is None
    if paced.streams:
        arrivals = "closed loop"
    elif asked.trace is not None or asked.workload is not None:
        arrivals = "as the trace says"
    else:
        gamma = f", burstiness {paced.burstiness:g}" if paced.pace is Pace.GAMMA else ""
        arrivals = f"open loop, {paced.pace}{gamma}"
    said: dict[str, object] = {
        "api": str(order.endpoint.api),
        "arrivals": arrivals,
        "requests from": next(
            (str(one) for one in (asked.dataset, asked.trace, asked.workload) if one), "made up"
        ),
        "prompts": "words" if asked.words else "token ids",
        "warm-up": _warm_up_text(paced.warm_up),
        "seed": order.seed,
        "repeats": order.repeats,
        "client processes": order.endpoint.clients,
    }
    if made_up:
        output = asked.output or _USUAL_OUTPUT
        said["prompt tokens"] = _span_text(asked.prompt)
        said["output tokens"] = _span_text(output)
    if asked.shared_tokens:
        said["shared prefixes"] = f"{asked.shared_prompts} of {asked.shared_tokens} tokens"
    if paced.turns > 1:
        said["turns"] = f"{paced.turns}, {paced.think_s:g} s between"
    return said


def _span_text(span: Span) -> str:
    return str(span.low) if span.low == span.high else f"{span.low} to {span.high}"


def _warm_up_text(warm_up: WarmUp) -> str:
    if warm_up.duration_s:
        return f"what is due in the first {warm_up.duration_s:g} s is left out"
    return f"the first {warm_up.requests} requests are left out" if warm_up.requests else "none"
