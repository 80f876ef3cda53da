"""What plots draw, as plain numbers: distributions, bins of time, axes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from baton.simulator.outcome import Objectives, Outcome

_POINTS = 500
"""More are not to be told apart in a plot."""
_BINS = 60
_REQUESTS_PER_BIN = 20


@dataclass(frozen=True, slots=True)
class Bins:
    """Requests by when they arrived, in equal stretches of time from the first arrival on."""

    width_s: float
    arrivals_per_s: tuple[float, ...]
    met: tuple[float, ...]
    """The share that met the objectives; 1 where none arrived."""

    @property
    def edges_s(self) -> tuple[float, ...]:
        """The beginning of each, and the end of the last."""
        return tuple(number * self.width_s for number in range(len(self.met) + 1))


def cumulated(values: Sequence[float], of: int) -> tuple[list[float], list[float]]:
    """Values in order, and the share of all `of` requests that is at or below each.

    Infinite values are left out and still counted, so that the curve then ends below 1.
    """
    ordered = sorted(one for one in values if one < float("inf"))
    if not ordered:
        return [], []
    last = len(ordered) - 1
    wanted = range(len(ordered))
    if len(ordered) > _POINTS:
        wanted_at = [round(step * last / (_POINTS - 1)) for step in range(_POINTS)]
    else:
        wanted_at = list(wanted)
    return [ordered[at] for at in wanted_at], [(at + 1) / of for at in wanted_at]


def in_bins(outcomes: Sequence[Outcome], objectives: Objectives) -> Bins:
    """How many arrived when, and how many of those met the objectives."""
    if not outcomes:
        return Bins(1.0, (), ())
    start_s = min(one.arrived_at_s for one in outcomes)
    span_s = max(one.arrived_at_s for one in outcomes) - start_s
    count = max(1, min(_BINS, len(outcomes) // _REQUESTS_PER_BIN))
    width_s = span_s / count or 1.0
    arrived, met = [0] * count, [0] * count
    for one in outcomes:
        at = min(count - 1, int((one.arrived_at_s - start_s) / width_s))
        arrived[at] += 1
        met[at] += objectives.met(one)
    shares = [good / many if many else 1.0 for good, many in zip(met, arrived, strict=True)]
    return Bins(width_s, tuple(many / width_s for many in arrived), tuple(shares))


def in_flight(outcomes: Sequence[Outcome], times_s: Sequence[float]) -> list[int]:
    """Requests that had arrived and not ended at each time, counted from the first arrival.

    Those that never end count until they were given up, if that is known, else not at all.
    """
    if not outcomes:
        return [0 for _ in times_s]
    start_s = min(one.arrived_at_s for one in outcomes)
    counted = [one for one in outcomes if one.e2e_s < float("inf")]
    arrivals = sorted(one.arrived_at_s - start_s for one in counted)
    ends = sorted(one.arrived_at_s - start_s + one.e2e_s for one in counted)
    return [bisect_right(arrivals, at_s) - bisect_right(ends, at_s) for at_s in times_s]
