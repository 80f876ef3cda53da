"""Figures as people read them, with their units."""

from __future__ import annotations

import math

NOTHING = "-"
"""Stands where there is no figure."""


def seconds_text(duration_s: float | None) -> str:
    """`0.8 ms`, `231 ms`, `1.24 s`, `600 s`: three digits; `-` for none, `never` for infinite."""
    if duration_s is None or math.isnan(duration_s):
        return NOTHING
    if math.isinf(duration_s):
        return "never"
    rounded_s = float(f"{duration_s:.3g}")
    return f"{rounded_s:g} s" if abs(rounded_s) >= 1 else f"{rounded_s * 1000:.3g} ms"


def share_text(share: float | None) -> str:
    """`93.2 %`; nothing that fell short becomes `100 %`, nor anything that is there `0 %`."""
    if share is None or math.isnan(share):
        return NOTHING
    percent = 100 * share
    if 0 < percent < _LEAST_PERCENT:
        return f"< {_LEAST_PERCENT:g} %"
    if 100 - _LEAST_PERCENT < percent < 100:  # noqa: PLR2004 - a whole has 100 hundredths
        return f"> {100 - _LEAST_PERCENT:g} %"
    return f"{percent:.1f} %" if percent % 100 else f"{percent:.0f} %"


_LEAST_PERCENT = 0.1


def number_text(number: float | None) -> str:
    """Three digits, or all of a whole number's, in groups of three: `0.0123`, `12.3`, `12,031`."""
    if number is None or math.isnan(number):
        return NOTHING
    if math.isinf(number):
        return "∞"
    if float(number).is_integer() or abs(number) >= _ALL_DIGITS:
        return f"{number:,.0f}"
    return f"{number:.3g}"


_ALL_DIGITS = 100.0
