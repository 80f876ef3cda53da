"""How far a mean of few runs may be from what many would give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom. Source: NIST/SEMATECH
e-Handbook of Statistical Methods, 1.3.6.7.2."""

_FEWEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean, and where it is with a confidence of 95 %."""

    mean: float
    low: float | None
    """None when there is one value only: nothing is known of how it varies."""
    high: float | None
    values: tuple[float, ...]


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent runs' figures with Student's 95 % interval; nan for no values.

    Runs are taken to be independent and about normal. The requests of one run are not: they queue
    behind each other, so that an interval from within a run would be too narrow.
    """
    if not values:
        return Interval(mean=math.nan, low=None, high=None, values=())
    mean = fmean(values)
    if len(values) < _FEWEST or not all(map(math.isfinite, values)):
        return Interval(mean=mean, low=None, high=None, values=tuple(values))
    freedom = len(values) - 1
    t = _T_975[freedom - 1] if freedom <= len(_T_975) else _t_975(freedom)
    half = t * stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, low=mean - half, high=mean + half, values=tuple(values))


def _t_975(freedom: int) -> float:
    """Near enough for more than 30 degrees of freedom: within 0.001.

    Source: Abramowitz and Stegun 26.7.5, two terms, with the normal quantile 1.960.
    """
    return 1.960 + 2.372 / freedom + 2.823 / freedom**2
