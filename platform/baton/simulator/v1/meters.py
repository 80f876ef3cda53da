"""What a counted engine counts of its steps, several at a time; pulls are counted as elsewhere."""

from __future__ import annotations

from baton.domain.fleet import StepTotals
from baton.simulator.engine.meters import STEP_AVERAGE_WEIGHT
from baton.simulator.v1.step_run import Stretch

_KEPT = 1 - STEP_AVERAGE_WEIGHT
_Totals = tuple[int, float, int, int, int, int, int]
"""`StepTotals` without names: added to more often than anybody asks."""


class StepMeter:
    """Steps since the engine was made, and the average of the last ones' seconds."""

    __slots__ = ("_step_s", "_totals")

    def __init__(self) -> None:
        self._step_s = 0.0
        self._totals: _Totals = StepTotals()

    def stepped(self, stretch: Stretch, steps: int) -> None:
        """The first `steps` steps of a stretch are done."""
        self._step_s = self.step_s(stretch, steps)
        self._totals = _with_more(self._totals, stretch, steps)

    def totals(self, stretch: Stretch | None = None, steps: int = 0) -> StepTotals:
        """All steps so far, and the first `steps` of the one under way."""
        if stretch is None or not steps:
            return StepTotals(*self._totals)
        return StepTotals(*_with_more(self._totals, stretch, steps))

    def step_s(self, stretch: Stretch | None = None, steps: int = 0) -> float:
        """The moving average of a step's seconds, counted likewise.

        Each step gets the weight w and leaves 1 - w to those before it; over a stretch this is a
        geometric series and the derivative of one.
        """
        if stretch is None or not steps:
            return self._step_s
        last_s = stretch.first_s + (steps - 1) * stretch.slope_s
        if not self._totals[0]:  # nothing to be averaged with; the first is a step of its own
            return last_s
        if steps == 1:
            return _KEPT * self._step_s + (1 - _KEPT) * last_s
        # What the last `steps` steps add is the sum of w (1-w)^j (last_s - j slope_s), in which the
        # sum of j q^j for j < n is q (1 - n q^(n-1) + (n-1) q^n) / (1-q)^2
        kept = _KEPT**steps
        lags = _KEPT * (1 - steps * _KEPT ** (steps - 1) + (steps - 1) * kept) / STEP_AVERAGE_WEIGHT
        return kept * self._step_s + ((1 - kept) * last_s - lags * stretch.slope_s)


def _with_more(before: _Totals, stretch: Stretch, steps: int) -> _Totals:
    done, busy_s, prefilled, decoded, context, prefill_steps, decode_steps = before
    prefill_tokens, decodes = stretch.prefill_tokens, stretch.decode_requests
    return (
        done + steps,
        busy_s + stretch.seconds(steps),
        prefilled + steps * prefill_tokens,
        decoded + steps * decodes,
        context + stretch.context_of(steps),
        prefill_steps + (steps if prefill_tokens else 0),
        decode_steps + (steps if decodes else 0),
    )
