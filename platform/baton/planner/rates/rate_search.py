"""The highest rate at which something still holds, by trying rates."""

from __future__ import annotations

from collections.abc import Callable

_STEP_FACTORS = 1.2, 1.2, 1.4, 2.0
"""How far the next try goes while everything holds, or nothing does."""
_MAX_STEPS = 12


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
    holds_at_guess = holds(guess)
    rate = guess
    for step in range(_MAX_STEPS):
        factor = _STEP_FACTORS[min(step, len(_STEP_FACTORS) - 1)]
        next_rate = rate * factor if holds_at_guess else rate / factor
        if holds(next_rate) != holds_at_guess:
            return (rate, next_rate) if holds_at_guess else (next_rate, rate)
        rate = next_rate
    return (rate, float("inf")) if holds_at_guess else (0.0, rate)
