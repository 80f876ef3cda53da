"""`baton trace`: where the time of one request went, as a waterfall."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, cast

import typer

from baton.cli.explain.explain import verdict_text
from baton.cli.explain.waterfall_text import leg_lines, screen_width, waterfall_lines
from baton.cli.options import Address, Json, Output, seam_of, wanted_format
from baton.cli.output import (
    OutputFormat,
    duration_text,
    print_report,
    reported_errors,
    table_lines,
)

Told = dict[str, Any]


class Order(StrEnum):
    """Which requests are listed: the words of `domain.commands.RecordOrder`, here for fast help."""

    LATEST = "latest"
    SLOWEST = "slowest"
    MISSED = "missed"


def trace(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST_ID",
            help="As sent in X-Request-Id, as answered, or as logged; without: a list of requests.",
            show_default=False,
        ),
    ] = None,
    *,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, max=1000, help="How many to list.")
    ] = 20,
    order: Annotated[Order, typer.Option("--order", help="Which to list.")] = Order.LATEST,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Show where a request's time went, predicted against actual.

    Without a request, those are listed that have ended lately.
    """
    with reported_errors():
        commands = seam_of(context).commands()
        if request_id is None:
            report = commands.requests(count, order=str(order), address=address)
        else:
            report = commands.explain_route(request_id, address=address)
    if wanted_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
        return
    stories = cast("list[Told]", report["requests"])
    lines = listed(stories) if request_id is None else traced(stories)
    for line in lines:
        typer.echo(line)


def listed(stories: list[Told]) -> Iterator[str]:
    """One line a request."""
    if not stories:
        yield "no request has ended yet"
        return
    yield from table_lines([request_row(story) for story in stories])


def request_row(story: Told) -> dict[str, object]:
    """A request in a table."""
    return {
        "request": story["request_id"],
        "ended": f"{duration_text(story['age_s'])} ago",
        "outcome": story["outcome"],
        "class": story["slo_class"],
        "verdict": _verdict(story),
        "tokens": f"{story['prompt_tokens']}+{story['output_tokens']}",
        "ttft": duration_text(story["first_token_s"]),
        "total": duration_text(story["ended_s"]),
        "ran on": route_text(story),
    }


def _verdict(story: Told) -> str:
    return f"missed {story['missed']}" if story["missed"] else str(story["verdict"])


def route_text(story: Told) -> str:
    """`p-1 -> d-1`, or `d-1`; `-` where it ran nowhere."""
    first, last = story["prefill_replica"], story["decode_replica"]
    if last is None:
        return "-"
    return str(last) if first == last else f"{first} -> {last}"


def traced(stories: list[Told], width: int | None = None) -> Iterator[str]:
    """Requests as waterfalls, a paragraph each; `width` is in characters, None as the terminal."""
    width = width or screen_width()
    for number, story in enumerate(stories):
        if number:
            yield ""
        yield from _story(story, width)


def _story(story: Told, width: int) -> Iterator[str]:
    yield f"{story['request_id']}: {story['outcome']} ({story['reason']})"
    yield f"  class {story['slo_class']} of tenant {story['tenant']}: {verdict_text(story)}"
    if story.get("trace_id"):
        yield f"  trace id: {story['trace_id']}"
    yield ""
    yield from waterfall_lines(story, width)
    yield from _resumes(story)
    if legs := list(leg_lines(story)):
        yield ""
        yield from legs
    yield ""
    yield f"  why it ran there: baton explain route {story['request_id']}"


def _resumes(story: Told) -> Iterator[str]:
    if reasons := story["resume_reasons"]:
        yield ""
        for number, reason in enumerate(reasons):
            yield f"  resumed ({number + 1} of {len(reasons)}), because {reason}"
