"""`baton trace`: where the time of one request went, as a waterfall."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, cast

import typer

from baton.cli.explain.waterfall_text import (
    leg_lines,
    outcome_text,
    screen_width,
    waterfall_lines,
)
from baton.cli.options import Address, JsonFlag, Output, backend_of, resolve_format
from baton.cli.output import (
    OutputFormat,
    duration_text,
    print_report,
    report_errors,
    table_lines,
)

JsonDict = dict[str, Any]


class RequestOrder(StrEnum):
    """Values of `domain.commands.RecordSelection`, repeated for fast help."""

    LATEST = "latest"
    SLOWEST = "slowest"
    MISSED = "missed"


def trace(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST_ID",
            help="Request id, as in X-Request-Id, in the answer or in logs; without: a list.",
            show_default=False,
        ),
    ] = None,
    *,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, max=1000, help="Number of requests to list.")
    ] = 20,
    order: Annotated[
        RequestOrder, typer.Option("--order", help="Requests to list.")
    ] = RequestOrder.LATEST,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show where a request's time went, predicted against actual.

    Without a request, it lists recently ended requests.
    """
    with report_errors():
        commands = backend_of(context).commands()
        if request_id is None:
            report = commands.requests(count, order=str(order), address=address)
        else:
            report = commands.explain_route(request_id, address=address)
    lines_of = table_of_requests if request_id is None else trace_lines
    print_report(
        report,
        resolve_format(output, as_json=as_json),
        lambda report: lines_of(cast("list[JsonDict]", report["requests"])),
    )


def table_of_requests(requests: list[JsonDict]) -> Iterator[str]:
    """One line a request."""
    if not requests:
        yield "no request has ended yet"
        return
    yield from table_lines([request_row(request) for request in requests])


def request_row(request: JsonDict) -> dict[str, object]:
    """A request in a table."""
    return {
        "request": request["request_id"],
        "ended": f"{duration_text(request['age_s'])} ago",
        "outcome": request["outcome"],
        "class": request["slo_class"],
        "verdict": _verdict(request),
        "tokens": f"{request['prompt_tokens']}+{request['output_tokens']}",
        "ttft": duration_text(request["first_token_s"]),
        "total": duration_text(request["ended_s"]),
        "ran on": route_text(request),
    }


def _verdict(request: JsonDict) -> str:
    return f"missed {request['missed']}" if request["missed"] else str(request["verdict"])


def route_text(request: JsonDict) -> str:
    """`p-1 -> d-1`, or `d-1`; `-` where it ran nowhere."""
    first, last = request["prefill_replica"], request["decode_replica"]
    if last is None:
        return "-"
    return str(last) if first == last else f"{first} -> {last}"


def trace_lines(requests: list[JsonDict], width: int | None = None) -> Iterator[str]:
    """Requests as waterfalls, a paragraph each; `width` is in characters, None as the terminal."""
    width = width or screen_width()
    for number, request in enumerate(requests):
        if number:
            yield ""
        yield from _request_lines(request, width)


def _request_lines(request: JsonDict, width: int) -> Iterator[str]:
    yield f"{request['request_id']}: {request['outcome']} ({request['reason']})"
    yield f"  class {request['slo_class']} of tenant {request['tenant']}: {outcome_text(request)}"
    if request.get("trace_id"):
        yield f"  trace id: {request['trace_id']}"
    yield ""
    yield from waterfall_lines(request, width)
    yield from _resume_lines(request)
    if legs := list(leg_lines(request)):
        yield ""
        yield from legs
    yield ""
    yield f"  why it ran there: baton explain route {request['request_id']}"


def _resume_lines(request: JsonDict) -> Iterator[str]:
    if reasons := request["resume_reasons"]:
        yield ""
        for number, reason in enumerate(reasons):
            yield f"  resumed ({number + 1} of {len(reasons)}), because {reason}"
