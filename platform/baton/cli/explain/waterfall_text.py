"""One request as text: its SLO result, its time as bars, and its legs as engines report them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from baton.cli.bars import can_draw_blocks, range_bar
from baton.cli.output import TextStyle, duration_text, styled, table_lines
from baton.domain.names.words import count_text

JsonDict = dict[str, Any]
_DEFAULT_WIDTH = 80
_MAX_WIDTH = 160
_MIN_BAR_WIDTH = 20
_FIGURES_WIDTH = 24
"""Of the actual and the predicted time, beside the bars."""
_PART_STYLES = {"ingress_wait": TextStyle.DIM, "queue": TextStyle.WARNING, "lost": TextStyle.BAD}


def outcome_text(request: JsonDict) -> str:
    """In words: `good`, or the missed objectives, and by how much."""
    if request["verdict"] != "missed":
        return str(request["verdict"])
    misses = [] if "served" not in request["missed"].split(",") else ["not served"]
    misses += [_miss_text(row) for row in request["objectives"] if not row["met"]]
    return f"missed: {'; '.join(misses)}"


def _miss_text(row: JsonDict) -> str:
    name, bound = row["objective"].upper(), duration_text(row["objective_s"])
    actual = f"no {name}" if row["actual_s"] is None else f"{name} {duration_text(row['actual_s'])}"
    if "slow_gaps" in row:
        return f"{row['slow_gaps']} gaps above {bound}, {row['allowed_gaps']} allowed"
    return f"{actual}, objective {bound}"


def screen_width() -> int:
    """How wide a waterfall is drawn here, in characters."""
    from shutil import get_terminal_size  # here: keeps --help fast

    return min(_MAX_WIDTH, get_terminal_size((_DEFAULT_WIDTH, 24)).columns)


def waterfall_lines(request: JsonDict, width: int) -> Iterator[str]:
    """Bars up to the first token, then those after it, each part with a scale of its own."""
    bars = cast("list[JsonDict]", request["waterfall"])
    first_s, end_s = request["first_token_s"], request["ended_s"]
    until_s = end_s if first_s is None else first_s
    before = [bar for bar in bars if bar["from_s"] < until_s or first_s is None]
    after = [bar for bar in bars if bar not in before]
    columns = _column_widths(bars, width)
    yield f"  {_first_token_text(request)}"
    yield from _bar_lines(before, 0.0, until_s, columns)
    if after:
        yield ""
        yield f"  then {duration_text(end_s - until_s)} to the end{_tokens_text(request)}"
        yield from _bar_lines(after, until_s, end_s, columns)
    if any(bar.get("guessed") for bar in bars):
        yield "  ~ not reported by its engine: the boundary is the predicted time"


def _first_token_text(request: JsonDict) -> str:
    first_s = request["first_token_s"]
    if first_s is None:
        return f"no first token in {duration_text(request['ended_s'])}"
    text = f"first token after {duration_text(first_s)}"
    predicted_s, error = request["predicted_ttft_s"], request["ttft_error_fraction"]
    if predicted_s is None:
        return text
    note = f"predicted {duration_text(predicted_s)} from its placement on"
    if error is not None:
        note += f", {abs(error):.0%} too {'long' if error > 0 else 'short'}"
    return f"{text} ({note})"


def _tokens_text(request: JsonDict) -> str:
    if request["tpot_s"] is None:
        return ""
    return (
        f": {count_text(request['output_tokens'], 'token')},"
        f" {duration_text(request['tpot_s'])} each,"
        f" longest gap {duration_text(request['worst_gap_s'])}"
    )


def _column_widths(bars: list[JsonDict], width: int) -> tuple[int, int, int]:
    """Widths of the columns: part, location, bar."""
    part = max((len(str(bar["part"])) for bar in bars), default=0)
    location = max((len(_location(bar)) for bar in bars), default=0)
    return part, location, max(_MIN_BAR_WIDTH, width - part - location - _FIGURES_WIDTH - 6)


def _location(bar: JsonDict) -> str:
    return str(bar["replica"] or "ingress")


def _bar_lines(
    bars: list[JsonDict], from_s: float, to_s: float, columns: tuple[int, int, int]
) -> Iterator[str]:
    part_width, location_width, width = columns
    span_s = max(to_s - from_s, 1e-9)
    blocks = can_draw_blocks()
    header = " " * (part_width + location_width + width + 6)
    yield f"{header}{'took':>10}{'predicted':>12}".rstrip()
    for bar in bars:
        bar_text = range_bar(
            (bar["from_s"] - from_s) / span_s, (bar["to_s"] - from_s) / span_s, width,
            blocks=blocks,
        )  # fmt: skip
        part = str(bar["part"])
        if (style := _PART_STYLES.get(part)) is not None:
            bar_text = styled(bar_text, style)
        took = ("~" if bar.get("guessed") else "") + duration_text(bar["to_s"] - bar["from_s"])
        yield (
            f"  {part:{part_width}}  {_location(bar):{location_width}}  {bar_text}"
            f"{took:>10}{duration_text(bar['predicted_s']):>12}"
        )


def leg_lines(request: JsonDict) -> Iterator[str]:
    """A table of its legs; nothing if none is known."""
    if legs := cast("list[JsonDict]", request.get("legs") or []):
        yield "  legs, as engines tell of them"
        yield from table_lines([_leg_row(leg) for leg in legs], "  ")


def _leg_row(leg: JsonDict) -> dict[str, object]:
    """`queued` and `computed` are by the engine's own clock."""
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
