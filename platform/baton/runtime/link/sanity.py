"""Whether figures that came over the link can be reckoned with."""

from __future__ import annotations

import math

from baton.runtime.link.frames import MAX_ID_CHARS


def is_sane(figures: tuple[object, ...]) -> bool:
    """Whether all numbers are finite and none negative, and no text too long, however nested."""
    for figure in figures:
        match figure:
            case tuple():
                sane = is_sane(figure)
            case str():
                sane = len(figure) <= MAX_ID_CHARS
            case int() | float():
                sane = math.isfinite(figure) and figure >= 0
            case _:
                sane = False
        if not sane:
            return False
    return True
