"""How much memory and how many descriptors processes take, over time, and whether that grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median

import psutil

_HOUR_S = 3600.0
_MAX_POINTS = 200
"""For slopes between all pairs; more samples are taken together."""


class ResourceGrowth:
    """Samples of processes by name."""

    def __init__(self, *, warm_up_s: float) -> None:
        self._warm_up_s = warm_up_s
        self._memory: dict[str, list[tuple[float, float]]] = {}
        self._descriptors: dict[str, list[tuple[float, float]]] = {}

    def sample(self, processes: Mapping[str, psutil.Process], at_s: float) -> None:
        """Look at all of them; those that have ended are left out."""
        for name, process in processes.items():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                self.add(name, at_s, process.memory_info().rss / 1e6, process.num_fds())

    def add(self, name: str, at_s: float, rss_mb: float, descriptors: float) -> None:
        """What one process took at one time."""
        self._memory.setdefault(name, []).append((at_s, rss_mb))
        self._descriptors.setdefault(name, []).append((at_s, descriptors))

    def mb_per_hour(self) -> dict[str, float]:
        """By how much the memory of each grew after the warm-up."""
        return {
            name: _HOUR_S * slope(self._after(samples)) for name, samples in self._memory.items()
        }

    def descriptor_growth(self) -> dict[str, float]:
        """How many more each had in the last quarter than in the first one after the warm-up.

        Compared are the fewest of each quarter: when few requests are under way, what is left are
        leaks. A quarter with more requests at once has more connections, and no leak.
        """
        return {name: self._quarters(of, min) for name, of in self._descriptors.items()}

    def usual_descriptors(self) -> dict[str, float]:
        """The same, of the median of each quarter: connections of requests among them."""
        return {name: self._quarters(of, median) for name, of in self._descriptors.items()}

    def _quarters(
        self, samples: Sequence[tuple[float, float]], of: Callable[[Sequence[float]], float]
    ) -> float:
        counts = [count for _, count in self._after(samples)]
        quarter = max(1, len(counts) // 4)
        return of(counts[-quarter:]) - of(counts[:quarter])

    def last_mb(self, name: str) -> float:
        """What it took last."""
        return self._memory[name][-1][1]

    def _after(self, samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """After the warm-up; of a process that came later or ended before, all there is."""
        later = [sample for sample in samples if sample[0] >= self._warm_up_s]
        return later or list(samples)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope between all pairs of points (Theil and Sen): one outlier moves it little."""
    if len(points) > _MAX_POINTS:
        step = len(points) / _MAX_POINTS
        points = [points[int(number * step)] for number in range(_MAX_POINTS)]
    slopes = [
        (later[1] - value[1]) / (later[0] - value[0])
        for number, value in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > value[0]
    ]
    return median(slopes) if slopes else 0.0
