"""What a counted engine counts of its steps, several at a time; pulls are counted as elsewhere."""

from __future__ import annotations

from baton.domain.fleet import StepTotals
from baton.simulator.engine.meters import STEP_AVERAGE_WEIGHT
from baton.simulator.v1.batches import StepRun

_DECAY = 1 - STEP_AVERAGE_WEIGHT
_Totals = tuple[int, float, int, int, int, int, int]
"""`StepTotals` without names: added to more often than anybody asks."""


class StepMeter:
    """Steps since the engine was made, and the average of the last ones' seconds."""

    __slots__ = ("_step_s", "_totals")

    def __init__(self) -> None:
        self._step_s = 0.0
        self._totals: _Totals = StepTotals()

    def record_steps(self, step_run: StepRun, steps: int) -> None:
        """The first `steps` steps of a stretch are done."""
        self._step_s = self.step_s(step_run, steps)
        self._totals = _add_steps(self._totals, step_run, steps)

    def totals(self, step_run: StepRun | None = None, steps: int = 0) -> StepTotals:
        """All steps so far, and the first `steps` of the one under way."""
        if step_run is None or not steps:
            return StepTotals(*self._totals)
        return StepTotals(*_add_steps(self._totals, step_run, steps))

    def step_s(self, step_run: StepRun | None = None, steps: int = 0) -> float:
        """The moving average of a step's seconds, counted likewise.

        Each step gets the weight w and leaves 1 - w to those before it; over a stretch this is a
        geometric series and the derivative of one.
        """
        if step_run is None or not steps:
            return self._step_s
        last_s = step_run.first_step_s + (steps - 1) * step_run.growth_per_step_s
        if not self._totals[0]:  # nothing to be averaged with; the first is a step of its own
            return last_s
        if steps == 1:
            return _DECAY * self._step_s + (1 - _DECAY) * last_s
        # What the last `steps` steps add is the sum of w (1-w)^j (last_s - j slope_s), in which the
        # sum of j q^j for j < n is q (1 - n q^(n-1) + (n-1) q^n) / (1-q)^2
        decay = _DECAY**steps
        slope_weight = (
            _DECAY * (1 - steps * _DECAY ** (steps - 1) + (steps - 1) * decay) / STEP_AVERAGE_WEIGHT
        )
        return decay * self._step_s + (
            (1 - decay) * last_s - slope_weight * step_run.growth_per_step_s
        )


def _add_steps(totals: _Totals, step_run: StepRun, steps: int) -> _Totals:
    total_steps, busy_s, prefilled, decoded, context, prefill_steps, decode_steps = totals
    prefill_tokens, decodes = step_run.prefill_tokens, step_run.decode_requests
    return (
        total_steps + steps,
        busy_s + step_run.seconds(steps),
        prefilled + steps * prefill_tokens,
        decoded + steps * decodes,
        context + step_run.total_context_tokens(steps),
        prefill_steps + (steps if prefill_tokens else 0),
        decode_steps + (steps if decodes else 0),
    )
