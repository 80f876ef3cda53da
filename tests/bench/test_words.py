"""Figures as people read them."""

from __future__ import annotations

import math

import pytest

from baton.bench.formatting import format_number, format_percent, format_seconds


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "never"),
        (0.0, "0 ms"),
        (0.2314, "231 ms"),
        (0.99951, "1 s"),
        (1.2351, "1.24 s"),
        (1234.0, "1230 s"),
    ],
)
def test_a_duration_has_three_digits_and_a_unit(duration_s: float | None, text: str) -> None:
    assert format_seconds(duration_s) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0 %"),
        (0.0004, "< 0.1 %"),
        (0.9321, "93.2 %"),
        (0.9996, "> 99.9 %"),
        (1.0, "100 %"),
    ],
)
def test_a_share_is_whole_or_nothing_only_when_it_is(share: float | None, text: str) -> None:
    assert format_percent(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "∞"),
        (0.01234, "0.0123"),
        (12.34, "12.3"),
        (12.0, "12"),
        (12031, "12,031"),
        (12031.4, "12,031"),
    ],
)
def test_a_number_has_three_digits_or_all_of_its_whole_part(
    number: float | None, text: str
) -> None:
    assert format_number(number) == text
