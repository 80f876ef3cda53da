"""The time of one request as bars of text, and its legs as engines tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from baton.cli.bars import speaks_blocks, stretch
from baton.cli.output import Paint, duration_text, painted, table_lines

Told = dict[str, Any]
_WIDTH = 80
_WIDEST = 160
_NARROWEST = 20
_FIGURES = 24
"""What took and what was predicted, beside the bars."""
_PAINTS = {"held": Paint.PALE, "queue": Paint.DOUBT, "lost": Paint.BAD}


def screen_width() -> int:
    """How wide a waterfall is drawn here, in characters."""
    from shutil import get_terminal_size  # here: keeps --help fast

    return min(_WIDEST, get_terminal_size((_WIDTH, 24)).columns)


def waterfall_lines(story: Told, width: int) -> Iterator[str]:
    """Bars up to the first token, then those after it, each part with a scale of its own."""
    bars = cast("list[Told]", story["waterfall"])
    first_s, end_s = story["first_token_s"], story["ended_s"]
    until_s = end_s if first_s is None else first_s
    before = [bar for bar in bars if bar["from_s"] < until_s or first_s is None]
    after = [bar for bar in bars if bar not in before]
    columns = _columns(bars, width)
    yield f"  {_first_part(story)}"
    yield from _waterfall(before, 0.0, until_s, columns)
    if after:
        yield ""
        yield f"  then {duration_text(end_s - until_s)} to the end{_tokens_text(story)}"
        yield from _waterfall(after, until_s, end_s, columns)
    if any(bar.get("guessed") for bar in bars):
        yield "  ~ its engine did not say: parted from its neighbour by what was predicted"


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
        took = ("~" if bar.get("guessed") else "") + duration_text(bar["to_s"] - bar["from_s"])
        yield (
            f"  {part:{part_width}}  {_place(bar):{place_width}}  {drawn}"
            f"{took:>10}{duration_text(bar['predicted_s']):>12}"
        )


def leg_lines(story: Told) -> Iterator[str]:
    """A table of its legs; nothing where nothing is told of them."""
    if legs := cast("list[Told]", story.get("legs") or []):
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
