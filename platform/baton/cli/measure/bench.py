"""`baton bench`: a load against an endpoint, and its results."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.endpoint import CaFile, ConnectionArgs, Insecure, KeyFile, connect
from baton.cli.measure.bench_options import (
    parse_choice,
    parse_class_share,
    parse_length,
    parse_numbers,
    parse_objectives,
    parse_prefix,
    parse_span,
    parse_warm_up,
    redacted_command_line,
    require_one_of,
)
from baton.cli.options import (
    Address,
    Output,
    TimeUnitOption,
    check_time_unit,
    parse_seconds,
    positive,
)
from baton.cli.output import ExitCode, OutputFormat, print_error, print_report, report_errors

if TYPE_CHECKING:
    from baton.cli.measure.bench_args import BenchArgs

_URL = typer.Argument(
    metavar="[URL]", help="URL of an OpenAI-compatible endpoint; else the running deployment."
)
_MODEL = typer.Option(
    "--model", metavar="NAME", help="Model to use, if the endpoint serves several."
)
_API = typer.Option("--api", metavar="API", help="completions or chat.")
_RATE = typer.Option(
    "--rate", metavar="R[,R...]", help="Requests/s, a run at each; an open loop. [default: 1]"
)
_CONCURRENCY = typer.Option(
    "--concurrency", metavar="N[,N...]", help="Requests in flight at a time: a closed loop."
)
_ARRIVALS = typer.Option("--arrivals", metavar="PACE", help="poisson, constant or gamma.")
_BURSTINESS = typer.Option(
    "--burstiness", metavar="B", help="Shape of gamma arrivals: below 1, bursts."
)
_TRACE = typer.Option("--trace", metavar="FILE", help="Arrivals and lengths of any known format.")
_WORKLOAD = typer.Option(
    "--workload", metavar="NAME", help="Arrivals and lengths as recorded: conv, code, agents, ..."
)
_DATASET = typer.Option(
    "--dataset", metavar="FILE", help="Prompts in JSON or JSON lines, as ShareGPT's."
)
_PROMPT = typer.Option("--prompt-tokens", metavar="N[:M]", help="Prompt tokens, from N to M.")
_OUTPUT_TOKENS = typer.Option(
    "--output-tokens", metavar="N[:M]", help="Output tokens, from N to M. [default: 128]"
)
_PROMPTS = typer.Option(
    "--prompts", metavar="KIND", help="tokens or words. [default: tokens; for chat, words]"
)
_TOKENIZER = typer.Option(
    "--tokenizer",
    metavar="FILE",
    help="Tokenizer that counts words' tokens, if not the endpoint's.",
)
_PREFIX = typer.Option(
    "--shared-prefix",
    metavar="TOKENS[xCOUNT]",
    help="Each prompt begins with one of COUNT such prefixes.",
)
_TURNS = typer.Option("--turns", help="Turns of each conversation; chat only.", min=1)
_THINK = typer.Option(
    "--think", "--think-time", metavar="DURATION", help="Pause between an answer and the next turn."
)
_CLASS = typer.Option(
    "--class", metavar="NAME=WEIGHT", help="A share of requests asks for this class; repeatable."
)
_REQUESTS = typer.Option("--requests", help="Number of requests to measure.", min=1)
_DURATION = typer.Option(
    "--duration", metavar="DURATION", help="Time to measure for. [default: 30s]"
)
_WARM_UP = typer.Option(
    "--warm-up", metavar="N|DURATION", help="Requests or time to leave out of the results."
)
_SLO = typer.Option(
    "--slo",
    metavar="[CLASS:]LIMITS",
    help="Objectives, as ttft=500ms,tpot=30ms,e2e=20s; repeatable, for several classes.",
)
_ATTAINMENT = typer.Option("--attainment", help="The share that shall meet them.", min=0, max=1)
_KNEE = typer.Option("--find-knee", help="Find the highest rate that meets them, from --rate on.")
_REPEATS = typer.Option("--repeats", help="Repeats of each run, for confidence intervals.", min=1)
_CLIENTS = typer.Option("--clients", help="Processes that send, if one core is too few.", min=1)
_IN_FLIGHT = typer.Option("--max-in-flight", help="Requests at a time; more are sent late.", min=1)
_HEADER = typer.Option("--header", metavar="NAME:VALUE", help="Sent with requests; repeatable.")
_REPORT = typer.Option(
    "--report", metavar="FOLDER", help="Write bench.json, bench.html and requests.jsonl there."
)
_VOCABULARY = typer.Option(help="Prompts are made up of token ids below this.", min=1)

_INTERRUPTED = 130
"""The exit status after Ctrl-C."""


def bench(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    url: Annotated[str | None, _URL] = None,
    *,
    model: Annotated[str | None, _MODEL] = None,
    api: Annotated[str, _API] = "completions",
    rate: Annotated[str | None, _RATE] = None,
    concurrency: Annotated[str | None, _CONCURRENCY] = None,
    arrivals: Annotated[str, _ARRIVALS] = "poisson",
    burstiness: Annotated[float, _BURSTINESS] = 1.0,
    trace: Annotated[Path | None, _TRACE] = None,
    time_unit: TimeUnitOption = None,
    workload: Annotated[str | None, _WORKLOAD] = None,
    dataset: Annotated[Path | None, _DATASET] = None,
    prompt_tokens: Annotated[str, _PROMPT] = "512",
    output_tokens: Annotated[str | None, _OUTPUT_TOKENS] = None,
    prompts: Annotated[str | None, _PROMPTS] = None,
    tokenizer: Annotated[str, _TOKENIZER] = "endpoint",
    shared_prefix: Annotated[str | None, _PREFIX] = None,
    turns: Annotated[int, _TURNS] = 1,
    think: Annotated[str, _THINK] = "1s",
    classes: Annotated[list[str] | None, _CLASS] = None,
    requests: Annotated[int | None, _REQUESTS] = None,
    duration: Annotated[str | None, _DURATION] = None,
    warm_up: Annotated[str, _WARM_UP] = "8",
    slo: Annotated[list[str] | None, _SLO] = None,
    attainment: Annotated[float, _ATTAINMENT] = 0.99,
    find_knee: Annotated[bool, _KNEE] = False,
    repeats: Annotated[int, _REPEATS] = 1,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    clients: Annotated[int, _CLIENTS] = 1,
    max_in_flight: Annotated[int, _IN_FLIGHT] = 1024,
    deadline: Annotated[
        str, typer.Option(metavar="DURATION", help="Time limit of one answer.")
    ] = "10m",
    header: Annotated[list[str] | None, _HEADER] = None,
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    address: Address = None,
    vocabulary: Annotated[int, _VOCABULARY] = 8_000,
    ignore_invalid: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out bad lines.")
    ] = False,
    output: Output = OutputFormat.TEXT,
    report: Annotated[Path | None, _REPORT] = None,
) -> None:
    """Send a load to an endpoint and measure what its users would meet.

    In open loop requests are sent when they are due, even to a slow endpoint, and latencies count
    from then. A run in which this client was too slow is called invalid. Ctrl-C ends it early, with
    the results so far.
    """
    from baton.bench.client.client import Api
    from baton.bench.findings.metrics import SloObjectives
    from baton.bench.load import ArrivalProcess
    from baton.cli.measure import bench_args as bench_order

    interface = parse_choice(Api, api, "--api")
    is_chat = interface is Api.CHAT
    prompt_kind = require_one_of(
        prompts or ("words" if is_chat else "tokens"), ("tokens", "words"), "--prompts"
    )
    check_time_unit(time_unit, trace)
    shared_tokens, shared_prompts = parse_prefix(shared_prefix)
    rates = parse_numbers(rate, "--rate")
    connection_args = ConnectionArgs(
        url=url,
        key_file=key_file,
        ca_file=ca_file,
        insecure=insecure,
        address=address,
        headers=header or (),
    )
    args = bench_order.BenchArgs(
        endpoint=bench_order.Endpoint(
            url=url or "",
            model=model,
            api=interface,
            deadline_s=parse_seconds(deadline, "--deadline"),
            max_in_flight=max_in_flight,
            clients=clients,
        ),
        prompts=bench_order.PromptArgs(
            dataset=dataset,
            trace=trace,
            time_unit=time_unit,
            workload=workload,
            as_words=prompt_kind == "words",
            tokenizer=tokenizer,
            prompt=parse_span(prompt_tokens, "--prompt-tokens"),
            output=None if output_tokens is None else parse_span(output_tokens, "--output-tokens"),
            shared_tokens=shared_tokens,
            shared_prompts=shared_prompts,
            classes=tuple(parse_class_share(class_) for class_ in classes or ()),
            vocabulary=vocabulary,
            ignore_invalid=ignore_invalid,
        ),
        load=bench_order.LoadArgs(
            rates_per_s=rates or (() if trace else (1.0,)),
            streams=tuple(int(number) for number in parse_numbers(concurrency, "--concurrency")),
            pace=parse_choice(ArrivalProcess, arrivals, "--arrivals"),
            burstiness=positive(burstiness, "--burstiness"),
            length=parse_length(requests, duration),
            warm_up=parse_warm_up(warm_up),
            turns=turns,
            think_s=0.0 if think == "0" else parse_seconds(think, "--think"),
        ),
        slo=SloObjectives(objectives=parse_objectives(slo or []), target=attainment),
        find_knee=find_knee,
        repeats=repeats,
        seed=seed,
        command=redacted_command_line(context, header or []),
    )
    _check_options(args, rates_given=bool(rates))
    with report_errors():
        connection = connect(context, connection_args)
    endpoint = replace(
        args.endpoint, url=connection.url, headers=connection.headers, trust=connection.trust
    )
    _run(replace(args, endpoint=endpoint), output=output, report=report)


def _run(args: BenchArgs, *, output: OutputFormat, report: Path | None) -> None:
    from baton.bench.findings.document import build_document, build_study
    from baton.bench.report import print_study
    from baton.cli.measure import bench_run

    with report_errors():
        if report is not None:
            bench_run.check_folder(report)
        findings, background = bench_run.run_from_args(args)
    if output is OutputFormat.JSON:
        print_report(build_document(findings, background), output)
    else:
        print_study(build_study(findings, background), sys.stdout)
    if report is not None:
        # After it was printed: measurements are not lost where they cannot be written.
        with report_errors():
            for file in bench_run.write_files(findings, background, report):
                typer.echo(f"report: {file}", err=True)
    if not any(run.metrics.completed for run in findings.runs):
        reasons = [reason for run in findings.runs for reason in run.metrics.failures]
        _fail(f"no request succeeded: {next(iter(reasons), 'all were stopped')}", _FAILED_REMEDY)
    if findings.is_partial:
        typer.secho("partial: stopped before its end; the figures say of what", err=True)
        raise typer.Exit(_INTERRUPTED)
    if findings.invalid_reasons:
        for reason in findings.invalid_reasons:
            print_error(f"not valid: {reason}")
        _fail("figures are the client's, not the endpoint's", _INVALID_REMEDY)


_FAILED_REMEDY = "look at the failures above; for status 401 give --key-file"
_INVALID_REMEDY = (
    "give more --clients, a lower --rate, or run it on a machine with nothing else to do"
)


def _fail(problem: str, remedy: str) -> None:
    print_error(problem)
    typer.secho(f"next: {remedy}", err=True)
    raise typer.Exit(ExitCode.FAILURE)


# ------------------------------------------------------------------ what goes together
def _check_options(args: BenchArgs, *, rates_given: bool) -> None:
    """Refuse options that exclude each other.

    Raises:
        BadParameter: which option, and why.
    """
    prompts, load = args.prompts, args.load
    is_chat, is_synthetic = args.endpoint.api == "chat", not (prompts.trace or prompts.workload)
    rules = (
        (
            sum(item is not None for item in (prompts.trace, prompts.workload, prompts.dataset))
            > 1,
            *("give one of --trace, --workload and --dataset", "--trace"),
        ),
        (
            bool(load.streams) and (rates_given or args.find_knee),
            *("give one of --rate and --concurrency", "--concurrency"),
        ),
        (
            bool(prompts.workload) and not rates_given and not load.streams,
            *("--workload needs --rate", "--rate"),
        ),
        (
            args.find_knee and not args.slo.has_objectives,
            *("--find-knee needs objectives: give --slo", "--slo"),
        ),
        (
            args.find_knee and len(load.rates_per_s) != 1,
            *("--find-knee begins at one rate: give one", "--rate"),
        ),
        (load.turns > 1 and not is_chat, "only a chat has turns: give --api chat", "--turns"),
        (
            load.turns > 1 and not (is_synthetic and prompts.dataset is None),
            *("turns are made up: leave out --trace, --workload and --dataset", "--turns"),
        ),
        (
            is_chat and not prompts.as_words and prompts.dataset is None,
            *("a chat takes words, not token ids", "--prompts"),
        ),
        (
            prompts.shared_tokens > prompts.prompt.low,
            *("the shared prefix is longer than the shortest prompt", "--shared-prefix"),
        ),
        (
            args.endpoint.clients > args.endpoint.max_in_flight,
            *("fewer requests at a time than client processes", "--clients"),
        ),
    )
    for is_violated, reason, option in rules:
        if is_violated:
            raise typer.BadParameter(reason, param_hint=option)
