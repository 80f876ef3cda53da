"""Steps that follow each other without anything changing but the context of the decodes.

Theory of operation: with the same requests in each, step i takes `first_s + (i - 1) * slope_s`,
since each decode attends to one token more than before and steps are near to linear in that. So
times and totals are arithmetic series, and which step is under way at a moment solves a quadratic.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(slots=True, kw_only=True)
class StepRun:
    """One step or several. `steps` may be cut down while they are under way."""

    started_at_s: float
    steps: int
    first_step_s: float
    growth_per_step_s: float = 0.0
    prefill_tokens: int = 0
    decode_requests: int = 0
    context_tokens: int = 0
    """What the decodes attend to in the first step."""

    def seconds(self, steps: int) -> float:
        """How long the first `steps` steps take."""
        return steps * self.first_step_s + self.growth_per_step_s * (steps * (steps - 1) / 2)

    def total_context_tokens(self, steps: int) -> int:
        """`context_tokens`, added up over the first `steps` steps."""
        growth = self.decode_requests * (steps * (steps - 1) // 2)
        return steps * self.context_tokens + growth

    def steps_done_by(self, now_s: float) -> int:
        """How many steps have ended by then, the last one of the stretch not among them."""
        max_done = self.steps - 1
        if not max_done:
            return 0
        passed_s = now_s - self.started_at_s
        done = min(max(int(self._solve_steps(passed_s)), 0), max_done)
        seconds = self.seconds
        while done < max_done and seconds(done + 1) <= passed_s:
            done += 1
        while done and seconds(done) > passed_s:
            done -= 1
        return done

    def _solve_steps(self, passed_s: float) -> float:
        """The root of seconds(steps) = passed_s, but for rounding."""
        linear = self.first_step_s - self.growth_per_step_s / 2
        if not self.growth_per_step_s:
            return passed_s / linear
        discriminant = linear * linear + 2 * self.growth_per_step_s * passed_s
        return (sqrt(max(discriminant, 0.0)) - linear) / self.growth_per_step_s
