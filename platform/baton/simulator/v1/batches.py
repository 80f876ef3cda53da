"""The work of one step as its timing sees it, and stretches of decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from baton.domain.fleet import StepTotals
from baton.domain.value import MutableValue
from baton.perf.step_timing import StepBatch, StepTiming
from baton.simulator.engine.meters import STEP_AVERAGE_WEIGHT
from baton.simulator.v1.runs import LegRun

_LINEARITY_TOLERANCE = 1e-4
"""Largest deviation of the middle step from the mean of the first and the last, as a fraction of
its seconds. The error of the stretch stays below two thirds of it."""
_DECAY = 1 - STEP_AVERAGE_WEIGHT
_Totals = tuple[int, float, int, int, int, int, int]
"""`StepTotals` as a plain tuple: faster, since additions are far more frequent than reads."""


class StepRun(MutableValue, kw_only=True):
    """One step or several; `steps` may shrink while they are under way.

    Theory of operation: with the same requests in each, step i takes `first_step_s + (i - 1) *
    growth_per_step_s`, since each decode attends to one token more than before. Times and totals
    are arithmetic series, and the step under way at a moment solves a quadratic.
    """

    started_at_s: float
    steps: int
    first_step_s: float
    growth_per_step_s: float = 0.0
    prefill_tokens: int = 0
    decode_requests: int = 0
    context_tokens: int = 0
    """KV tokens that the decodes of the first step attend to."""

    def seconds(self, steps: int) -> float:
        """Duration of the first `steps` steps."""
        return steps * self.first_step_s + self.growth_per_step_s * (steps * (steps - 1) / 2)

    def total_context_tokens(self, steps: int) -> int:
        """Sum of the context tokens of the first `steps` steps."""
        growth = self.decode_requests * (steps * (steps - 1) // 2)
        return steps * self.context_tokens + growth

    def steps_done_by(self, now_s: float) -> int:
        """Number of steps that have ended at `now_s`; never counts the last of the stretch."""
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
        """The root of seconds(steps) = passed_s, except for rounding."""
        linear = self.first_step_s - self.growth_per_step_s / 2
        if not self.growth_per_step_s:
            return passed_s / linear
        discriminant = linear * linear + 2 * self.growth_per_step_s * passed_s
        return (sqrt(max(discriminant, 0.0)) - linear) / self.growth_per_step_s


def batch_of(runs: Sequence[LegRun], decodes: int = 0) -> StepBatch:
    """Sum the legs of one step; the first `decodes` legs are known to decode.

    One missing token is the last of a prompt or of an output: a decode either way.
    """
    chunk_tokens = chunks = before_tokens = finished = 0
    pairs = 0.0
    context = sum([run.known_tokens for run in runs[:decodes]])
    for run in runs[decodes:]:
        tokens, computed = run.scheduled_tokens, run.computed_tokens
        missing = run.known_tokens - computed
        if missing == 1:
            decodes += 1
            context += run.known_tokens
            continue
        chunks += 1
        chunk_tokens += tokens
        before_tokens += computed
        pairs += tokens * computed + tokens * (tokens + 1) / 2
        finished += tokens == missing
    return StepBatch(chunk_tokens, chunks, pairs, before_tokens, decodes, context, finished)


def one_step(
    runs: Sequence[LegRun], timing: StepTiming, now_s: float, *, decodes: int = 0
) -> StepRun:
    """A step with prompts, or of decodes among newly admitted legs; `decodes` as in `batch_of`."""
    batch = batch_of(runs, decodes)
    return StepRun(
        started_at_s=now_s,
        steps=1,
        first_step_s=timing.step_s(batch),
        prefill_tokens=batch.prefill_tokens,
        decode_requests=batch.decode_requests,
        context_tokens=batch.decode_context_tokens,
    )


def decode_steps(
    decodes: int,
    context: int,
    timing: StepTiming,
    *,
    max_steps: int,
    horizon_s: float,
    now_s: float,
) -> StepRun:
    """Up to `max_steps` pure decode steps; the last may be under way when `horizon_s` ends."""
    first_s = timing.step_s(StepBatch(0, 0, 0.0, 0, decodes, context))
    step_run = StepRun(
        started_at_s=now_s,
        steps=1,
        first_step_s=first_s,
        decode_requests=decodes,
        context_tokens=context,
    )
    if horizon_s < max_steps * first_s:  # steps only get longer
        max_steps = int(max(0.0, horizon_s) / first_s) + 1
    if max_steps > 1:
        _extend_while_linear(step_run, timing, max_steps)
        if horizon_s < step_run.seconds(step_run.steps):
            step_run.steps = step_run.steps_done_by(now_s + horizon_s) + 1
    return step_run


def _extend_while_linear(step_run: StepRun, timing: StepTiming, steps: int) -> None:
    """Set `step_run.steps` to `steps`, halved until the steps' durations are linear."""
    decodes, context, first_s = (
        step_run.decode_requests,
        step_run.context_tokens,
        step_run.first_step_s,
    )
    step_s = timing.step_s
    last_s = step_s(StepBatch(0, 0, 0.0, 0, decodes, context + (steps - 1) * decodes))
    while steps > 2:  # noqa: PLR2004 - two points always lie on a line
        middle = (steps - 1) // 2
        middle_s = step_s(StepBatch(0, 0, 0.0, 0, decodes, context + middle * decodes))
        line_s = first_s + (last_s - first_s) * middle / (steps - 1)
        if abs(middle_s - line_s) <= _LINEARITY_TOLERANCE * middle_s:
            break
        steps, last_s = middle + 1, middle_s
    step_run.steps = steps
    step_run.growth_per_step_s = (last_s - first_s) / (steps - 1) if steps > 1 else 0.0


class StepMeter:
    """Totals of all steps, and a moving average of their seconds."""

    __slots__ = ("_step_s", "_totals")

    def __init__(self) -> None:
        self._step_s = 0.0
        self._totals: _Totals = StepTotals()

    def record_steps(self, step_run: StepRun, steps: int) -> None:
        """Add the first `steps` steps of a stretch."""
        self._step_s = self.step_s(step_run, steps)
        self._totals = _add_steps(self._totals, step_run, steps)

    def totals(self, step_run: StepRun | None = None, steps: int = 0) -> StepTotals:
        """Totals of all steps, including the first `steps` of the stretch under way."""
        if step_run is None or not steps:
            return StepTotals(*self._totals)
        return StepTotals(*_add_steps(self._totals, step_run, steps))

    def step_s(self, step_run: StepRun | None = None, steps: int = 0) -> float:
        """The moving average of a step's seconds, over the same steps as `totals`.

        Each step has weight w and multiplies the weight of earlier steps by 1 - w; a stretch is a
        geometric series and the derivative of one.
        """
        if step_run is None or not steps:
            return self._step_s
        last_s = step_run.first_step_s + (steps - 1) * step_run.growth_per_step_s
        if not self._totals[0]:  # the first stretch is one step
            return last_s
        if steps == 1:
            return _DECAY * self._step_s + (1 - _DECAY) * last_s
        # The last `steps` steps add the sum of w (1-w)^j (last_s - j growth_s).
        # The sum of j q^j for j < n is q (1 - n q^(n-1) + (n-1) q^n) / (1-q)^2.
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
