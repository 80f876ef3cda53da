"""What plots draw, as plain numbers: distributions, bins of time, axes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from baton.simulator.outcome import Objectives, Outcome

_MAX_POINTS = 500
"""More are not to be told apart in a plot."""
_MAX_BINS = 60
_MIN_REQUESTS_PER_BIN = 20


@dataclass(frozen=True, slots=True)
class ArrivalBins:
    """Requests by when they arrived, in equal stretches of time from the first arrival on."""

    width_s: float
    arrivals_per_s: tuple[float, ...]
    attainment: tuple[float, ...]
    """The share that met the objectives; 1 where none arrived."""

    @property
    def edges_s(self) -> tuple[float, ...]:
        """The beginning of each, and the end of the last."""
        return tuple(number * self.width_s for number in range(len(self.attainment) + 1))


def cumulative_distribution(values: Sequence[float], total: int) -> tuple[list[float], list[float]]:
    """Values in order, and the share of all `total` requests that is at or below each.

    Infinite values are left out and still counted, so that the curve then ends below 1.
    """
    ordered = sorted(value for value in values if value < float("inf"))
    if not ordered:
        return [], []
    last = len(ordered) - 1
    all_indices = range(len(ordered))
    if len(ordered) > _MAX_POINTS:
        indices = [round(step * last / (_MAX_POINTS - 1)) for step in range(_MAX_POINTS)]
    else:
        indices = list(all_indices)
    return [ordered[at] for at in indices], [(at + 1) / total for at in indices]


def bin_by_arrival(outcomes: Sequence[Outcome], objectives: Objectives) -> ArrivalBins:
    """How many arrived when, and how many of those met the objectives."""
    if not outcomes:
        return ArrivalBins(1.0, (), ())
    start_s = min(outcome.arrived_at_s for outcome in outcomes)
    span_s = max(outcome.arrived_at_s for outcome in outcomes) - start_s
    count = max(1, min(_MAX_BINS, len(outcomes) // _MIN_REQUESTS_PER_BIN))
    width_s = span_s / count or 1.0
    arrived, met = [0] * count, [0] * count
    for outcome in outcomes:
        index = min(count - 1, int((outcome.arrived_at_s - start_s) / width_s))
        arrived[index] += 1
        met[index] += objectives.are_met(outcome)
    shares = [good / many if many else 1.0 for good, many in zip(met, arrived, strict=True)]
    return ArrivalBins(width_s, tuple(many / width_s for many in arrived), tuple(shares))


def count_in_flight(outcomes: Sequence[Outcome], times_s: Sequence[float]) -> list[int]:
    """Requests that had arrived and not ended at each time, counted from the first arrival.

    Those that never end count until they were given up, if that is known, else not at all.
    """
    if not outcomes:
        return [0 for _ in times_s]
    start_s = min(outcome.arrived_at_s for outcome in outcomes)
    ended = [outcome for outcome in outcomes if outcome.e2e_s < float("inf")]
    arrivals = sorted(outcome.arrived_at_s - start_s for outcome in ended)
    ends = sorted(outcome.arrived_at_s - start_s + outcome.e2e_s for outcome in ended)
    return [bisect_right(arrivals, at_s) - bisect_right(ends, at_s) for at_s in times_s]
