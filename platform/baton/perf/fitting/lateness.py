"""How much later than predicted things come: a high quantile, learned from what came."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

_EDGES_S = (0.0, *(0.001 * 1.25**step for step in range(83)))
"""1 ms to 24.5 hours, each a quarter longer than the one before, and what was not late at all. The
longest timeout of a first token that can be configured is a day."""
_MEMORY = 1000
"""As many count in full; twice as many ago, half."""
_LEAST_SEEN = 50
"""Before so many, nothing is said: a quantile of a few is whatever the worst of them was."""


class Overruns:
    """A histogram that forgets by halves."""

    def __init__(self) -> None:
        self._counts = [0.0] * (len(_EDGES_S) + 1)
        self._seen = 0
        self._known_s: dict[float, float] = {}

    def observe(self, late_s: float) -> None:
        """Something came so much later than predicted; negative: sooner."""
        if late_s != late_s:  # noqa: PLR0124 - not a number
            return
        self._counts[bisect_left(_EDGES_S, late_s)] += 1
        self._seen += 1
        if self._seen % _LEAST_SEEN == 0:
            self._known_s.clear()
        if self._seen % _MEMORY == 0:
            self._counts = [count / 2 for count in self._counts]

    @property
    def is_known(self) -> bool:
        """Whether enough were seen for a quantile to mean anything."""
        return self._seen >= _LEAST_SEEN

    def quantile_s(self, share: float) -> float:
        """What no more than 1 - `share` of them were later than; 0 while too few were seen."""
        if not self.is_known:
            return 0.0
        known = self._known_s.get(share)
        if known is None:
            wanted = share * sum(self._counts)
            sums = accumulate(self._counts)
            place = next((i for i, one in enumerate(sums) if one >= wanted), len(_EDGES_S) - 1)
            known = self._known_s[share] = _EDGES_S[min(place, len(_EDGES_S) - 1)]
        return known
