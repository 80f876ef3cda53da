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
class Scraped:
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
    scraped: Scraped, fraction: float, *by: str, at_s: float, window_s: float
) -> Mapping[tuple[str, ...], float]:
    """`histogram_quantile(fraction, sum by (le, ...) (rate(...[window])))`; no NaN is told."""
    groups: dict[tuple[str, ...], dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for labels, samples in scraped.series.items():
        grown = rate([one for one in samples if at_s - window_s <= one[0] <= at_s], at_s, window_s)
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
    grown = last - first + sum(a for (_, a), (_, b) in pairwise(samples) if b < a)
    sampled_s = last_s - first_s
    usual_s = sampled_s / (len(samples) - 1)
    to_start_s, to_end_s = first_s - (at_s - window_s), at_s - last_s
    if grown > 0 and first >= 0:
        to_start_s = min(to_start_s, sampled_s * first / grown)  # a counter was not below zero
    reach_s = [gap_s if gap_s < 1.1 * usual_s else usual_s / 2 for gap_s in (to_start_s, to_end_s)]
    return grown * (sampled_s + sum(reach_s)) / sampled_s / window_s


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
    place = next(i for i, count in enumerate(counts) if count >= rank)
    if place == len(edges) - 1:
        return edges[-2]
    low, below = (edges[place - 1], counts[place - 1]) if place else (0.0, 0.0)
    return low + (edges[place] - low) * (rank - below) / (counts[place] - below)


def bucket_of(value: float, edges: Iterable[float]) -> tuple[float, float]:
    """The two edges that a value lies between."""
    known = [0.0, *sorted(edges), math.inf]
    return next((low, high) for low, high in pairwise(known) if value <= high)
