"""`baton plan`: which fleet carries a traffic within objectives at the least cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.model.models import AUTO
from baton.cli.model.simulate import progress_bar
from baton.cli.options import (
    CalibrationFiles,
    JsonFlag,
    Output,
    ThinkTime,
    TimeUnitOption,
    Users,
    check_time_unit,
    command_line,
    parse_seconds,
    parse_users,
    positive,
    resolve_format,
)
from baton.cli.output import ExitCode, OutputFormat, print_report, report_errors

if TYPE_CHECKING:
    from baton.cli.model.planning import PlanArgs

_TRACE = typer.Option("--trace", metavar="FILE", help="The traffic, in any known format.")
_WORKLOAD = typer.Option(
    "--workload", metavar="NAME", help="Workload instead of a trace: conv, code, chat, agents, ..."
)
_GPU = typer.Option("--gpu", metavar="NAME", help="An accelerator, as H100; repeatable.")
_PRICE = typer.Option(
    "--price", metavar="DOLLARS", help="Price of one GPU-hour; once for each --gpu.", min=0
)
_CLASS = typer.Option(
    "--class",
    metavar="NAME:KEY=VALUE,...",
    help="A class of requests with objectives of its own, as batch:ttft=10s,attainment=0.8.",
)
_RANKS = typer.Option(
    help="Data-parallel sizes to compare with, of groups that share experts; 1 for none."
    " [default for models with experts: powers of 2 within four nodes]"
)
_SPECULATE = typer.Option(
    "--speculate",
    metavar="ACCEPTANCE:TOKENS",
    help="Gain of speculative decoding by this acceptance rate and number of drafted tokens, as"
    " 0.7:3; with the cost of a drafted token in steps, as 0.7:3:0.05. [default cost: one layer]",
)
_QUANTIZATIONS = typer.Option(
    "--quantizations", help="Plan with narrower weights and KV cache, too: a row each."
)
_REPORT = typer.Option("--report", metavar="FILE", help="Write a page (.html) or plots (.png).")
_WRITE = typer.Option("--write", metavar="FILE", help="Write a configuration for 'baton up'.")


def plan(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A hub id, or the path of a config.json or of its folder.")
    ],
    *,
    gpu: Annotated[list[str], _GPU],
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs that there are.")] = None,
    trace: Annotated[Path | None, _TRACE] = None,
    time_unit: TimeUnitOption = None,
    workload: Annotated[str | None, _WORKLOAD] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Requests/s to be carried.", min=0)
    ] = None,
    users: Users = None,
    think_time: ThinkTime = None,
    ttft: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Objective for the first token.")
    ] = None,
    tpot: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Objective between tokens.")
    ] = None,
    attainment: Annotated[
        float, typer.Option(help="The share that shall meet them.", min=0.01, max=0.999)
    ] = 0.9,
    slo_class: Annotated[list[str] | None, _CLASS] = None,
    price: Annotated[list[float] | None, _PRICE] = None,
    dtype: Annotated[
        str, typer.Option(help="Data type of the weights: bf16, fp8, int4, ...")
    ] = AUTO,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="Data type of the KV cache: bf16, fp8, ...")
    ] = AUTO,
    tp: Annotated[str, typer.Option(help="Tensor parallel sizes to try.")] = "1,2,4,8",
    pp: Annotated[str, typer.Option(help="Pipeline parallel sizes to try.")] = "1",
    dp: Annotated[str, _RANKS] = AUTO,
    calibration: CalibrationFiles = None,
    speculate: Annotated[str | None, _SPECULATE] = None,
    quantizations: Annotated[bool, _QUANTIZATIONS] = False,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, help="Limit of streams of a replica.")
    ] = 512,
    quick: Annotated[bool, typer.Option("--quick", help="Simulate less, and err more.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes that simulate at a time.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    ignore_invalid: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out bad lines.")
    ] = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
    report: Annotated[Path | None, _REPORT] = None,
    write: Annotated[Path | None, _WRITE] = None,
) -> None:
    """Find the cheapest fleet that meets its objectives.

    With a rate or users, the cheapest that carries them within the objectives; without, what
    carries most on the GPUs that there are. It is simulated, with the decisions of a live
    deployment; no GPU is needed.
    """
    if (trace is None) == (workload is None):
        raise typer.BadParameter("give one of --trace and --workload", param_hint="--trace")
    check_time_unit(time_unit, trace)
    rate_per_s = None if rate is None else positive(rate, "--rate")
    user_load = parse_users(users, think_time)
    if rate is not None and user_load is not None:
        raise typer.BadParameter("give one of --rate and --users", param_hint="--users")
    if workload is not None and rate is None and user_load is None and gpus is None:
        raise typer.BadParameter("give --rate or --users, --gpus, or both", param_hint="--rate")
    if price and len(price) != len(gpu):
        raise typer.BadParameter("give one for each --gpu, or none", param_hint="--price")
    from baton.cli.model.planning import (  # here: keeps --help fast
        PlanArgs,
        parse_speculation,
        slo_classes,
    )

    args = PlanArgs(
        model=model,
        accelerators=tuple(gpu),
        prices=tuple(price or ()),
        gpus=gpus,
        trace=trace,
        time_unit=time_unit,
        workload=workload,
        rate_per_s=rate_per_s,
        users=user_load,
        classes=slo_classes(
            ttft_s=None if ttft is None else parse_seconds(ttft, "--ttft"),
            tpot_s=None if tpot is None else parse_seconds(tpot, "--tpot"),
            attainment=attainment,
            class_texts=slo_class or (),
        ),
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor=_parse_sizes(tp, "--tp"),
        pipeline=_parse_sizes(pp, "--pp"),
        ranks=None if dp == AUTO else _parse_sizes(dp, "--dp"),
        calibration=tuple(calibration or ()),
        speculate=None if speculate is None else parse_speculation(speculate),
        quantizations=quantizations,
        max_num_seqs=max_num_seqs,
        quick=quick,
        processes=processes,
        seed=seed,
        ignore_invalid=ignore_invalid,
        write=write,
    )
    output = resolve_format(output, as_json=as_json)
    _run(args, command=command_line(context), output=output, report=report)


def _run(args: PlanArgs, *, command: str, output: OutputFormat, report: Path | None) -> None:
    from baton.cli.model.planning import run_planner, study_of, write_config
    from baton.cli.model.planning_text import plan_json, print_plan

    with report_errors():
        if args.write is not None:
            from baton.bench.report.write import check_writable

            check_writable(args.write, "a configuration")
        if report is not None:
            from baton.bench.report import check_report_path, write_report

            check_report_path(report)
        with progress_bar("planning") as on_progress:
            result = run_planner(args, on_progress=on_progress)
        if report is not None:
            write_report(study_of(result, command=command), report)
        text = write_config(args, result)
    if output is OutputFormat.JSON:
        print_report(plan_json(result), output)
    else:
        print_plan(result, sys.stdout)
    for path in (report, args.write if text else None):
        if path is not None:
            typer.echo(f"written: {path}", err=True)
    if not result.plan.meets_rate:
        raise typer.Exit(ExitCode.FAILURE)


def _parse_sizes(text: str, option: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise typer.BadParameter(f"got {text!r}, expected numbers as 1,2,4", param_hint=option)
    return sizes
