"""Bars of text: where a stretch lies on a line, how full something is, how something went."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS_PER_CELL = 8


def can_draw_blocks() -> bool:
    """Whether what reads stdout knows Unicode's blocks."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        (_EIGHTHS + _LEVELS).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def range_bar(from_fraction: float, to_fraction: float, width: int, *, blocks: bool = True) -> str:
    """A bar from one place of a line to another; any part above zero is visible.

    Its length is rounded to eighths of a character, its start to whole characters.
    """
    start = min(width - 1, max(0, int(from_fraction * width + 1e-9)))
    if to_fraction <= from_fraction:
        return " " * width
    length = max(1, round((min(1.0, to_fraction) * width - start) * _EIGHTHS_PER_CELL))
    return (" " * start + bar(length / _EIGHTHS_PER_CELL, blocks=blocks)).ljust(width)[:width]


def bar(cells: float, *, blocks: bool = True) -> str:
    """A bar of this many characters, to an eighth of one."""
    if not blocks:
        return "#" * max(1, round(cells)) if cells > 0 else ""
    full_cells, eighths = divmod(round(cells * _EIGHTHS_PER_CELL), _EIGHTHS_PER_CELL)
    return "█" * full_cells + (_EIGHTHS[eighths] if eighths else "")


def gauge(fraction: float | None, width: int, *, blocks: bool = True) -> str:
    """How full something is, in a fixed width; dots where that is not known."""
    if fraction is None:
        return ("·" if blocks else ".") * width
    return bar(min(1.0, max(0.0, fraction)) * width, blocks=blocks).ljust(width)


def sparkline(values: Sequence[float], width: int, *, blocks: bool = True) -> str:
    """The last values as a line of columns; the greatest of them is the highest."""
    shown = list(values)[-width:]
    peak = max(shown, default=0.0)
    if not blocks:
        return ""
    return "".join(
        _LEVELS[0] if peak <= 0 else _LEVELS[round(value / peak * (len(_LEVELS) - 1))]
        for value in shown
    )
