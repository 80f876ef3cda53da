"""`baton replay`: a trace against a running deployment."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.endpoint import (
    CaFile,
    Connection,
    ConnectionArgs,
    Insecure,
    KeyFile,
    connect,
)
from baton.cli.measure.bench_options import redacted_command_line
from baton.cli.model.simulate import progress_bar, show_study
from baton.cli.options import (
    Address,
    Output,
    TimeUnitOption,
    check_time_unit,
    parse_seconds,
    positive,
)
from baton.cli.output import ExitCode, OutputFormat, print_error, report_errors
from baton.cli.traces import TraceUnusable, load_trace, make_workload
from baton.domain.names.words import count_text

if TYPE_CHECKING:
    from baton.bench.client.client import ServedModel
    from baton.bench.replay import ReplayResult
    from baton.bench.report import Study
    from baton.simulator.outcome import Objectives
    from baton.simulator.workloads.arrivals import TimeUnit
    from baton.simulator.workloads.trace import Trace

_TRACE = typer.Argument(metavar="[TRACE]", help="Requests to send, in any known format.")
_WORKLOAD = typer.Option(
    "--workload", metavar="NAME", help="Workload instead of a trace: conv, code, chat, agents, ..."
)
_URL = typer.Option(
    "--url",
    metavar="URL",
    help="URL of an OpenAI-compatible endpoint; else the running deployment.",
)
_MODEL = typer.Option(
    "--model", metavar="NAME", help="Model to use, if the endpoint serves several."
)
_RATE = typer.Option(
    "--rate",
    metavar="R",
    help="Bring the requests to this mean rate, by leaving some out or laying copies over each"
    " other; bursts keep their shape.",
)
_SPEED = typer.Option(
    "--speed", metavar="X", help="Factor of speed instead of a rate; bursts get denser."
)
_DEADLINE = typer.Option("--deadline", metavar="DURATION", help="Time limit of one answer.")
_IN_FLIGHT = typer.Option("--max-in-flight", help="Requests at a time; more are sent late.", min=1)
_VOCABULARY = typer.Option(help="Prompts are made up of token ids below this.", min=1)
_HEADER = typer.Option("--header", metavar="NAME:VALUE", help="Sent with requests; repeatable.")
_GPUS = typer.Option(
    "--gpus", metavar="N", help="Number of GPUs that serve, for figures per GPU.", min=1
)
_SLO_TTFT = typer.Option(
    "--slo-ttft", "--ttft", metavar="DURATION", help="TTFT objective, as 500ms."
)
_SLO_TPOT = typer.Option(
    "--slo-tpot", "--tpot", metavar="DURATION", help="TPOT objective, as 30ms."
)
_REPORT = typer.Option("--report", metavar="FILE", help="Write a page (.html) or plots (.png).")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayArgs:
    trace: Path | None
    time_unit: TimeUnit | None
    workload: str | None
    connection_args: ConnectionArgs
    model: str | None
    rate_per_s: float | None
    speed: float | None
    max_requests: int | None
    duration_s: float | None
    deadline_s: float
    max_in_flight: int
    vocabulary: int
    gpus: int | None
    ttft_s: float | None
    tpot_s: float | None
    attainment: float
    ignore_invalid: bool
    seed: int
    command: str


def replay(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    trace: Annotated[Path | None, _TRACE] = None,
    *,
    time_unit: TimeUnitOption = None,
    workload: Annotated[str | None, _WORKLOAD] = None,
    url: Annotated[str | None, _URL] = None,
    model: Annotated[str | None, _MODEL] = None,
    rate: Annotated[float | None, _RATE] = None,
    speed: Annotated[float | None, _SPEED] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of requests to send, from the first on.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Length of the trace to send, as 10m.")
    ] = None,
    deadline: Annotated[str, _DEADLINE] = "10m",
    max_in_flight: Annotated[int, _IN_FLIGHT] = 1024,
    vocabulary: Annotated[int, _VOCABULARY] = 8_000,
    header: Annotated[list[str] | None, _HEADER] = None,
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    address: Address = None,
    gpus: Annotated[int | None, _GPUS] = None,
    slo_ttft: Annotated[str | None, _SLO_TTFT] = None,
    slo_tpot: Annotated[str | None, _SLO_TPOT] = None,
    attainment: Annotated[
        float, typer.Option(help="The share that shall meet the objectives.", min=0, max=1)
    ] = 0.9,
    ignore_invalid: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out bad lines.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    output: Output = OutputFormat.TEXT,
    report: Annotated[Path | None, _REPORT] = None,
) -> None:
    """Send a trace to a running endpoint, and measure.

    Requests are sent when they are due. They do not wait for answers to others, so an
    overloaded endpoint looks overloaded. Ctrl-C ends it early, with the results so far.
    """
    if (trace is None) == (workload is None):
        raise typer.BadParameter("give one of TRACE and --workload", param_hint="TRACE")
    check_time_unit(time_unit, trace)
    if rate is not None and speed is not None:
        raise typer.BadParameter("give one of --rate and --speed", param_hint="--speed")
    args = _ReplayArgs(
        trace=trace,
        time_unit=time_unit,
        workload=workload,
        connection_args=ConnectionArgs(
            url=url,
            key_file=key_file,
            ca_file=ca_file,
            insecure=insecure,
            address=address,
            headers=header or (),
        ),
        model=model,
        rate_per_s=None if rate is None else positive(rate, "--rate"),
        speed=None if speed is None else positive(speed, "--speed"),
        max_requests=limit,
        duration_s=_optional_seconds(duration, "--duration"),
        deadline_s=parse_seconds(deadline, "--deadline"),
        max_in_flight=max_in_flight,
        vocabulary=vocabulary,
        gpus=gpus,
        ttft_s=_optional_seconds(slo_ttft, "--slo-ttft"),
        tpot_s=_optional_seconds(slo_tpot, "--slo-tpot"),
        attainment=attainment,
        ignore_invalid=ignore_invalid,
        seed=seed,
        command=redacted_command_line(context, header or []),
    )
    _run(context, args, output=output, report=report)


def _run(
    context: typer.Context, args: _ReplayArgs, *, output: OutputFormat, report: Path | None
) -> None:
    from baton.bench.report import check_report_path

    with report_errors():
        if report is not None:
            check_report_path(report)
        trace = _trace_to_send(args)
        connection = connect(context, args.connection_args)
        with progress_bar("replaying") as on_progress:
            import asyncio  # here: keeps --help fast

            model, result = asyncio.run(_run_replay(args, connection, trace, on_progress))
        if not result.outcomes:
            raise TraceUnusable("no request has ended", "let it run longer, or send shorter ones")
        study = _study(args, connection.url, trace, model, result)
    show_study(study, output, report)
    if not any(outcome.ok for outcome in result.outcomes):
        print_error(f"no request succeeded: {next(iter(result.failures), 'all were stopped')}")
        raise typer.Exit(ExitCode.FAILURE)


async def _run_replay(
    args: _ReplayArgs, connection: Connection, trace: Trace, on_progress: Callable[[float], None]
) -> tuple[ServedModel, ReplayResult]:
    import asyncio  # here: keeps --help fast

    from baton.bench.client.client import ClientOptions, CompletionClient
    from baton.bench.replay import Replay, ReplayOptions

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    options = ClientOptions(
        url=connection.url,
        timeout_s=args.deadline_s,
        max_connections=args.max_in_flight,
        headers=connection.headers,
        trust=connection.trust,
    )
    async with CompletionClient(options) as client:
        model = await client.get_model(args.model)
        replay_options = ReplayOptions(
            vocabulary=args.vocabulary, max_in_flight=args.max_in_flight, seed=args.seed
        )
        replay_run = Replay(client, model, trace, options=replay_options, on_progress=on_progress)
        return model, await replay_run.run(stop)


# ------------------------------------------------------------------ which requests
def _trace_to_send(args: _ReplayArgs) -> Trace:
    from baton.simulator.workloads import scaling

    trace = _trace_from_workload(args) if args.trace is None else _trace_from_file(args, args.trace)
    if args.speed is not None:
        trace = scaling.compress(trace, args.speed)
    if args.duration_s is not None:
        trace = scaling.cut(trace, 0.0, args.duration_s)
    if args.max_requests is not None:
        trace = scaling.first(trace, args.max_requests)
    if not len(trace):
        raise TraceUnusable("no request is left", "give a longer --duration")
    return trace


def _trace_from_workload(args: _ReplayArgs) -> Trace:
    return make_workload(
        args.workload or "",
        rate_per_s=args.rate_per_s,
        duration_s=args.duration_s,
        max_requests=args.max_requests,
        seed=args.seed,
        limit_option="--limit",
    )


def _trace_from_file(args: _ReplayArgs, path: Path) -> Trace:
    from random import Random

    from baton.simulator.workloads import scaling
    from baton.simulator.workloads.formats import ReadOptions
    from baton.simulator.workloads.rate_series import TraceLimits

    rate_per_s = args.rate_per_s
    duration_s = None if args.duration_s is None else args.duration_s * (args.speed or 1.0)
    options = ReadOptions(
        ignore_invalid=args.ignore_invalid,
        time_unit=args.time_unit,
        rate_per_s=rate_per_s,
        limits=TraceLimits(duration_s, args.max_requests),
        seed=args.seed,
    )
    trace = load_trace(path, options)
    # A piece of a longer trace begins later than at 0, but it is sent at once.
    trace = scaling.cut(trace, trace.requests[0].at_s if trace.requests else 0.0)
    if rate_per_s is None or trace.is_paced:
        return trace
    if not trace.rate_per_s:
        raise TraceUnusable(f"{path}: its requests have no rate to scale", "leave out --rate")
    return scaling.at_rate(trace, rate_per_s, Random(args.seed))  # noqa: S311 - a seed


# ------------------------------------------------------------------ in words
def _study(
    args: _ReplayArgs, url: str, trace: Trace, model: ServedModel, replayed: ReplayResult
) -> Study:
    import baton
    from baton.bench.formatting import format_number, format_seconds
    from baton.bench.report import Evidence, RunResult, Study, Table
    from baton.bench.report.summary import length_notes

    rate_text = f"{format_number(trace.rate_per_s)}/s" if trace.rate_per_s else "at once"
    span_text = format_seconds(trace.span_s)
    result = RunResult(
        name=model.name,
        outcomes=replayed.outcomes,
        devices=args.gpus or 1,
        offered_per_s=trace.rate_per_s or None,
        event_counts={
            "late sends": replayed.late_sends,
            "clipped prompts": replayed.truncated_prompts,
            "short answers": replayed.short_answers,
        },
    )
    failures = tuple((reason, str(count)) for reason, count in replayed.failures.items())
    return Study(
        title=f"{trace.name} against {url}",
        evidence=Evidence.MEASURED,
        command=args.command,
        facts={
            "requests": f"{trace.name}: {len(trace):,} in {span_text}, {rate_text}",
            **({"arrival times": trace.times} if trace.times else {}),
            "endpoint": url,
            "model": model.name,
            "longest": f"{model.max_tokens:,} tokens" if model.max_tokens else "unknown",
            "seed": str(args.seed),
            "baton": baton.__version__,
        },
        notes=(*_notes(args, trace, replayed), *length_notes([result])),
        objectives=_objectives(args),
        target=args.attainment,
        device="GPU" if args.gpus else "endpoint",
        results=(result,),
        tables=(Table(title="Failures", columns=("reason", "requests"), rows=failures[:10]),)
        if failures
        else (),
    )


def _objectives(args: _ReplayArgs) -> Objectives:
    from baton.simulator.outcome import Objectives

    return Objectives(ttft_s=args.ttft_s, tpot_s=args.tpot_s)


def _notes(args: _ReplayArgs, trace: Trace, replayed: ReplayResult) -> tuple[str, ...]:
    has_sessions = any(request.session_id is not None for request in trace.requests)
    counts = (
        (
            replayed.late_sends,
            "request was",
            "requests were",
            f"sent late, at worst by {replayed.max_late_s:.3f} s; latencies count"
            " from when they were due. If they are many, this client or --max-in-flight is what was"
            " measured.",
        ),
        (
            replayed.truncated_prompts,
            "prompt was",
            "prompts were",
            "cut to what the endpoint takes.",
        ),
        (
            replayed.skipped_too_long,
            "request was",
            "requests were",
            "left out: the output alone is too long for it.",
        ),
        (
            replayed.short_answers,
            "answer",
            "answers",
            "ended before the length that was asked for.",
        ),
        (
            replayed.unfinished,
            "request was",
            "requests were",
            "left when the replay was stopped, and not counted.",
        ),
        (
            trace.skipped_lines,
            "line of the trace was",
            "lines of the trace were",
            "bad and left out.",
        ),
    )
    notes = [
        f"{count_text(count, singular, plural)} {what}"
        for count, singular, plural, what in counts
        if count
    ]
    if args.speed is not None:
        notes.append(f"Time was squeezed {args.speed:g} times: bursts are denser than recorded.")
    if has_sessions:
        notes.append(
            "Answers are the model's own, so the next prompt of a session shares the earlier prompt"
            " with it but not the earlier answer: caches help a little less than in life."
        )
    return tuple(notes)


# ------------------------------------------------------------------ options
def _optional_seconds(text: str | None, option: str) -> float | None:
    return None if text is None else parse_seconds(text, option)
