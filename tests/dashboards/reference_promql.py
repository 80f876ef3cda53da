"""What Prometheus makes of scraped histograms, spelt out: `rate`, `sum by`, `histogram_quantile`.

`test_quantiles` holds it to Prometheus itself, where that is installed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from prometheus_client.metrics_core import Metric as Family

SCRAPE_S: Final = 15.0
Labels = frozenset[tuple[str, str]]
_GROUPED = re.compile(r"sum by \((?P<by>[\w, ]+)\)")


@dataclass
class ScrapedSeries:
    """Samples by series, in order of their times."""

    series: dict[Labels, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def scrape(self, at_s: float, instance: str, family: Family) -> None:
        """Keep the buckets of one process at one time."""
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = {**sample.labels, "job": "baton", "instance": instance}
                self.series[frozenset(labels.items())].append((at_s, sample.value))


def grouped_by(expr: str) -> tuple[str, ...]:
    """What a query adds up by, besides `le`."""
    found = _GROUPED.search(expr)
    assert found is not None, expr
    return tuple(label for label in found["by"].split(", ") if label != "le")


def quantiles(
    scraped: ScrapedSeries, fraction: float, *by: str, at_s: float, window_s: float
) -> Mapping[tuple[str, ...], float]:
    """`histogram_quantile(fraction, sum by (le, ...) (rate(...[window])))`; no NaN is told."""
    groups: dict[tuple[str, ...], dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for labels, samples in scraped.series.items():
        grown = rate(
            [sample for sample in samples if at_s - window_s <= sample[0] <= at_s], at_s, window_s
        )
        if grown is not None:
            of = dict(labels)
            groups[tuple(of[label] for label in by)][float(of["le"])] += grown
    found = {key: quantile(fraction, buckets) for key, buckets in groups.items()}
    return {key: value for key, value in found.items() if not math.isnan(value)}


def rate(samples: list[tuple[float, float]], at_s: float, window_s: float) -> float | None:
    """As Prometheus extrapolates it; None of fewer than two samples.

    Source: Prometheus, documentation of `rate` and `increase`; checked against promtool.
    """
    if len(samples) < 2:
        return None
    (first_s, first), (last_s, last) = samples[0], samples[-1]
    increase = last - first + sum(a for (_, a), (_, b) in pairwise(samples) if b < a)
    sampled_s = last_s - first_s
    mean_interval_s = sampled_s / (len(samples) - 1)
    to_start_s, to_end_s = first_s - (at_s - window_s), at_s - last_s
    if increase > 0 and first >= 0:
        to_start_s = min(to_start_s, sampled_s * first / increase)  # a counter was not below zero
    extrapolated_s = [
        gap_s if gap_s < 1.1 * mean_interval_s else mean_interval_s / 2
        for gap_s in (to_start_s, to_end_s)
    ]
    return increase * (sampled_s + sum(extrapolated_s)) / sampled_s / window_s


def quantile(fraction: float, buckets: Mapping[float, float]) -> float:
    """Of cumulative counts by upper edge; counts that fall are lifted, as Prometheus does."""
    edges = sorted(buckets)
    counts, highest = [], 0.0
    for edge in edges:
        highest = max(highest, buckets[edge])
        counts.append(highest)
    if edges[-1] != math.inf or len(edges) < 2 or not counts[-1]:
        return math.nan
    rank = fraction * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= rank)
    if index == len(edges) - 1:
        return edges[-2]
    lower_edge, lower_count = (edges[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    return lower_edge + (edges[index] - lower_edge) * (rank - lower_count) / (
        counts[index] - lower_count
    )


def bucket_of(value: float, edges: Iterable[float]) -> tuple[float, float]:
    """The two edges that a value lies between."""
    all_edges = [0.0, *sorted(edges), math.inf]
    return next((low, high) for low, high in pairwise(all_edges) if value <= high)
