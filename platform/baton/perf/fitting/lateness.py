"""A high quantile of delays beyond predictions, learned from recent events."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

_BUCKET_EDGES_S = (0.0, *(0.001 * 1.25**step for step in range(83)))
"""1 ms to 24.5 hours, each a quarter longer than the previous, and not late at all. The
configurable first-token timeout is at most a day."""
_HALVING_COUNT = 1000
"""Events after which the weights of earlier events halve."""
_MIN_COUNT = 50
"""Events before the first quantile; a quantile of a few is their maximum."""


class LatenessHistogram:
    """Histogram whose counts halve every `_HALVING_COUNT` events."""

    def __init__(self) -> None:
        self._counts = [0.0] * (len(_BUCKET_EDGES_S) + 1)
        self._count = 0
        self._quantile_cache_s: dict[float, float] = {}

    def observe(self, late_s: float) -> None:
        """Record seconds beyond the prediction; negative when the event came early."""
        if late_s != late_s:  # noqa: PLR0124 - not a number
            return
        self._counts[bisect_left(_BUCKET_EDGES_S, late_s)] += 1
        self._count += 1
        if self._count % _MIN_COUNT == 0:
            self._quantile_cache_s.clear()
        if self._count % _HALVING_COUNT == 0:
            self._counts = [count / 2 for count in self._counts]

    @property
    def is_known(self) -> bool:
        """Whether there are enough events for a quantile."""
        return self._count >= _MIN_COUNT

    def quantile_s(self, fraction: float) -> float:
        """Delay that at most 1 - `fraction` of events exceed; 0 before there are enough events."""
        if not self.is_known:
            return 0.0
        cached_s = self._quantile_cache_s.get(fraction)
        if cached_s is None:
            rank = fraction * sum(self._counts)
            sums = accumulate(self._counts)
            bucket = next(
                (i for i, value in enumerate(sums) if value >= rank), len(_BUCKET_EDGES_S) - 1
            )
            cached_s = self._quantile_cache_s[fraction] = _BUCKET_EDGES_S[
                min(bucket, len(_BUCKET_EDGES_S) - 1)
            ]
        return cached_s
