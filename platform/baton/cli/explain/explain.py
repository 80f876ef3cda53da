"""`baton explain`: why something was decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, cast

import typer

from baton.cli.backend import Report
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
from baton.domain.names.words import count_text

JsonDict = dict[str, Any]


def route(
    context: typer.Context,
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID", help="Request id, as in X-Request-Id, in the answer or in logs."
        ),
    ],
    *,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show how a request was placed, and the options it was chosen from."""
    with report_errors():
        report = backend_of(context).commands().explain_route(request_id, address=address)
    print_report(
        report,
        resolve_format(output, as_json=as_json),
        lambda report: report_lines(report, screen_width()),
    )


def report_lines(report: Report, width: int = 80) -> Iterator[str]:
    """The report as lines for a person: the request, where its time went, each placement."""
    for number, request in enumerate(cast("list[JsonDict]", report["requests"])):
        if number:
            yield ""
        yield from _request_lines(request)
        yield ""
        yield from waterfall_lines(request, width)
        if legs := list(leg_lines(request)):
            yield ""
            yield from legs
        yield from _placement_lines(request["decisions"], request["resume_reasons"])


def _placement_lines(decisions: list[JsonDict], resume_reasons: list[str]) -> Iterator[str]:
    for index, decision in enumerate(decisions):
        cause = f", because {resume_reasons[index - 1]}" if 0 < index <= len(resume_reasons) else ""
        yield ""
        yield f"placement {index + 1} of {len(decisions)}{cause}"
        yield from _decision_lines(decision)
    for reason in resume_reasons[max(0, len(decisions) - 1) :]:
        yield ""
        yield f"not placed again after: {reason}"


def _request_lines(request: JsonDict) -> Iterator[str]:
    yield f"{request['request_id']}: {request['outcome']} ({request['reason']})"
    cached = "unknown" if request["cached_tokens"] is None else request["cached_tokens"]
    yield (
        f"  tokens: {request['prompt_tokens']} prompt ({cached} cached), "
        f"{request['output_tokens']} output"
    )
    yield f"  class {request['slo_class']} of tenant {request['tenant']}: {outcome_text(request)}"
    yield f"  device time: {duration_text(request['gpu_s'])}"
    yield f"  resumes: {request['resumes']}"


def _decision_lines(decision: JsonDict) -> Iterator[str]:
    route, final_route = decision["route"], decision["became"]
    yield (
        f"  policy {decision['policy']}, {duration_text(decision['decided_s'])} after arrival: "
        f"{_route_text(route)}, {decision['reason']}"
    )
    if route["prefill_tokens"] is not None:
        prefill_replica, decode_replica = route["prefill_replica"], route["decode_replica"]
        prefix_text = count_text(route["prefill_tokens"], "token")
        yield f"  {prefill_replica} prefills the first {prefix_text}, {decode_replica} the rest"
    if (change := _route_change(route, final_route)) is not None:
        yield f"  route changed: {change}"
    if options := decision["options"]:
        yield f"  best {len(options)} of {decision['considered']} options; * is the chosen one"
        has_loads = any(option.get("load_s") for option in options)
        yield from table_lines(
            [_option_row(option, has_loads=has_loads) for option in options], "  "
        )
    else:
        yield "  options: none kept, this policy predicts nothing"
    yield f"  {_prediction_text(decision)}"


def _option_row(option: JsonDict, *, has_loads: bool) -> dict[str, object]:
    """Its columns add up: queue + load + prefill + transfer + decode = TTFT.

    "load" is an adapter's load, shown where any option has one. Brackets: after the first token.
    """
    template = "({})" if option.get("early") else "{}"
    return {
        " ": "*" if option["chosen"] else "",
        "runs on": _route_text(option),
        "cached": _hit_text(option),
        "queue": duration_text(option["queue_s"]),
        **({"+load": duration_text(option["load_s"])} if has_loads else {}),
        "+prefill": duration_text(option["prefill_s"]),
        "+transfer": template.format(duration_text(option["transfer_s"])),
        "+decode": template.format(duration_text(option["decode_s"])),
        "=TTFT": duration_text(option["ttft_s"]),
        "harm": duration_text(option["harm_s"]),
        "cost": duration_text(option["cost_s"]),
    }


def _route_text(route: JsonDict) -> str:
    """`d-1`, or `p-1 -> d-1` when it is handed off."""
    if route["mode"] == "local":
        return str(route["decode_replica"])
    return f"{route['prefill_replica']} -> {route['decode_replica']}"


def _hit_text(option: JsonDict) -> str:
    if not option["hit_tokens"]:
        return "none"
    age = duration_text(option["hit_age_s"])
    return f"{count_text(option['hit_tokens'], 'token')} ({option['hit_source']} {age} ago)"


def _route_change(route: JsonDict, final_route: JsonDict) -> str | None:
    if _route_text(route) == _route_text(final_route):
        return None
    if (route["mode"], route["prefill_replica"]) == (
        final_route["mode"],
        final_route["prefill_replica"],
    ):
        return (
            f"decoded on {final_route['decode_replica']}, not {route['decode_replica']}: "
            "the decode replica is chosen again at the handoff"
        )
    return f"{_route_text(route)} became {_route_text(final_route)}, {final_route['reason']}"


def _prediction_text(decision: JsonDict) -> str:
    predicted_s, actual_s = decision["predicted_ttft_s"], decision["actual_ttft_s"]
    predicted = "nothing" if predicted_s is None else duration_text(predicted_s)
    actual = "no first token" if actual_s is None else duration_text(actual_s)
    text = f"TTFT from then on: predicted {predicted}, actual {actual}"
    error = decision["ttft_error_fraction"]
    if error is None:
        return text
    return f"{text} (predicted {abs(error):.0%} too {'long' if error > 0 else 'short'})"
