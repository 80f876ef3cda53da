"""Measurements of one link: setup and bandwidth from the counts of the target's engine.

Theory of operation. Least squares tell setup from bandwidth, but discount outliers, for one stalled
pull must not move them. A link that has become a hundred times slower would be used for dozens of
pulls more. So the fit is multiplied by a *slowness*: the median ratio of the last rows to the fit.
Each row is weighted by its predicted time, so that the small pulls of probes do not outvote those
of prompts. No row outweighs all others together: one stalled pull changes nothing. Rows weigh less
as they age: placement avoids a slow link, and then only probes can tell that it is well again.
Without probes, the slowness itself fades. As the fit follows, it returns to one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.domain.fleet import LinkTotals
from baton.perf.fitting.least_squares import CoefficientPrior, FitSettings, LeastSquares

_SETUP_BOUNDS_S = (1e-6, 5.0)
_BYTE_BOUNDS_S = (1e-13, 1e-5)
"""From 10 TB/s to 100 kB/s."""
_FIT = FitSettings(memory_rows=64.0, memory_s=30.0)
_MAX_PULLS = 128
_SLOW_RATIO = 2.0
_SLOWNESS_ROWS = 5
_ROW_HALF_LIFE_S = 5.0
_SLOWNESS_HALF_LIFE_S = 30.0
_ROUNDING = 1e-9


def link_fit(*, setup_s: float, s_per_byte: float) -> LeastSquares:
    """A model of pulls (how many, how many bytes) that starts from these coefficients."""
    return LeastSquares(
        (
            CoefficientPrior(setup_s, *_SETUP_BOUNDS_S),
            CoefficientPrior(s_per_byte, *_BYTE_BOUNDS_S),
        ),
        _FIT,
    )


class LinkMeter:
    """One link's fit; `common_fit` is the fit of all links together, for as long as it has none."""

    __slots__ = (
        "_common_fit",
        "_contention_count",
        "_contention_sum",
        "_fit",
        "_probed_setup_s",
        "_pull_s",
        "_rows",
        "_slowness",
        "_slowness_at_s",
        "totals",
    )

    def __init__(self, common_fit: LeastSquares, source_id: str) -> None:
        self._common_fit = common_fit
        self._fit: LeastSquares | None = None
        self._probed_setup_s: float | None = None
        self._pull_s: deque[float] | None = None
        self._rows: deque[tuple[float, tuple[int, float], float]] | None = None
        self._slowness = 1.0
        self._slowness_at_s = 0.0
        self._contention_sum = 0.0
        self._contention_count = 0
        self.totals = LinkTotals(source_id)
        """The last report."""

    def coefficients(self, now_s: float) -> tuple[float, ...]:
        """`setup_s` and seconds per byte."""
        if self._fit is not None:
            slowness = self._current_slowness(now_s)
            return tuple([coefficient * slowness for coefficient in self._fit.coefficients])
        if self._probed_setup_s is not None:
            return self._probed_setup_s, self._common_fit.coefficients[1]
        return self._common_fit.coefficients

    def is_slow(self, now_s: float) -> bool:
        """Whether its last pulls took at least twice as long as pulls took before them."""
        return self._current_slowness(now_s) >= _SLOW_RATIO

    def record_contention(self, contention: float) -> None:
        """A flow begins whose bytes and those of others beside it are `contention` times its own.

        The engine's count for it took longer than alone; `ingest` corrects that.
        """
        self._contention_sum += contention
        self._contention_count += 1

    def seed_from_probe(self, elapsed_s: float, moved_bytes: int) -> None:
        """A probe moved blocks; the least that any has taken is believed until pulls are counted.

        The time of a probe includes a step of the target, so it can only be too long.
        """
        low, high = _SETUP_BOUNDS_S
        setup_s = min(max(elapsed_s - moved_bytes * self._common_fit.coefficients[1], low), high)
        self._probed_setup_s = (
            setup_s if self._probed_setup_s is None else min(setup_s, self._probed_setup_s)
        )

    def ingest(self, totals: LinkTotals, now_s: float) -> bool:
        """Learn from the target's next report; whether blocks came since and no pull failed.

        The first one is measured from the target's start. Totals that went back are those of an
        engine that started again: a new base.
        """
        base, self.totals = self.totals, totals
        pulls, busy_s = totals.pulls - base.pulls, totals.busy_s - base.busy_s
        moved_bytes = totals.moved_bytes - base.moved_bytes
        if pulls <= 0 or busy_s < 0:
            return False
        contention = (
            self._contention_sum / self._contention_count if self._contention_count else 1.0
        )
        self._contention_sum, self._contention_count = 0.0, 0
        if busy_s > 0:
            self._fit_row((pulls, moved_bytes * contention), busy_s, now_s)
        return totals.failures <= base.failures

    def pull_quantile_s(self, quantile: float) -> float | None:
        """A quantile, by nearest rank, of the last reports' mean pull; None before the first."""
        if self._pull_s is None:
            return None
        ordered = sorted(self._pull_s)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    def _fit_row(self, row: tuple[int, float], busy_s: float, now_s: float) -> None:
        if self._fit is None:
            setup_s, s_per_byte = self._common_fit.coefficients
            self._fit = link_fit(setup_s=setup_s, s_per_byte=s_per_byte)
            self._pull_s, self._rows = deque(maxlen=_MAX_PULLS), deque(maxlen=_SLOWNESS_ROWS)
        if self._fit.observe(row, busy_s, now_s) and self._pull_s is not None:
            self._common_fit.observe(row, busy_s, now_s)
            self._pull_s.append(busy_s / row[0])
            self._update_slowness(row, busy_s, now_s)

    def _current_slowness(self, now_s: float) -> float:
        if self._slowness == 1.0:
            return 1.0
        decay: float = 0.5 ** (max(0.0, now_s - self._slowness_at_s) / _SLOWNESS_HALF_LIFE_S)
        return 1.0 + (self._slowness - 1.0) * decay

    def _update_slowness(self, row: tuple[int, float], busy_s: float, now_s: float) -> None:
        if self._fit is None or self._rows is None:
            return
        self._rows.append((now_s, row, busy_s))
        values, weights = [], []
        for at_s, features, measured_s in self._rows:
            predicted_s = self._fit.predict(features)
            values.append(measured_s / predicted_s)
            weights.append(predicted_s * 0.5 ** (max(0.0, now_s - at_s) / _ROW_HALF_LIFE_S))
        self._slowness, self._slowness_at_s = _capped_weighted_median(values, weights), now_s


def _capped_weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted median, where none outweighs all others together; 1.0 of a single one."""
    if len(values) == 1:
        return 1.0
    heaviest = max(weights)
    cap = min(heaviest, sum(weights) - heaviest)
    capped = [min(weight, cap) for weight in weights]
    remaining = sum(capped) / 2 * (1 - _ROUNDING)
    for value, weight in sorted(zip(values, capped, strict=True)):
        remaining -= weight
        if remaining <= 0:
            return value
    raise AssertionError("unreachable: all weights together are more than half of them")
