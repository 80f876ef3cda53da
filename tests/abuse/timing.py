"""Whether one tenant can tell by an answer's time what another asked, and how sure that is."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

Send = Callable[[str], float]
"""Asks for one token of a prompt and returns the seconds until it was there."""

ALPHA, POWER = 0.05, 0.99
_Z = statistics.NormalDist()
_DETECTABLE_ERRORS = _Z.inv_cdf(1 - ALPHA / 2) + _Z.inv_cdf(POWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingComparison:
    """Pairs of times: of prompts that somebody else had asked before, and of new ones."""

    pairs: int
    cold_s: float
    """Mean time of a new prompt."""
    saved_s: float
    """By how much the mean of the others is shorter."""
    error_s: float
    """Standard error of that."""

    @property
    def low_s(self) -> float:
        """The lower end of its 95 % interval."""
        return self.saved_s - _Z.inv_cdf(1 - ALPHA / 2) * self.error_s

    @property
    def high_s(self) -> float:
        """The upper end."""
        return self.saved_s + _Z.inv_cdf(1 - ALPHA / 2) * self.error_s

    @property
    def saved_fraction(self) -> float:
        """What is surely saved, as a share of a new prompt's time."""
        return self.low_s / self.cold_s

    @property
    def detectable_s(self) -> float:
        """What would be found in 99 of 100 such runs, at a level of 5 %."""
        return _DETECTABLE_ERRORS * self.error_s


def compare(cold_s: Sequence[float], warm_s: Sequence[float]) -> TimingComparison:
    """Compare pairs, the least and the greatest twentieth of the differences left out.

    Trimmed, because on a machine with others on it some answers wait for a core.
    """
    differences = sorted(cold - warm for cold, warm in zip(cold_s, warm_s, strict=True))
    trimmed_count = len(differences) // 20
    trimmed = differences[trimmed_count : len(differences) - trimmed_count]
    # Source: Tukey and McLaughlin 1963: the error of a trimmed mean is that of the winsorized one.
    winsorized = [trimmed[0]] * trimmed_count + trimmed + [trimmed[-1]] * trimmed_count
    kept_fraction = len(trimmed) / len(differences)
    error_s = statistics.stdev(winsorized) / (kept_fraction * math.sqrt(len(differences)))
    return TimingComparison(
        pairs=len(differences),
        cold_s=statistics.fmean(cold_s),
        saved_s=statistics.fmean(trimmed),
        error_s=error_s,
    )


def probe(
    first: Send, second: Send, *, pairs: int, rng: Random, words: int = 400
) -> TimingComparison:
    """Let `first` ask prompts, and `second` the same ones and new ones, in random order."""
    cold_s: list[float] = []
    warm_s: list[float] = []
    for _ in range(pairs):
        known, new = _prompt(rng, words), _prompt(rng, words)
        first(known)
        order = [(known, warm_s), (new, cold_s)]
        rng.shuffle(order)
        for prompt, times in order:
            times.append(second(prompt))
    return compare(cold_s, warm_s)


def _prompt(rng: Random, words: int) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(words))


def time_call(ask: Callable[[str], object]) -> Send:
    """`ask` with the time that it takes."""

    def send(prompt: str) -> float:
        began_s = time.monotonic()
        ask(prompt)
        return time.monotonic() - began_s

    return send
