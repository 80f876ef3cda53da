"""Histograms: exact at objectives, weighted, bounded, and begun anew only when edges change."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.catalogue import ITL, OTHER, TTFT
from baton.telemetry.histograms import Histogram

VALUES = st.floats(0, 20, allow_nan=False)


def told(histogram: Histogram) -> dict[tuple[str, ...], dict[str, float]]:
    """By labels: cumulative counts by edge, and `sum` and `count`."""
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for sample in histogram.family().samples:
        edge = sample.labels.pop("le", None)
        row = rows.setdefault(tuple(sample.labels.values()), {})
        row[edge or sample.name.rpartition("_")[2]] = sample.value
    return rows


@given(st.lists(VALUES, max_size=50), st.lists(st.floats(0.01, 9.0), max_size=3))
def test_every_bucket_counts_what_is_at_most_its_edge(
    values: list[float], objectives: list[float]
) -> None:
    histogram = Histogram(TTFT, objectives)
    for value in values:
        histogram.observe(value, "chat")
    edges = sorted({*TTFT.edges, *objectives})
    row = told(histogram).get(("chat",), {})
    rounded = sorted(value - 1e-9 for value in values)
    counts = [bisect_right(rounded, edge) for edge in edges]
    if values:
        assert [row[edge] for edge in row if edge not in {"sum", "count"}] == [*counts, len(values)]
        assert row["sum"] == pytest.approx(sum(values))
        assert row["count"] == len(values)


def test_a_value_at_an_objective_is_within_it_but_for_rounding_as_when_it_is_judged() -> None:
    histogram = Histogram(TTFT, [0.3])
    for value in (0.1 + 0.2, 0.3, 0.3 + 1e-10, 0.3 + 1e-6):
        histogram.observe(value, "chat")
    assert told(histogram)["chat",]["0.3"] == 3


def test_what_many_share_is_observed_once_with_a_weight() -> None:
    histogram = Histogram(ITL)
    histogram.observe(0.02, "decode", weight=7)
    row = told(histogram)["decode",]
    assert (row["0.01"], row["0.025"], row["count"]) == (0, 7, 7)
    assert row["sum"] == pytest.approx(0.14)


def test_the_same_objectives_change_nothing_and_others_begin_anew() -> None:
    histogram = Histogram(TTFT, [0.3])
    histogram.observe(0.2, "chat")
    assert not histogram.fit([0.3, 0.3, 0.5])  # there is an edge at 0.5 anyway
    assert told(histogram)["chat",]["count"] == 1
    assert histogram.fit([0.35])
    assert told(histogram) == {}
    histogram.observe(0.2, "chat")
    assert "0.35" in told(histogram)["chat",]
    assert "0.3" not in told(histogram)["chat",]


def test_there_is_no_more_than_one_row_beyond_the_bound() -> None:
    histogram = Histogram(TTFT, most_rows=3)
    for number in range(1000):
        histogram.observe(0.1, f"class-{number}")
    rows = told(histogram)
    assert len(rows) == 4
    assert rows[OTHER,]["count"] == 997


def test_labels_that_were_not_declared_are_an_error() -> None:
    with pytest.raises(ValueError, match="wanted slo_class"):
        Histogram(TTFT).observe(0.1, "chat", "decode")
