"""Means and quantiles of latencies, from histograms that only ever grow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from operator import add

from baton.domain.demand import EDGES_S, NO_LATENCIES, LatencyTotals

_NO_BUCKETS = (0,) * (len(EDGES_S) + 1)


def between(pairs: Iterable[tuple[LatencyTotals, LatencyTotals]]) -> LatencyTotals:
    """What was added between the first and the second of each pair, all together."""
    total = NO_LATENCIES._replace(buckets=_NO_BUCKETS)
    for before, now in pairs:
        if not now.buckets:
            continue
        pairs_of = zip(_by_our_edges(before.buckets), _by_our_edges(now.buckets), strict=True)
        more = tuple(max(0, b - a) for a, b in pairs_of)
        total = LatencyTotals(
            total.requests + max(0, now.requests - before.requests),
            total.sum_s + max(0.0, now.sum_s - before.sum_s),
            tuple(map(add, total.buckets, more)),
        )
    return total


def mean_s(of: LatencyTotals) -> float | None:
    """Their mean; None of none."""
    return of.sum_s / of.requests if of.requests else None


def quantile_s(of: LatencyTotals, q: float) -> float | None:
    """About the q-quantile, within the quarter that a bucket spans; None of none."""
    total = sum(of.buckets)
    if not total:
        return None
    wanted, seen = q * total, 0
    edges = (0.0, *EDGES_S, EDGES_S[-1])
    for (low_s, high_s), count in zip(pairwise(edges), of.buckets, strict=True):
        if count and seen + count >= wanted:
            return low_s + (high_s - low_s) * (wanted - seen) / count
        seen += count
    return EDGES_S[-1]


def _by_our_edges(buckets: tuple[int, ...]) -> tuple[int, ...]:
    """The same counts, where another version of baton knows more edges than this one, or fewer."""
    known = len(_NO_BUCKETS)
    if len(buckets) > known:
        return (*buckets[: known - 1], sum(buckets[known - 1 :]))
    return buckets + _NO_BUCKETS[len(buckets) :]
