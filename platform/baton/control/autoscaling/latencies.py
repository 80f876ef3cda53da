"""Means and quantiles of latencies, from histograms that only ever grow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from operator import add

from baton.domain.demand import LATENCY_BUCKET_BOUNDS_S, NO_LATENCIES, LatencyTotals

_NO_BUCKETS = (0,) * (len(LATENCY_BUCKET_BOUNDS_S) + 1)


def sum_deltas(pairs: Iterable[tuple[LatencyTotals, LatencyTotals]]) -> LatencyTotals:
    """What was added between the first and the second of each pair, all together."""
    total = NO_LATENCIES._replace(buckets=_NO_BUCKETS)
    for before, after in pairs:
        if not after.buckets:
            continue
        bucket_pairs = zip(_fit_buckets(before.buckets), _fit_buckets(after.buckets), strict=True)
        added = tuple(max(0, b - a) for a, b in bucket_pairs)
        total = LatencyTotals(
            total.requests + max(0, after.requests - before.requests),
            total.sum_s + max(0.0, after.sum_s - before.sum_s),
            tuple(map(add, total.buckets, added)),
        )
    return total


def mean_s(latencies: LatencyTotals) -> float | None:
    """Their mean; None of none."""
    return latencies.sum_s / latencies.requests if latencies.requests else None


def quantile_s(latencies: LatencyTotals, q: float) -> float | None:
    """About the q-quantile, within the quarter that a bucket spans; None of none."""
    total = sum(latencies.buckets)
    if not total:
        return None
    rank, cumulative = q * total, 0
    edges = (0.0, *LATENCY_BUCKET_BOUNDS_S, LATENCY_BUCKET_BOUNDS_S[-1])
    for (low_s, high_s), count in zip(pairwise(edges), latencies.buckets, strict=True):
        if count and cumulative + count >= rank:
            return low_s + (high_s - low_s) * (rank - cumulative) / count
        cumulative += count
    return LATENCY_BUCKET_BOUNDS_S[-1]


def _fit_buckets(buckets: tuple[int, ...]) -> tuple[int, ...]:
    """The same counts, where another version of baton knows more edges than this one, or fewer."""
    bucket_count = len(_NO_BUCKETS)
    if len(buckets) > bucket_count:
        return (*buckets[: bucket_count - 1], sum(buckets[bucket_count - 1 :]))
    return buckets + _NO_BUCKETS[len(buckets) :]
