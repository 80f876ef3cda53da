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

_MIN_VALUES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceInterval:
    """A mean, and where it is with a confidence of 95 %."""

    mean: float
    low: float | None
    """None when there is one value only: nothing is known of how it varies."""
    high: float | None
    values: tuple[float, ...]


def confidence_interval(values: Sequence[float]) -> ConfidenceInterval:
    """The mean of independent runs' figures with Student's 95 % interval; nan for no values.

    Runs are taken to be independent and about normal. The requests of one run are not: they queue
    behind each other, so that an interval from within a run would be too narrow.
    """
    if not values:
        return ConfidenceInterval(mean=math.nan, low=None, high=None, values=())
    mean = fmean(values)
    if len(values) < _MIN_VALUES or not all(map(math.isfinite, values)):
        return ConfidenceInterval(mean=mean, low=None, high=None, values=tuple(values))
    degrees_of_freedom = len(values) - 1
    t = (
        _T_975[degrees_of_freedom - 1]
        if degrees_of_freedom <= len(_T_975)
        else _t_975(degrees_of_freedom)
    )
    half_width = t * stdev(values) / math.sqrt(len(values))
    return ConfidenceInterval(
        mean=mean, low=mean - half_width, high=mean + half_width, values=tuple(values)
    )


def _t_975(degrees_of_freedom: int) -> float:
    """Near enough for more than 30 degrees of freedom: within 0.001.

    Source: Abramowitz and Stegun 26.7.5, two terms, with the normal quantile 1.960.
    """
    return 1.960 + 2.372 / degrees_of_freedom + 2.823 / degrees_of_freedom**2
