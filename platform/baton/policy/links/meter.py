"""What has been measured of one link: setup and bandwidth by what the target's engine counts.

Theory of operation. Least squares tell setup from bandwidth, but believe little of what is far off,
for one stalled pull must not move them; a link that has become a hundred times slower would be used
for dozens of pulls more. So the fit is multiplied by a *slowness*: the median of what the last rows
took against what the fit makes of them. Each row weighs what the fit thinks it takes, so that the
small pulls of probes do not outvote those of prompts, but never more than all others together: one
stalled pull changes nothing. Rows weigh less as they age: placement avoids a slow link, and then
only probes can tell that it is well again. Where none comes, the slowness itself fades. As the fit
follows, it returns to one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.domain.fleet import LinkTotals
from baton.perf.fitting.least_squares import Coefficient, FitSettings, LeastSquares

_SETUP_BOUNDS_S = (1e-6, 5.0)
_BYTE_BOUNDS_S = (1e-13, 1e-5)
"""From 10 TB/s to 100 kB/s."""
_FIT = FitSettings(memory_rows=64.0, memory_s=30.0)
_KEPT_PULLS = 128
_SLOW = 2.0
_SLOWNESS_ROWS = 5
_ROW_HALF_LIFE_S = 5.0
_SLOWNESS_HALF_LIFE_S = 30.0
_ROUNDING = 1e-9


def link_fit(*, setup_s: float, s_per_byte: float) -> LeastSquares:
    """A model of pulls (how many, how many bytes) that starts from these coefficients."""
    return LeastSquares(
        (Coefficient(setup_s, *_SETUP_BOUNDS_S), Coefficient(s_per_byte, *_BYTE_BOUNDS_S)), _FIT
    )


class LinkMeter:
    """One link's fit; `common` is the fit of all links together, for as long as it has none."""

    __slots__ = (
        "_common",
        "_fit",
        "_pull_s",
        "_rows",
        "_seed_s",
        "_shares",
        "_shares_noted",
        "_slowness",
        "_slowness_at_s",
        "totals",
    )

    def __init__(self, common: LeastSquares, source_id: str) -> None:
        self._common = common
        self._fit: LeastSquares | None = None
        self._seed_s: float | None = None
        self._pull_s: deque[float] | None = None
        self._rows: deque[tuple[float, tuple[int, float], float]] | None = None
        self._slowness = 1.0
        self._slowness_at_s = 0.0
        self._shares = 0.0
        self._shares_noted = 0
        self.totals = LinkTotals(source_id)
        """The last report."""

    def coefficients(self, now_s: float) -> tuple[float, ...]:
        """`setup_s` and seconds per byte."""
        if self._fit is not None:
            slowness = self._slowness_now(now_s)
            return tuple([one * slowness for one in self._fit.coefficients])
        if self._seed_s is not None:
            return self._seed_s, self._common.coefficients[1]
        return self._common.coefficients

    def is_slow(self, now_s: float) -> bool:
        """Whether its last pulls took at least twice as long as pulls took before them."""
        return self._slowness_now(now_s) >= _SLOW

    def note_share(self, share: float) -> None:
        """A flow begins whose bytes and those of others beside it are `share` times its own.

        What the engine then counts for it took longer than alone; `take` puts that right.
        """
        self._shares += share
        self._shares_noted += 1

    def seed(self, took_s: float, moved_bytes: int) -> None:
        """A probe moved blocks; the least that any has taken is believed until pulls are counted.

        What a probe takes includes a step of the target, so it can only be too long.
        """
        low, high = _SETUP_BOUNDS_S
        setup_s = min(max(took_s - moved_bytes * self._common.coefficients[1], low), high)
        self._seed_s = setup_s if self._seed_s is None else min(setup_s, self._seed_s)

    def take(self, totals: LinkTotals, now_s: float) -> bool:
        """Learn from the target's next report; whether blocks came since and no pull failed.

        The first one is measured from the target's start. Totals that went back are those of an
        engine that started again: a new base.
        """
        base, self.totals = self.totals, totals
        pulls, busy_s = totals.pulls - base.pulls, totals.busy_s - base.busy_s
        moved_bytes = totals.moved_bytes - base.moved_bytes
        if pulls <= 0 or busy_s < 0:
            return False
        share = self._shares / self._shares_noted if self._shares_noted else 1.0
        self._shares, self._shares_noted = 0.0, 0
        if busy_s > 0:
            self._learn((pulls, moved_bytes * share), busy_s, now_s)
        return totals.failures <= base.failures

    def pull_s(self, fraction: float) -> float | None:
        """A quantile, by nearest rank, of the last reports' mean pull; None before the first."""
        if self._pull_s is None:
            return None
        ordered = sorted(self._pull_s)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

    def _learn(self, row: tuple[int, float], busy_s: float, now_s: float) -> None:
        if self._fit is None:
            setup_s, s_per_byte = self._common.coefficients
            self._fit = link_fit(setup_s=setup_s, s_per_byte=s_per_byte)
            self._pull_s, self._rows = deque(maxlen=_KEPT_PULLS), deque(maxlen=_SLOWNESS_ROWS)
        if self._fit.observe(row, busy_s, now_s) and self._pull_s is not None:
            self._common.observe(row, busy_s, now_s)
            self._pull_s.append(busy_s / row[0])
            self._see_slowness(row, busy_s, now_s)

    def _slowness_now(self, now_s: float) -> float:
        if self._slowness == 1.0:
            return 1.0
        faded: float = 0.5 ** (max(0.0, now_s - self._slowness_at_s) / _SLOWNESS_HALF_LIFE_S)
        return 1.0 + (self._slowness - 1.0) * faded

    def _see_slowness(self, row: tuple[int, float], busy_s: float, now_s: float) -> None:
        if self._fit is None or self._rows is None:
            return
        self._rows.append((now_s, row, busy_s))
        values, weights = [], []
        for at_s, features, took_s in self._rows:
            thought_s = self._fit.predict(features)
            values.append(took_s / thought_s)
            weights.append(thought_s * 0.5 ** (max(0.0, now_s - at_s) / _ROW_HALF_LIFE_S))
        self._slowness, self._slowness_at_s = _most_agreed(values, weights), now_s


def _most_agreed(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted median, where none outweighs all others together; 1.0 of a single one."""
    if len(values) == 1:
        return 1.0
    heaviest = max(weights)
    most = min(heaviest, sum(weights) - heaviest)
    capped = [min(weight, most) for weight in weights]
    left = sum(capped) / 2 * (1 - _ROUNDING)
    for value, weight in sorted(zip(values, capped, strict=True)):
        left -= weight
        if left <= 0:
            return value
    raise AssertionError("unreachable: all weights together are more than half of them")
