"""`baton replay`: a trace against a running deployment."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.measure.bench_options import command_of, header_of
from baton.cli.model.simulate import progress_bar
from baton.cli.options import Output, positive, seconds
from baton.cli.output import ExitCode, OutputFormat, complain, print_report, reported_errors
from baton.cli.traces import TraceUnusable, load_or_pace, make_workload

if TYPE_CHECKING:
    from baton.bench.client.client import ServedModel
    from baton.bench.replay import Replayed
    from baton.bench.report import Study
    from baton.simulator.outcome import Objectives
    from baton.simulator.workloads.trace import Trace

_TRACE = typer.Argument(metavar="[TRACE]", help="Requests to send, in any known format.")
_WORKLOAD = typer.Option(
    "--workload", metavar="NAME", help="Instead of a trace: conv, code, chat, agents, ..."
)
_URL = typer.Option("--url", metavar="URL", help="Of an OpenAI-compatible endpoint.")
_MODEL = typer.Option("--model", metavar="NAME", help="If the endpoint serves several.")
_RATE = typer.Option(
    "--rate",
    metavar="R",
    help="Bring the requests to this mean rate, by leaving some out or laying copies over each"
    " other; bursts keep their shape.",
)
_SPEED = typer.Option(
    "--speed", metavar="X", help="Instead: X times as fast; this makes bursts denser."
)
_DEADLINE = typer.Option("--deadline", metavar="DURATION", help="For one answer.")
_IN_FLIGHT = typer.Option("--max-in-flight", help="Requests at a time; more are sent late.", min=1)
_VOCABULARY = typer.Option(help="Prompts are made up of token ids below this.", min=1)
_HEADER = typer.Option("--header", metavar="NAME:VALUE", help="Sent with requests; repeatable.")
_GPUS = typer.Option("--gpus", metavar="N", help="That serve, for figures per GPU.", min=1)
_SLO_TTFT = typer.Option("--slo-ttft", "--ttft", metavar="DURATION", help="As 500ms.")
_SLO_TPOT = typer.Option("--slo-tpot", "--tpot", metavar="DURATION", help="As 30ms.")
_REPORT = typer.Option("--report", metavar="FILE", help="Write a page (.html) or plots (.png).")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """All that is asked for."""

    trace: Path | None
    workload: str | None
    url: str
    model: str | None
    rate_per_s: float | None
    speed: float | None
    most: int | None
    duration_s: float | None
    deadline_s: float
    max_in_flight: int
    vocabulary: int
    gpus: int | None
    ttft_s: float | None
    tpot_s: float | None
    attainment: float
    skip_bad: bool
    seed: int
    headers: Mapping[str, str] = field(default_factory=dict)
    command: str


def replay(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    trace: Annotated[Path | None, _TRACE] = None,
    *,
    workload: Annotated[str | None, _WORKLOAD] = None,
    url: Annotated[str, _URL] = "http://127.0.0.1:8000",
    model: Annotated[str | None, _MODEL] = None,
    rate: Annotated[float | None, _RATE] = None,
    speed: Annotated[float | None, _SPEED] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many.")] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The first so much, as 10m.")
    ] = None,
    deadline: Annotated[str, _DEADLINE] = "10m",
    max_in_flight: Annotated[int, _IN_FLIGHT] = 1024,
    vocabulary: Annotated[int, _VOCABULARY] = 8_000,
    header: Annotated[list[str] | None, _HEADER] = None,
    gpus: Annotated[int | None, _GPUS] = None,
    slo_ttft: Annotated[str | None, _SLO_TTFT] = None,
    slo_tpot: Annotated[str | None, _SLO_TPOT] = None,
    attainment: Annotated[
        float, typer.Option(help="The share that shall meet the objectives.", min=0, max=1)
    ] = 0.9,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out bad lines.")] = False,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    output: Output = OutputFormat.TEXT,
    report: Annotated[Path | None, _REPORT] = None,
) -> None:
    """Send a trace to a running endpoint, and measure.

    Requests are sent when they are due. They do not wait for answers to others, so an
    overloaded endpoint looks overloaded. Ctrl-C ends it early, with what was measured so far.
    """
    if (trace is None) == (workload is None):
        raise typer.BadParameter("give one of TRACE and --workload", param_hint="TRACE")
    if rate is not None and speed is not None:
        raise typer.BadParameter("give one of --rate and --speed", param_hint="--speed")
    order = _Order(
        trace=trace,
        workload=workload,
        url=url,
        model=model,
        rate_per_s=None if rate is None else positive(rate, "--rate"),
        speed=None if speed is None else positive(speed, "--speed"),
        most=limit,
        duration_s=_duration(duration, "--duration"),
        deadline_s=seconds(deadline, "--deadline"),
        max_in_flight=max_in_flight,
        vocabulary=vocabulary,
        gpus=gpus,
        ttft_s=_duration(slo_ttft, "--slo-ttft"),
        tpot_s=_duration(slo_tpot, "--slo-tpot"),
        attainment=attainment,
        skip_bad=skip_bad,
        seed=seed,
        headers=dict(header_of(one) for one in header or ()),
        command=command_of(context, header or []),
    )
    _run(order, output=output, report=report)


def _run(order: _Order, *, output: OutputFormat, report: Path | None) -> None:
    from baton.bench.report import check_report_path, plain, print_study, write_report

    with reported_errors():
        if report is not None:
            check_report_path(report)
        trace = _requests(order)
        with progress_bar("replaying") as tell:
            import asyncio  # here: keeps --help fast

            model, replayed = asyncio.run(_replayed(order, trace, tell))
        if not replayed.outcomes:
            raise TraceUnusable("no request has ended", "let it run longer, or send shorter ones")
        study = _study(order, trace, model, replayed)
        if report is not None:
            write_report(study, report)
    if output is OutputFormat.JSON:
        print_report(plain(study), output)
    else:
        print_study(study, sys.stdout)
    if report is not None:
        typer.echo(f"report: {report}", err=True)
    if not any(one.ok for one in replayed.outcomes):
        complain(f"no request succeeded: {next(iter(replayed.failures), 'all were stopped')}")
        raise typer.Exit(ExitCode.FAILURE)


async def _replayed(
    order: _Order, trace: Trace, on_progress: Callable[[float], None]
) -> tuple[ServedModel, Replayed]:
    import asyncio  # here: keeps --help fast

    from baton.bench.client.client import ClientOptions, CompletionClient
    from baton.bench.replay import Replay, ReplayOptions

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    options = ClientOptions(
        url=order.url,
        deadline_s=order.deadline_s,
        connections=order.max_in_flight,
        headers=order.headers,
    )
    async with CompletionClient(options) as client:
        model = await client.model(order.model)
        replay_options = ReplayOptions(
            vocabulary=order.vocabulary, max_in_flight=order.max_in_flight, seed=order.seed
        )
        one = Replay(client, model, trace, options=replay_options, on_progress=on_progress)
        return model, await one.run(stop)


# ------------------------------------------------------------------ which requests
def _requests(order: _Order) -> Trace:
    from baton.simulator.workloads import scaling

    trace = _workload(order) if order.trace is None else _recorded(order, order.trace)
    if order.speed is not None:
        trace = scaling.compressed(trace, order.speed)
    if order.duration_s is not None:
        trace = scaling.cut(trace, 0.0, order.duration_s)
    if order.most is not None:
        trace = scaling.first(trace, order.most)
    if not len(trace):
        raise TraceUnusable("no request is left", "give a longer --duration")
    return trace


def _workload(order: _Order) -> Trace:
    rate_per_s = order.rate_per_s
    if rate_per_s is None:
        raise TraceUnusable("--workload needs a rate", "give --rate, in requests per second")
    if order.duration_s is None and order.most is None:
        raise TraceUnusable("--workload needs an end", "give --duration or --limit")
    return make_workload(
        order.workload or "",
        rate_per_s=rate_per_s,
        duration_s=order.duration_s,
        most=order.most,
        seed=order.seed,
    )


def _recorded(order: _Order, path: Path) -> Trace:
    from random import Random

    from baton.simulator.workloads import scaling

    rate_per_s = order.rate_per_s
    trace, paced = load_or_pace(
        path, skip_bad=order.skip_bad, rate_per_s=rate_per_s, seed=order.seed
    )
    # A piece of a longer trace begins later than at 0, but it is sent at once.
    trace = scaling.cut(trace, trace.requests[0].at_s if trace.requests else 0.0)
    if rate_per_s is None or paced:
        return trace
    if not trace.rate_per_s:
        raise TraceUnusable(f"{path}: its requests have no rate to scale", "leave out --rate")
    return scaling.at_rate(trace, rate_per_s, Random(order.seed))  # noqa: S311 - a seed


# ------------------------------------------------------------------ in words
def _study(order: _Order, trace: Trace, model: ServedModel, replayed: Replayed) -> Study:
    import baton
    from baton.bench.formatting import number_text, seconds_text
    from baton.bench.report import Evidence, Result, Study, Table
    from baton.bench.report.summary import tail_notes

    rate_text = f"{number_text(trace.rate_per_s)}/s" if trace.rate_per_s else "at once"
    span_text = seconds_text(trace.span_s)
    result = Result(
        name=model.name,
        outcomes=replayed.outcomes,
        devices=order.gpus or 1,
        offered_per_s=trace.rate_per_s or None,
        counts={
            "late sends": replayed.late_sends,
            "clipped prompts": replayed.clipped_prompts,
            "short answers": replayed.short_answers,
        },
    )
    failures = tuple((why, str(count)) for why, count in replayed.failures.items())
    return Study(
        title=f"{trace.name} against {order.url}",
        evidence=Evidence.MEASURED,
        command=order.command,
        facts={
            "requests": f"{trace.name}: {len(trace):,} in {span_text}, {rate_text}",
            "endpoint": order.url,
            "model": model.name,
            "longest": f"{model.max_tokens:,} tokens" if model.max_tokens else "not said",
            "seed": str(order.seed),
            "baton": baton.__version__,
        },
        notes=(*_notes(order, trace, replayed), *tail_notes([result])),
        objectives=_objectives(order),
        target=order.attainment,
        device="GPU" if order.gpus else "endpoint",
        results=(result,),
        tables=(Table(title="Failures", columns=("why", "requests"), rows=failures[:10]),)
        if failures
        else (),
    )


def _objectives(order: _Order) -> Objectives:
    from baton.simulator.outcome import Objectives

    return Objectives(ttft_s=order.ttft_s, tpot_s=order.tpot_s)


def _notes(order: _Order, trace: Trace, replayed: Replayed) -> tuple[str, ...]:
    """What a reader must know to judge the figures."""
    sessions = any(one.session_id is not None for one in trace.requests)
    counted = (
        (
            replayed.late_sends,
            f"requests were sent late, at worst by {replayed.worst_late_s:.3f} s; latencies count"
            " from when they were due. If they are many, this client or --max-in-flight is what was"
            " measured.",
        ),
        (replayed.clipped_prompts, "prompts were cut to what the endpoint takes."),
        (replayed.too_long, "requests were left out: their output alone is too long for it."),
        (replayed.short_answers, "answers ended before the length that was asked for."),
        (replayed.abandoned, "requests were left when the replay was stopped; they do not count."),
        (trace.skipped_lines, "lines of the trace were bad and left out."),
    )
    notes = [f"{count} {what}" for count, what in counted if count]
    if order.speed is not None:
        notes.append(f"Time was squeezed {order.speed:g} times: bursts are denser than recorded.")
    if sessions:
        notes.append(
            "Answers are the model's own, so the next prompt of a session shares the earlier prompt"
            " with it but not the earlier answer: caches help a little less than in life."
        )
    return tuple(notes)


# ------------------------------------------------------------------ options
def _duration(text: str | None, option: str) -> float | None:
    return None if text is None else seconds(text, option)
