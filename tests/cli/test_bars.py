"""Bars of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.bars import bar, gauge, range_bar, sparkline

FRACTIONS = st.floats(0, 1)


@pytest.mark.parametrize(
    ("from_fraction", "to_fraction", "drawn"),
    [
        (0.0, 1.0, "████"),
        (0.5, 1.0, "  ██"),
        (0.25, 0.375, " ▌  "),
        (0.99, 1.0, "   █"),
        (0.0, 0.001, "▏   "),
        (0.5, 0.5, "    "),
    ],
)
def test_a_stretch_lies_where_it_belongs(
    from_fraction: float, to_fraction: float, drawn: str
) -> None:
    assert range_bar(from_fraction, to_fraction, 4) == drawn


def test_without_blocks_there_are_hashes() -> None:
    assert range_bar(0.5, 1.0, 4, blocks=False) == "  ##"
    assert gauge(0.5, 4, blocks=False) == "##  "
    assert gauge(None, 2, blocks=False) == ".."


@given(one=FRACTIONS, other=FRACTIONS, width=st.integers(1, 200), blocks=st.booleans())
def test_a_bar_is_as_wide_as_asked_and_always_visible(
    one: float, other: float, width: int, *, blocks: bool
) -> None:
    first, last = sorted((one, other))
    drawn = range_bar(first, last, width, blocks=blocks)
    assert len(drawn) == width
    assert bool(drawn.strip()) is (last > first)


@pytest.mark.parametrize(("fraction", "drawn"), [(0.0, "    "), (0.5, "██  "), (7.0, "████")])
def test_a_gauge_shows_how_full_something_is(fraction: float, drawn: str) -> None:
    assert gauge(fraction, 4) == drawn


def test_unknown_parts_are_dotted() -> None:
    assert gauge(None, 3) == "···"


def test_a_spark_line_is_as_high_as_its_greatest_value_and_shows_the_last_ones() -> None:
    assert sparkline([9.0, 0.0, 1.0, 2.0], 3) == "▁▅█"
    assert sparkline([0.0, 0.0], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert bar(2.5) == "██▌"
