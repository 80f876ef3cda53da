"""What has been measured of one link: setup and bandwidth by what the target's engine counts."""

from __future__ import annotations

from collections import deque

from baton.domain.fleet import LinkTotals
from baton.perf.least_squares import Coefficient, FitSettings, LeastSquares

_SETUP_BOUNDS_S = (1e-6, 5.0)
_BYTE_BOUNDS_S = (1e-13, 1e-5)
"""From 10 TB/s to 100 kB/s."""
_FIT = FitSettings(memory_rows=64.0, memory_s=30.0)
_KEPT_PULLS = 128


def link_fit(*, setup_s: float, s_per_byte: float) -> LeastSquares:
    """A model of pulls (how many, how many bytes) that starts from these coefficients."""
    return LeastSquares(
        (Coefficient(setup_s, *_SETUP_BOUNDS_S), Coefficient(s_per_byte, *_BYTE_BOUNDS_S)), _FIT
    )


class LinkMeter:
    """One link's fit; `common` is the fit of all links together, for as long as it has none."""

    __slots__ = ("_common", "_fit", "_pull_s", "_seed_s", "_shares", "_shares_noted", "totals")

    def __init__(self, common: LeastSquares, source_id: str) -> None:
        self._common = common
        self._fit: LeastSquares | None = None
        self._seed_s: float | None = None
        self._pull_s: deque[float] | None = None
        self._shares = 0.0
        self._shares_noted = 0
        self.totals = LinkTotals(source_id)
        """The last report."""

    def coefficients(self) -> tuple[float, ...]:
        """`setup_s` and seconds per byte."""
        if self._fit is not None:
            return self._fit.coefficients
        if self._seed_s is not None:
            return self._seed_s, self._common.coefficients[1]
        return self._common.coefficients

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
            self._pull_s = deque(maxlen=_KEPT_PULLS)
        if self._fit.observe(row, busy_s, now_s) and self._pull_s is not None:
            self._common.observe(row, busy_s, now_s)
            self._pull_s.append(busy_s / row[0])
