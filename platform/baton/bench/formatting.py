"""Formats figures with their units."""

from __future__ import annotations

import math

NO_VALUE = "-"
"""Stands for a missing figure."""


def format_seconds(duration_s: float | None) -> str:
    """`0.8 ms`, `231 ms`, `1.24 s`, `600 s`: three digits; `-` for None, `never` for infinity."""
    if duration_s is None or math.isnan(duration_s):
        return NO_VALUE
    if math.isinf(duration_s):
        return "never"
    rounded_s = float(f"{duration_s:.3g}")
    return f"{rounded_s:g} s" if abs(rounded_s) >= 1 else f"{rounded_s * 1000:.3g} ms"


def format_percent(fraction: float | None) -> str:
    """`93.2 %`; only 1 is `100 %`, only 0 is `0 %`."""
    if fraction is None or math.isnan(fraction):
        return NO_VALUE
    percent = 100 * fraction
    if 0 < percent < _MIN_PERCENT:
        return f"< {_MIN_PERCENT:g} %"
    if 100 - _MIN_PERCENT < percent < 100:  # noqa: PLR2004 - a whole has 100 hundredths
        return f"> {100 - _MIN_PERCENT:g} %"
    return f"{percent:.1f} %" if percent % 100 else f"{percent:.0f} %"


_MIN_PERCENT = 0.1


def format_number(number: float | None) -> str:
    """Three digits, or a whole number in groups of three: `0.0123`, `12.3`, `12,031`."""
    if number is None or math.isnan(number):
        return NO_VALUE
    if math.isinf(number):
        return "∞"
    if float(number).is_integer() or abs(number) >= _ALL_DIGITS_FROM:
        return f"{number:,.0f}"
    return f"{number:.3g}"


_ALL_DIGITS_FROM = 100.0
