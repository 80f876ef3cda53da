"""Quantities with units."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.language.units import Unit, format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("500ms", Unit.SECONDS, 0.5),
        ("2s", Unit.SECONDS, 2.0),
        ("50us", Unit.SECONDS, 50e-6),
        ("1.5m", Unit.SECONDS, 90.0),
        ("30d", Unit.SECONDS, 2_592_000.0),
        ("0s", Unit.SECONDS, 0.0),
        ("4MiB", Unit.BYTES, 4 * 1024**2),
        ("1.5GiB", Unit.BYTES, 1.5 * 1024**3),
        ("10MB", Unit.BYTES, 10_000_000),
        ("10/s", Unit.PER_SECOND, 10.0),
        ("60k/min", Unit.PER_SECOND, 1000.0),
        ("25GB/s", Unit.BYTES_PER_SECOND, 25e9),
    ],
)
def test_a_quantity_is_read_in_base_units(text: str, unit: Unit, number: float) -> None:
    assert parse_quantity(text, unit) == number


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("2", Unit.SECONDS),
        ("-2s", Unit.SECONDS),
        ("2S", Unit.SECONDS),
        ("2  s", Unit.SECONDS),
        ("2s\n", Unit.SECONDS),
        ("inf s", Unit.SECONDS),
        ("1e3s", Unit.SECONDS),
        ("٣s", Unit.SECONDS),
        ("4MiB", Unit.SECONDS),
        ("4Mib", Unit.BYTES),
        ("10", Unit.PER_SECOND),
        ("10/y", Unit.PER_SECOND),
        ("", Unit.BYTES),
    ],
)
def test_what_is_no_quantity_is_not_guessed_at(text: str, unit: Unit) -> None:
    assert parse_quantity(text, unit) is None


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0.5, Unit.SECONDS, "500ms"),
        (600.0, Unit.SECONDS, "600s"),
        (0, Unit.BYTES, "0B"),
        (4 * 1024**2, Unit.BYTES, "4MiB"),
        (20_000.0, Unit.PER_SECOND, "20k/s"),
        (25e9, Unit.BYTES_PER_SECOND, "25GB/s"),
    ],
)
def test_a_quantity_is_written_in_the_largest_unit_without_a_fraction(
    number: float, unit: Unit, text: str
) -> None:
    assert format_quantity(number, unit) == text


@settings(deadline=None)
@given(
    number=st.floats(min_value=0, max_value=1e18, allow_nan=False),
    unit=st.sampled_from([Unit.SECONDS, Unit.PER_SECOND, Unit.BYTES_PER_SECOND]),
)
def test_a_written_quantity_reads_back_as_the_same_float(number: float, unit: Unit) -> None:
    assert parse_quantity(format_quantity(number, unit), unit) == number


@settings(deadline=None)
@given(number=st.integers(min_value=0, max_value=2**53))
def test_written_bytes_read_back_as_the_same_number(number: int) -> None:
    assert parse_quantity(format_quantity(number, Unit.BYTES), Unit.BYTES) == number
