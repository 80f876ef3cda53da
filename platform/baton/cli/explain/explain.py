"""`baton explain`: why something was decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
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


def route(
    context: typer.Context,
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID", help="As sent in X-Request-Id, as answered, or as logged."
        ),
    ],
    *,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: Json = False,
) -> None:
    """Show how a request was placed, and from what it was chosen."""
    with reported_errors():
        report = seam_of(context).commands().explain_route(request_id, address=address)
    if wanted_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(report, OutputFormat.JSON)
        return
    for line in readable(report, screen_width()):
        typer.echo(line)


def readable(report: Report, width: int = 80) -> Iterator[str]:
    """The report as lines for a person: the request, where its time went, each placement."""
    for number, story in enumerate(cast("list[Told]", report["requests"])):
        if number:
            yield ""
        yield from _request_lines(story)
        yield ""
        yield from waterfall_lines(story, width)
        if legs := list(leg_lines(story)):
            yield ""
            yield from legs
        yield from _placement_lines(story["decisions"], story["resume_reasons"])


def _placement_lines(decisions: list[Told], resume_reasons: list[str]) -> Iterator[str]:
    """Each placement, and before each but the first why the request was resumed."""
    for at, decision in enumerate(decisions):
        because = f", because {resume_reasons[at - 1]}" if 0 < at <= len(resume_reasons) else ""
        yield ""
        yield f"placement {at + 1} of {len(decisions)}{because}"
        yield from _decision_lines(decision)
    for reason in resume_reasons[max(0, len(decisions) - 1) :]:
        yield ""
        yield f"not placed again after: {reason}"


def _request_lines(story: Told) -> Iterator[str]:
    yield f"{story['request_id']}: {story['outcome']} ({story['reason']})"
    cached = "unknown" if story["cached_tokens"] is None else story["cached_tokens"]
    yield (
        f"  tokens: {story['prompt_tokens']} prompt ({cached} cached), "
        f"{story['output_tokens']} output"
    )
    yield f"  class {story['slo_class']} of tenant {story['tenant']}: {verdict_text(story)}"
    yield f"  device time: {duration_text(story['gpu_s'])}"
    yield f"  resumes: {story['resumes']}"


def verdict_text(story: Told) -> str:
    """In words: `good`, or which objective was broken, and by how much."""
    if story["verdict"] != "missed":
        return str(story["verdict"])
    broken = [] if "served" not in story["missed"].split(",") else ["not served"]
    broken += [_broken_text(row) for row in story["objectives"] if not row["met"]]
    return f"missed: {'; '.join(broken)}"


def _broken_text(row: Told) -> str:
    name, promised = row["objective"].upper(), duration_text(row["promised_s"])
    got = "never came" if row["got_s"] is None else duration_text(row["got_s"])
    if "slow_gaps" in row:
        return f"{row['slow_gaps']} gaps above {promised}, {row['allowed_gaps']} allowed"
    return f"{name} {got}, promised {promised}"


def _decision_lines(decision: Told) -> Iterator[str]:
    decided, became = decision["route"], decision["became"]
    yield (
        f"  policy {decision['policy']}, {duration_text(decision['decided_s'])} after arrival: "
        f"{_route_text(decided)}, {decision['reason']}"
    )
    if decided["prefill_tokens"] is not None:
        first, rest = decided["prefill_replica"], decided["decode_replica"]
        yield f"  {first} prefills the first {decided['prefill_tokens']} tokens, {rest} the rest"
    if (changed := _change(decided, became)) is not None:
        yield f"  route changed: {changed}"
    if options := decision["options"]:
        yield f"  best {len(options)} of {decision['considered']} options; * is the chosen one"
        loads = any(option.get("load_s") for option in options)
        yield from table_lines([_option_row(option, loads=loads) for option in options], "  ")
    else:
        yield "  options: none kept, this policy predicts nothing"
    yield f"  {_foresight_text(decision)}"


def _option_row(option: Told, *, loads: bool) -> dict[str, object]:
    """Its columns add up: queue + load + prefill + transfer + decode = TTFT.

    There is a column for the load of an adapter where any option has one. Where the first token
    comes with the end of the prefill, what comes after it is in brackets.
    """
    after = "({})" if option.get("early") else "{}"
    return {
        " ": "*" if option["chosen"] else "",
        "runs on": _route_text(option),
        "cached": _hit_text(option),
        "queue": duration_text(option["queue_s"]),
        **({"+load": duration_text(option["load_s"])} if loads else {}),
        "+prefill": duration_text(option["prefill_s"]),
        "+transfer": after.format(duration_text(option["transfer_s"])),
        "+decode": after.format(duration_text(option["decode_s"])),
        "=TTFT": duration_text(option["ttft_s"]),
        "harm": duration_text(option["harm_s"]),
        "cost": duration_text(option["cost_s"]),
    }


def _route_text(route: Told) -> str:
    """`d-1`, or `p-1 -> d-1` when it is handed off."""
    if route["mode"] == "local":
        return str(route["decode_replica"])
    return f"{route['prefill_replica']} -> {route['decode_replica']}"


def _hit_text(option: Told) -> str:
    if not option["hit_tokens"]:
        return "none"
    age = duration_text(option["hit_age_s"])
    return f"{option['hit_tokens']} tokens ({option['hit_source']} {age} ago)"


def _change(decided: Told, became: Told) -> str | None:
    """What became of a route between the decision and the handoff; None when nothing did."""
    if _route_text(decided) == _route_text(became):
        return None
    if (decided["mode"], decided["prefill_replica"]) == (became["mode"], became["prefill_replica"]):
        return (
            f"decoded on {became['decode_replica']}, not {decided['decode_replica']}: "
            "the decode replica is chosen again at the handoff"
        )
    return f"{_route_text(decided)} became {_route_text(became)}, {became['reason']}"


def _foresight_text(decision: Told) -> str:
    predicted_s, actual_s = decision["predicted_ttft_s"], decision["actual_ttft_s"]
    predicted = "nothing" if predicted_s is None else duration_text(predicted_s)
    actual = "no first token" if actual_s is None else duration_text(actual_s)
    text = f"TTFT from then on: predicted {predicted}, actual {actual}"
    error = decision["ttft_error_fraction"]
    if error is None:
        return text
    return f"{text} (predicted {abs(error):.0%} too {'long' if error > 0 else 'short'})"
