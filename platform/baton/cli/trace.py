"""`baton trace`: where the time of one request went, as a waterfall."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, cast

import typer

from baton.cli.bars import speaks_blocks, stretch
from baton.cli.explain import verdict_text
from baton.cli.options import Address, Json, Output, seam_of, wanted_format
from baton.cli.output import (
    OutputFormat,
    Paint,
    duration_text,
    painted,
    print_report,
    reported_errors,
    table_lines,
)

Told = dict[str, Any]
_WIDTH = 80
_NARROWEST = 20
_FIGURES = 24
"""What took and what was predicted, beside the bars."""
_PAINTS = {"held": Paint.PALE, "queue": Paint.DOUBT, "lost": Paint.BAD}


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
    from shutil import get_terminal_size  # here: keeps --help fast

    width = width or min(160, get_terminal_size((_WIDTH, 24)).columns)
    for number, story in enumerate(stories):
        if number:
            yield ""
        yield from _story(story, width)


def _story(story: Told, width: int) -> Iterator[str]:
    yield f"{story['request_id']}: {story['outcome']} ({story['reason']})"
    yield f"  class {story['slo_class']} of tenant {story['tenant']}: {verdict_text(story)}"
    if story.get("trace_id"):
        yield f"  trace id: {story['trace_id']}"
    bars = cast("list[Told]", story["waterfall"])
    first_s, end_s = story["first_token_s"], story["ended_s"]
    until_s = end_s if first_s is None else first_s
    before = [bar for bar in bars if bar["from_s"] < until_s or first_s is None]
    after = [bar for bar in bars if bar not in before]
    columns = _columns(bars, width)
    yield ""
    yield f"  {_first_part(story)}"
    yield from _waterfall(before, 0.0, until_s, columns)
    if after:
        yield ""
        yield f"  then {duration_text(end_s - until_s)} to the end{_tokens_text(story)}"
        yield from _waterfall(after, until_s, end_s, columns)
    yield from _resumes(story)
    yield from _legs(story)
    yield ""
    yield f"  why it ran there: baton explain route {story['request_id']}"


def _first_part(story: Told) -> str:
    first_s = story["first_token_s"]
    if first_s is None:
        return f"no first token in {duration_text(story['ended_s'])}"
    text = f"first token after {duration_text(first_s)}"
    predicted_s, error = story["predicted_ttft_s"], story["ttft_error_fraction"]
    if predicted_s is None:
        return text
    told = f"predicted {duration_text(predicted_s)} from its placement on"
    if error is not None:
        told += f", {abs(error):.0%} too {'long' if error > 0 else 'short'}"
    return f"{text} ({told})"


def _tokens_text(story: Told) -> str:
    if story["tpot_s"] is None:
        return ""
    return (
        f": {story['output_tokens']} tokens, {duration_text(story['tpot_s'])} each,"
        f" longest gap {duration_text(story['worst_gap_s'])}"
    )


def _columns(bars: list[Told], width: int) -> tuple[int, int, int]:
    """How wide a part's name, a place's, and the bars are."""
    part = max((len(str(bar["part"])) for bar in bars), default=0)
    place = max((len(_place(bar)) for bar in bars), default=0)
    return part, place, max(_NARROWEST, width - part - place - _FIGURES - 6)


def _place(bar: Told) -> str:
    return str(bar["replica"] or "ingress")


def _waterfall(
    bars: list[Told], from_s: float, to_s: float, columns: tuple[int, int, int]
) -> Iterator[str]:
    part_width, place_width, width = columns
    whole_s = max(to_s - from_s, 1e-9)
    blocks = speaks_blocks()
    header = " " * (part_width + place_width + width + 6)
    yield f"{header}{'took':>10}{'predicted':>12}".rstrip()
    for bar in bars:
        drawn = stretch(
            (bar["from_s"] - from_s) / whole_s, (bar["to_s"] - from_s) / whole_s, width,
            blocks=blocks,
        )  # fmt: skip
        part = str(bar["part"])
        if (paint := _PAINTS.get(part)) is not None:
            drawn = painted(drawn, paint)
        took = duration_text(bar["to_s"] - bar["from_s"])
        yield (
            f"  {part:{part_width}}  {_place(bar):{place_width}}  {drawn}"
            f"{took:>10}{duration_text(bar['predicted_s']):>12}"
        )


def _resumes(story: Told) -> Iterator[str]:
    if reasons := story["resume_reasons"]:
        yield ""
        for number, reason in enumerate(reasons):
            yield f"  resumed ({number + 1} of {len(reasons)}), because {reason}"


def _legs(story: Told) -> Iterator[str]:
    if legs := cast("list[Told]", story.get("legs") or []):
        yield ""
        yield "  legs, as engines tell of them"
        yield from table_lines([_leg_row(leg) for leg in legs], "  ")


def _leg_row(leg: Told) -> dict[str, object]:
    """What is told of a leg; `queued` and `computed` are by the engine's own clock."""
    computed, cached = leg.get("prompt_tokens"), leg.get("cached_tokens")
    row = {
        "kind": leg.get("kind"),
        "replica": leg.get("replica"),
        "end": leg.get("end"),
        "began": duration_text(leg.get("began_s")),
        "queued": duration_text(leg.get("engine_queue_s")),
        "computed": duration_text(leg.get("engine_compute_s")),
        "first token": duration_text(leg.get("first_output_s")),
        "ended": duration_text(leg.get("ended_s")),
        "prompt": f"{computed} ({cached} cached)" if cached else computed,
        "out": leg.get("output_tokens"),
    }
    return row | ({"preempted": leg["preemptions"]} if leg.get("preemptions") else {})
