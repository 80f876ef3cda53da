"""What `baton bench` was asked for, made into a benchmark, carried out and written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from baton.bench.campaign import (
    Arrivals,
    Benchmark,
    ClosedLoop,
    Findings,
    LoadUnusable,
    OpenLoop,
    Traced,
    carry_out,
)
from baton.bench.client import Api, ClientOptions, CompletionClient, Message, ServedModel
from baton.bench.datasets import Row, lengths_wanted, read_rows, shuffled
from baton.bench.drive import Driven
from baton.bench.figures import Promise
from baton.bench.findings import Background, document, request_lines, study_of
from baton.bench.knee import KneeOptions
from baton.bench.load import Length, MadeUp, Pace, Plan, Recorded, Rows, Source, Span, WarmUp
from baton.bench.provenance import provenance
from baton.bench.texts import Counter, WordCosts, word_costs
from baton.bench.workers import Errand, drive, run_async
from baton.cli.output import ProgressLines
from baton.cli.simulate import progress_bar
from baton.cli.traces import TraceUnusable, load_or_pace, make_workload
from baton.domain.errors import BadTrace
from baton.simulator.workloads import scaling

if TYPE_CHECKING:
    from baton.simulator.workloads.trace import Trace

ENDPOINT = "endpoint"
"""For `--tokenizer`: the endpoint's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Who is asked, and how."""

    url: str
    model: str | None
    api: Api
    deadline_s: float
    max_in_flight: int
    clients: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """May hold a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked: a file of prompts, a trace, a workload, or prompts that are made up."""

    dataset: Path | None
    trace: Path | None
    workload: str | None
    words: bool
    """Prompts of words instead of token ids."""
    tokenizer: str
    prompt: Span
    output: Span | None
    """None for what a file says of each prompt, else for the usual length."""
    shared_tokens: int
    shared_prompts: int
    classes: tuple[tuple[str, float], ...]
    vocabulary: int
    skip_bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """When it is asked."""

    rates_per_s: tuple[float, ...]
    streams: tuple[int, ...]
    pace: Pace
    burstiness: float
    length: Length
    """Nothing in it for as long as a trace is."""
    warm_up: WarmUp
    turns: int
    think_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that is asked for."""

    endpoint: Endpoint
    asked: Asked
    paced: Paced
    promise: Promise
    find_knee: bool
    repeats: int
    seed: int
    command: str


_USUAL_OUTPUT = Span(128, 128)
_LENGTH = Length(duration_s=30.0)


def benched(order: Order) -> tuple[Findings, Background]:
    """Carry it out.

    Raises:
        OperatorError: it cannot be done as it was asked for, or nothing answers.
    """
    say = ProgressLines()
    known = run_async(_look(order))
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


# ------------------------------------------------------------------ what the endpoint says
@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What had to be found out first."""

    model: ServedModel
    words: WordCosts | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


async def _look(order: Order) -> _Known:
    endpoint, asked = order.endpoint, order.asked
    options = ClientOptions(url=endpoint.url, headers=endpoint.headers)
    async with CompletionClient(options) as client:
        model = await client.model(endpoint.model)
        count = _counter(order, client, model)
        rows, skipped = await _rows(asked, count)
        words = await word_costs(count) if asked.words and not rows else None
    notes = []
    if words is not None and not words.counted:
        notes.append("Nobody could count tokens: prompts have as many words as they should tokens.")
    if skipped:
        notes.append(f"{skipped} entries of the data set were bad and left out.")
    return _Known(model=model, words=words, rows=rows, notes=tuple(notes))


def _counter(order: Order, client: CompletionClient, model: ServedModel) -> Counter:
    """Who counts tokens: the endpoint, a tokenizer's file, or nobody."""
    tokenizer, chat = order.asked.tokenizer, order.endpoint.api is Api.CHAT
    if tokenizer == ENDPOINT:

        async def ask(text: str) -> int | None:
            said = [Message(role="user", content=text)] if chat else text
            return await client.count_tokens(model.name, said)

        return ask
    count_here = _local(Path(tokenizer))

    async def count(text: str) -> int | None:
        return count_here(text)

    return count


def _local(path: Path) -> Callable[[str], int]:
    """Counts by a `tokenizer.json`, or one in a folder."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(file))
    except ImportError as error:
        raise LoadUnusable(
            "the package 'tokenizers' is not installed", "install it, or give --tokenizer endpoint"
        ) from error
    except Exception as error:  # the package raises no narrower one
        raise LoadUnusable(
            f"{file}: no tokenizer: {error}", "name a tokenizer.json or its folder"
        ) from error
    return lambda text: len(found.encode(text).ids)


async def _rows(asked: Asked, count: Counter) -> tuple[tuple[Row, ...], int]:
    """The prompts of a file, each with the length of its answer."""
    if asked.dataset is None:
        return (), 0
    try:
        text = asked.dataset.read_text(encoding="utf-8")
        rows, skipped = read_rows(text, str(asked.dataset), skip_bad=asked.skip_bad)
    except BadTrace as error:
        raise TraceUnusable(
            str(error), "correct it, or leave bad entries out with --skip-bad"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceUnusable(
            f"{asked.dataset}: cannot be read: {error}", "name a file of JSON or JSON lines"
        ) from error
    if asked.output is not None:
        rng = Random(0)  # noqa: S311 - lengths, no secrets
        return tuple(one._replace(output_tokens=asked.output.draw(rng)) for one in rows), skipped
    if lengths_wanted(rows):
        rows = [await _with_length(one, count) for one in rows]
    if lengths_wanted(rows):
        raise LoadUnusable(
            f"{asked.dataset} does not say how long answers shall be, and nobody can count its own",
            "give --output-tokens, or a --tokenizer",
        )
    return tuple(rows), skipped


async def _with_length(row: Row, count: Counter) -> Row:
    """A row with the length of its recorded answer, if that can be counted."""
    if row.output_tokens is not None or row.answer is None:
        return row
    tokens, around = await count(row.answer), await count(" ")
    if tokens is None or around is None:
        return row
    return row._replace(output_tokens=max(1, tokens - around + 1))


# ------------------------------------------------------------------ the benchmark
def _benchmark(order: Order, known: _Known) -> Benchmark:
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


def _sources(order: Order, known: _Known) -> Callable[[str, str], Source]:
    """Makers of a source, given a seed of lengths and one of texts."""
    asked = order.asked
    names = {*order.promise.objectives, *(name for name, _ in asked.classes)}

    def make(seed: str, texts: str) -> Source:
        what: MadeUp | Recorded | Rows
        if known.rows:
            what = Rows(tuple(shuffled(known.rows, texts)))
        elif order.paced.streams and (asked.trace or asked.workload):
            what = Recorded(_trace(order, Length(requests=_PLENTY), 1.0, 0).requests)
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
            block_tokens=asked.shared_tokens or 16,
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
    if rate is not None and not paced and not order.paced.streams:
        if not trace.rate_per_s:
            raise TraceUnusable(f"{asked.trace}: has no rate to scale", "leave out --rate")
        trace = scaling.at_rate(trace, rate, Random(seed))  # noqa: S311 - a seed
    if until_s is not None:
        trace = scaling.cut(trace, 0.0, until_s)
    return trace if most is None else scaling.first(trace, most)


# ------------------------------------------------------------------ in words
def _background(order: Order, known: _Known) -> Background:
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
