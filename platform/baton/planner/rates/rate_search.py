"""The highest rate at which something still holds, by trying rates."""

from __future__ import annotations

from collections.abc import Callable

_STEPS = 1.2, 1.2, 1.4, 2.0
"""How far the next try goes while everything holds, or nothing does."""
_MOST_STEPS = 12


def highest_rate(
    holds: Callable[[float], bool], guess: float, *, precision: float
) -> tuple[float, float]:
    """Two rates within `precision` of each other: it holds at the first, not at the second.

    (0, r) when it holds nowhere near: not at r, far below the guess; (r, infinity) when it holds
    everywhere that was tried, far above it.

    Raises:
        ValueError: the guess is not above 0.
    """
    if not guess > 0:
        raise ValueError(f"the guessed rate is {guess}, wanted more than 0")
    low, high = _bracket(holds, guess)
    while low > 0 and high < float("inf") and high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def _bracket(holds: Callable[[float], bool], guess: float) -> tuple[float, float]:
    upwards = holds(guess)
    here = guess
    for step in range(_MOST_STEPS):
        factor = _STEPS[min(step, len(_STEPS) - 1)]
        there = here * factor if upwards else here / factor
        if holds(there) != upwards:
            return (here, there) if upwards else (there, here)
        here = there
    return (here, float("inf")) if upwards else (0.0, here)
