"""A benchmark from the arguments of `baton bench`: made, carried out and written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from baton.bench.client.client import Api, ClientOptions, CompletionClient, Message, ServedModel
from baton.bench.driver import LoadResult
from baton.bench.findings.campaign import (
    Arrivals,
    Benchmark,
    BenchmarkResult,
    ClosedLoop,
    LoadUnusable,
    OpenLoop,
    TraceReplay,
    run_benchmark,
)
from baton.bench.findings.document import (
    BenchmarkContext,
    build_document,
    build_study,
    request_lines,
)
from baton.bench.knee import KneeOptions
from baton.bench.load import (
    ArrivalProcess,
    DatasetRequests,
    LoadPlan,
    MeasuredLength,
    RecordedRequests,
    RequestSource,
    SyntheticRequests,
    TokenRange,
    WarmUp,
)
from baton.bench.prompts.datasets import DatasetRow, lacks_output_lengths, read_rows, shuffled
from baton.bench.prompts.word_prompts import TokenCounter, WordCosts, measure_word_costs
from baton.bench.provenance import provenance
from baton.bench.workers import LoadJob, run_async, run_load
from baton.cli.measure.bench_args import ENDPOINT, BenchArgs, PromptArgs
from baton.cli.model.simulate import progress_bar
from baton.cli.output import ProgressLines
from baton.cli.traces import TraceUnusable, load_trace, make_workload
from baton.domain.errors import TraceInvalid
from baton.domain.names.words import count_text
from baton.simulator.workloads import scaling
from baton.simulator.workloads.formats import ReadOptions
from baton.simulator.workloads.rate_series import TraceLimits

if TYPE_CHECKING:
    from baton.simulator.workloads.trace import Trace

_DEFAULT_OUTPUT = TokenRange(128, 128)
_DEFAULT_LENGTH = MeasuredLength(duration_s=30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchInputs:
    """Inputs that are gathered before the runs."""

    model: ServedModel
    words: WordCosts | None
    rows: tuple[DatasetRow, ...]
    notes: tuple[str, ...]


def run_from_args(args: BenchArgs) -> tuple[BenchmarkResult, BenchmarkContext]:
    """Run the benchmark.

    Raises:
        OperatorError: it cannot run with these arguments, or nothing answers.
    """
    progress = ProgressLines()
    inputs = run_async(_gather_inputs(args))
    benchmark = _benchmark(args, inputs)
    options = ClientOptions(
        url=args.endpoint.url,
        timeout_s=args.endpoint.deadline_s,
        max_connections=args.endpoint.max_in_flight,
        headers=args.endpoint.headers,
        trust=args.endpoint.trust,
    )

    def send(plan: LoadPlan, label: str) -> LoadResult:
        errand = LoadJob(
            client_options=options,
            model=inputs.model,
            plan=plan,
            max_in_flight=args.endpoint.max_in_flight,
            processes=args.endpoint.clients,
        )
        planned = len(plan.starts_s) or plan.max_conversations
        with progress_bar(label) as report_progress:
            driven = run_load(
                errand,
                lambda done: report_progress(done / (planned * plan.turns)) if planned else None,
            )
        progress(f"{label}: {count_text(len(driven.samples), 'request')}")
        return driven

    findings = run_benchmark(benchmark, send)
    return findings, _background(args, inputs)


def write_files(
    findings: BenchmarkResult, background: BenchmarkContext, folder: Path
) -> list[Path]:
    """Write `bench.json`, `bench.html` and `requests.jsonl` into a folder, made where needed.

    Raises:
        ReportUnwritable: they cannot be written there.
        PlotsMissing: matplotlib is not installed.
    """
    from baton.bench.report import write_report

    json_path, html_path, jsonl_path = (
        folder / name for name in ("bench.json", "bench.html", "requests.jsonl")
    )
    json_path.write_text(
        json.dumps(build_document(findings, background), indent=1) + "\n", encoding="utf-8"
    )
    with jsonl_path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(request_line) + "\n" for request_line in request_lines(findings))
    write_report(build_study(findings, background), html_path)
    return [json_path, html_path, jsonl_path]


def check_folder(folder: Path) -> None:
    """Check, before the runs, that `write_files` can write into the folder.

    Raises:
        ReportUnwritable: it cannot.
        PlotsMissing: matplotlib is not installed.
    """
    from baton.bench.report import check_report_path

    folder.mkdir(parents=True, exist_ok=True)
    check_report_path(folder / "bench.html")


# ------------------------------------------------------------------ the benchmark
def _benchmark(args: BenchArgs, inputs: _BenchInputs) -> Benchmark:
    load, prompts = args.load, args.prompts
    length = load.length
    if length == MeasuredLength() and not (prompts.trace and not load.streams):
        length = _DEFAULT_LENGTH
    knee = None
    if args.find_knee:
        knee = KneeOptions(initial_rate_per_s=load.rates_per_s[0], target=args.slo.target)
    return Benchmark(
        make_source=_source_factory(args, inputs),
        arrivals=_arrivals(args, length),
        length=length,
        warm_up=load.warm_up,
        turns=load.turns,
        think_s=load.think_s,
        repeats=args.repeats,
        seed=args.seed,
        slo=args.slo,
        knee=knee,
    )


def _arrivals(args: BenchArgs, length: MeasuredLength) -> Arrivals:
    load, prompts = args.load, args.prompts
    if load.streams:
        return ClosedLoop(concurrencies=load.streams)
    if prompts.trace is not None or prompts.workload is not None:
        return TraceReplay(
            make_trace=lambda rate, repeat: _make_trace(args, length, rate, repeat),
            rates_per_s=load.rates_per_s or (None,),
        )
    return OpenLoop(rates_per_s=load.rates_per_s, process=load.pace, burstiness=load.burstiness)


def _source_factory(args: BenchArgs, inputs: _BenchInputs) -> Callable[[str, str], RequestSource]:
    """Makers of a source from two seeds: of lengths and of texts."""
    prompts = args.prompts
    class_names = {*args.slo.objectives, *(name for name, _ in prompts.classes)}

    def make(seed: str, texts: str) -> RequestSource:
        content: SyntheticRequests | RecordedRequests | DatasetRequests
        block_tokens = prompts.shared_tokens or 16
        if inputs.rows:
            content = DatasetRequests(tuple(shuffled(inputs.rows, texts)))
        elif args.load.streams and (prompts.trace or prompts.workload):
            trace = _make_trace(args, MeasuredLength(requests=_CLOSED_LOOP_REQUESTS), 1.0, 0)
            content, block_tokens = RecordedRequests(trace.requests), trace.block_tokens
        else:
            content = SyntheticRequests(
                prompt=prompts.prompt,
                output=prompts.output or _DEFAULT_OUTPUT,
                shared_tokens=prompts.shared_tokens,
                shared_prompts=prompts.shared_prompts,
                classes=prompts.classes,
            )
        return RequestSource(
            requests=content,
            api=args.endpoint.api,
            seed=seed,
            text_seed=texts,
            block_tokens=block_tokens,
            vocabulary=prompts.vocabulary,
            word_costs=inputs.words,
            slo_classes=tuple(sorted(class_names)),
        )

    return make


_CLOSED_LOOP_REQUESTS = 10_000
"""Requests of a workload, of which a closed loop takes the lengths in turn."""


def _make_trace(args: BenchArgs, length: MeasuredLength, rate: float | None, repeat: int) -> Trace:
    """The trace or workload, cut to the requests that are sent."""
    prompts, warm_up, seed = args.prompts, args.load.warm_up, args.seed + repeat
    max_requests = None if length.requests is None else warm_up.requests + length.requests
    until_s = None
    if length.duration_s is not None:
        until_s = warm_up.duration_s + length.duration_s
    if prompts.workload is not None:
        return make_workload(
            prompts.workload,
            rate_per_s=rate,
            duration_s=until_s,
            max_requests=max_requests,
            seed=seed,
        )
    assert prompts.trace is not None, "neither a trace nor a workload"
    options = ReadOptions(
        ignore_invalid=prompts.ignore_invalid,
        time_unit=prompts.time_unit,
        rate_per_s=rate,
        limits=TraceLimits(until_s, max_requests),
        seed=seed,
    )
    trace = load_trace(prompts.trace, options)
    start_s = trace.requests[0].at_s if trace.requests else 0.0
    if rate is not None and not trace.is_paced and not args.load.streams:
        if not trace.rate_per_s:
            raise TraceUnusable(f"{prompts.trace}: has no rate to scale", "leave out --rate")
        trace = scaling.at_rate(trace, rate, Random(seed))  # noqa: S311 - a seed
    if until_s is not None:
        trace = scaling.cut(trace, until_s=start_s + until_s)
    return trace if max_requests is None else scaling.first(trace, max_requests)


# ------------------------------------------------------------------ in words
def _background(args: BenchArgs, inputs: _BenchInputs) -> BenchmarkContext:
    model, url = inputs.model.name, args.endpoint.url
    return BenchmarkContext(
        title=f"{model} at {url}",
        command=args.command,
        endpoint=url,
        model=model,
        load=_load_facts(args),
        provenance={"seed": args.seed, **provenance()},
        slo=args.slo,
        notes=inputs.notes,
    )


def _load_facts(args: BenchArgs) -> dict[str, object]:
    prompts, load = args.prompts, args.load
    is_synthetic = prompts.dataset is None and prompts.trace is None and prompts.workload is None
    if load.streams:
        arrivals = "closed loop"
    elif prompts.trace is not None or prompts.workload is not None:
        arrivals = "as the trace says"
    else:
        gamma = f", burstiness {load.burstiness:g}" if load.pace is ArrivalProcess.GAMMA else ""
        arrivals = f"open loop, {load.pace}{gamma}"
    facts: dict[str, object] = {
        "api": str(args.endpoint.api),
        "arrivals": arrivals,
        "requests from": next(
            (str(item) for item in (prompts.dataset, prompts.trace, prompts.workload) if item),
            "made up",
        ),
        "prompts": "words" if prompts.as_words else "token ids",
        "warm-up": _warm_up_text(load.warm_up),
        "seed": args.seed,
        "repeats": args.repeats,
        "client processes": args.endpoint.clients,
    }
    if is_synthetic:
        output = prompts.output or _DEFAULT_OUTPUT
        facts["prompt tokens"] = _span_text(prompts.prompt)
        facts["output tokens"] = _span_text(output)
    if prompts.shared_tokens:
        facts["shared prefixes"] = f"{prompts.shared_prompts} of {prompts.shared_tokens} tokens"
    if load.turns > 1:
        facts["turns"] = f"{load.turns}, {load.think_s:g} s between"
    return facts


def _span_text(span: TokenRange) -> str:
    return str(span.low) if span.low == span.high else f"{span.low} to {span.high}"


def _warm_up_text(warm_up: WarmUp) -> str:
    if warm_up.duration_s:
        return f"what is due in the first {warm_up.duration_s:g} s is left out"
    if not warm_up.requests:
        return "none"
    return f"without the first {count_text(warm_up.requests, 'request')}"


async def _gather_inputs(args: BenchArgs) -> _BenchInputs:
    """Ask the endpoint for its model and, where prompts are words, for a token counter.

    Raises:
        OperatorError: nothing answers, or a file cannot be read.
    """
    endpoint, prompts = args.endpoint, args.prompts
    options = ClientOptions(url=endpoint.url, headers=endpoint.headers, trust=endpoint.trust)
    async with CompletionClient(options) as client:
        model = await client.get_model(endpoint.model)
        count = _token_counter(args, client, model)
        rows, skipped = await _read_rows(prompts, count)
        words = await measure_word_costs(count) if prompts.as_words and not rows else None
    notes = []
    if words is not None and not words.is_exact:
        notes.append("No tokenizer could count tokens: prompts have one word for each token.")
    if skipped:
        notes.append(f"{skipped} entries of the data set were bad and left out.")
    if prompts.trace is not None:
        rate = next(iter(args.load.rates_per_s), 1.0 if args.load.streams else None)
        if times := _make_trace(args, MeasuredLength(requests=1), rate, 0).times:
            notes.append(f"Arrival times of the trace: {times}.")
    return _BenchInputs(model=model, words=words, rows=rows, notes=tuple(notes))


def _token_counter(args: BenchArgs, client: CompletionClient, model: ServedModel) -> TokenCounter:
    """The counter of tokens: the endpoint, a tokenizer's file, or none."""
    tokenizer, is_chat = args.prompts.tokenizer, args.endpoint.api is Api.CHAT
    if tokenizer == ENDPOINT:

        async def count_remotely(text: str) -> int | None:
            prompt = [Message(role="user", content=text)] if is_chat else text
            return await client.count_tokens(model.name, prompt)

        return count_remotely
    count_here = _local_counter(Path(tokenizer))

    async def count(text: str) -> int | None:
        return count_here(text)

    return count


def _local_counter(path: Path) -> Callable[[str], int]:
    """Counts by a `tokenizer.json`, given its path or its folder."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except ImportError as error:
        raise LoadUnusable(
            "the package 'tokenizers' is not installed", "install it, or give --tokenizer endpoint"
        ) from error
    except Exception as error:  # the package raises no narrower one
        raise LoadUnusable(
            f"{file}: no tokenizer: {error}", "name a tokenizer.json or its folder"
        ) from error
    return lambda text: len(tokenizer.encode(text).ids)


async def _read_rows(
    prompts: PromptArgs, count: TokenCounter
) -> tuple[tuple[DatasetRow, ...], int]:
    """The prompts of a file, each with the length of its answer; and the number of bad lines."""
    if prompts.dataset is None:
        return (), 0
    try:
        text = prompts.dataset.read_text(encoding="utf-8")
        rows, skipped = read_rows(text, str(prompts.dataset), ignore_invalid=prompts.ignore_invalid)
    except TraceInvalid as error:
        raise TraceUnusable(
            str(error), "correct it, or leave bad entries out with --skip-bad"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceUnusable(
            f"{prompts.dataset}: cannot be read: {error}", "name a file of JSON or JSON lines"
        ) from error
    if prompts.output is not None:
        rng = Random(0)  # noqa: S311 - lengths, no secrets
        return tuple(row._replace(output_tokens=prompts.output.draw(rng)) for row in rows), skipped
    if lacks_output_lengths(rows):
        rows = [await _with_length(row, count) for row in rows]
    if lacks_output_lengths(rows):
        raise LoadUnusable(
            f"{prompts.dataset} has no output lengths, and no tokenizer can count those"
            " of its answers",
            "give --output-tokens, or a --tokenizer",
        )
    return tuple(rows), skipped


async def _with_length(row: DatasetRow, count: TokenCounter) -> DatasetRow:
    """A row with the length of its recorded answer, if that can be counted."""
    if row.output_tokens is not None or row.answer is None:
        return row
    tokens, overhead_tokens = await count(row.answer), await count(" ")
    if tokens is None or overhead_tokens is None:
        return row
    return row._replace(output_tokens=max(1, tokens - overhead_tokens + 1))
