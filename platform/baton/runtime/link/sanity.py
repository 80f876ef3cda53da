"""Whether figures that came over the link can be reckoned with."""

from __future__ import annotations

import math

from baton.runtime.link.frames import MAX_ID_CHARS


def is_sane(values: tuple[object, ...]) -> bool:
    """Whether all numbers are finite and none negative, and no text too long, however nested."""
    for value in values:
        match value:
            case tuple():
                is_valid = is_sane(value)
            case str():
                is_valid = len(value) <= MAX_ID_CHARS
            case int() | float():
                is_valid = math.isfinite(value) and value >= 0
            case _:
                is_valid = False
        if not is_valid:
            return False
    return True
