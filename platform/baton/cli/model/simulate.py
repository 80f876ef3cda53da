"""`baton simulate`: a configuration serves a trace in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import (
    CalibrationFiles,
    ConfigFiles,
    Output,
    SetOptions,
    ThinkTime,
    TimeUnitOption,
    Users,
    backend_of,
    check_time_unit,
    command_line,
    parse_seconds,
    parse_users,
    positive,
)
from baton.cli.output import OutputFormat, print_report, report_errors

if TYPE_CHECKING:
    from baton.bench.report import Study
    from baton.cli.model.simulation import SimulateArgs
    from baton.simulator.faults import ScheduledEvent

_TRACE = typer.Option("--trace", metavar="FILE", help="Requests to serve, in any known format.")
_WORKLOAD = typer.Option(
    "--workload", metavar="NAME", help="Workload instead of a trace: conv, code, chat, agents, ..."
)
_RATE = typer.Option(
    "--rate", metavar="R", help="Requests/s: of a workload, or to bring a trace to.", min=0
)
_SCALE = typer.Option(
    "--scale",
    metavar="R",
    help="Rate of one run instead of --rate: attainment against rate; repeatable.",
)
_COMPARE = typer.Option(
    "--compare",
    metavar="KEY=VALUE",
    help="Serve the same requests with this changed, as policy=random; repeatable.",
)
_KILL = typer.Option(
    "--kill", metavar="REPLICA@TIME", help="A replica dies, as decode-0@30s; repeatable."
)
_SWEEP = typer.Option(
    "--slo-scale-sweep", help="One run for each scale of the objectives, known to the policy."
)
_AUTOSCALER = typer.Option(
    "--autoscaler",
    metavar="POLICY",
    help="Scale the pools by it: slo, static, module:function; a run for each; repeatable.",
)
_COLD_START = typer.Option(
    "--cold-start", metavar="DURATION", help="Time that a replica takes to start, as 60s."
)
_REPORT = typer.Option("--report", metavar="FILE", help="Write a page (.html) or plots (.png).")


def simulate(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    config: ConfigFiles,
    *,
    sets: SetOptions = None,
    trace: Annotated[Path | None, _TRACE] = None,
    time_unit: TimeUnitOption = None,
    workload: Annotated[str | None, _WORKLOAD] = None,
    rate: Annotated[float | None, _RATE] = None,
    users: Users = None,
    think_time: ThinkTime = None,
    duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Length to serve, as 10m.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests to serve.")
    ] = None,
    scale: Annotated[list[float] | None, _SCALE] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    ttft: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="TTFT objective, as --set slo.default.ttft=..."),
    ] = None,
    tpot: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="TPOT objective, as --set slo.default.tpot=..."),
    ] = None,
    attainment: Annotated[
        float, typer.Option(help="The share that shall meet the objectives.", min=0, max=1)
    ] = 0.9,
    compare: Annotated[list[str] | None, _COMPARE] = None,
    autoscaler: Annotated[list[str] | None, _AUTOSCALER] = None,
    cold_start: Annotated[str | None, _COLD_START] = None,
    kill: Annotated[list[str] | None, _KILL] = None,
    slo_scale_sweep: Annotated[bool, _SWEEP] = False,
    calibration: CalibrationFiles = None,
    model_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's config.json.")
    ] = None,
    ignore_invalid: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out bad lines.")
    ] = False,
    output: Output = OutputFormat.TEXT,
    report: Annotated[Path | None, _REPORT] = None,
) -> None:
    """Serve a trace or a workload in virtual time.

    The decisions are those of a live deployment. No GPU is needed: engines are modelled.
    """
    if (trace is None) == (workload is None):
        raise typer.BadParameter("give one of --trace and --workload", param_hint="--trace")
    check_time_unit(time_unit, trace)
    user_load = parse_users(users, think_time)
    if user_load is not None and (rate is not None or scale):
        raise typer.BadParameter("give one of --users, --rate and --scale", param_hint="--users")
    from baton.cli.model.simulation import SimulateArgs  # here: keeps --help fast
    from baton.cli.traces import RequestArgs

    slo_overrides = [
        f"slo.default.{name}={value}"
        for name, value in (("ttft", ttft), ("tpot", tpot))
        if value is not None
    ]
    args = SimulateArgs(
        files=config,
        environ=backend_of(context).environ,
        sets=[*(sets or ()), *slo_overrides],
        requests=RequestArgs(
            file=trace,
            time_unit=time_unit,
            workload=workload,
            users=user_load,
            rate_per_s=None if rate is None else positive(rate, "--rate"),
            duration_s=None if duration is None else parse_seconds(duration, "--duration"),
            max_requests=requests,
            scales=tuple(positive(value, "--scale") for value in scale or ()),
            ignore_invalid=ignore_invalid,
            seed=seed,
        ),
        compare=tuple(compare or ()),
        autoscalers=tuple(autoscaler or ()),
        cold_start_s=None if cold_start is None else parse_seconds(cold_start, "--cold-start"),
        scheduled_events=tuple(_parse_kill(text) for text in kill or ()),
        calibration=tuple(calibration or ()),
        model_config=model_config,
        target=attainment,
        scale_sweep=slo_scale_sweep,
        seed=seed,
    )
    _run(args, command=command_line(context), output=output, report=report)


def _run(args: SimulateArgs, *, command: str, output: OutputFormat, report: Path | None) -> None:
    from baton.bench.report import check_report_path
    from baton.cli.model.simulation import run_study

    with report_errors():
        if report is not None:
            check_report_path(report)
        with progress_bar("simulating") as on_progress:
            study = run_study(args, command=command, on_progress=on_progress)
    show_study(study, output, report)


def show_study(study: Study, output: OutputFormat, report: Path | None) -> None:
    """Write a study to the file of `--report`, and print it."""
    from baton.bench.report import print_study, study_to_dict, write_report

    if report is not None:
        with report_errors():
            write_report(study, report)
    if output is OutputFormat.JSON:
        print_report(study_to_dict(study), output)
    else:
        print_study(study, sys.stdout)
    if report is not None:
        typer.echo(f"report: {report}", err=True)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr while something goes on, where that is a terminal; takes fractions."""
    from rich.console import Console  # here: keeps --help fast
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


def _parse_kill(text: str) -> ScheduledEvent:
    from baton.simulator.faults import Kill  # here: keeps --help fast

    replica_id, separator, time_text = text.rpartition("@")
    if not separator or not replica_id:
        raise typer.BadParameter(
            f"got {text!r}, expected a replica and a time such as decode-0@30s", param_hint="--kill"
        )
    return Kill(at_s=parse_seconds(time_text, "--kill"), replica_id=replica_id)
