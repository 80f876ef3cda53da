"""What a step's legs are to its timing, and how many steps of decodes may be taken at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from baton.perf.step_timing import StepBatch, StepTiming
from baton.simulator.v1.runs import LegRun

_LINEARITY_TOLERANCE = 1e-4
"""By how much of its seconds the middle step may differ from the mean of the first and the last. An
arc that high encloses two thirds of it, so the error of the stretch stays below that."""


@dataclass(slots=True, kw_only=True)
class StepRun:
    """One step or several. `steps` may be cut down while they are under way.

    Theory of operation: with the same requests in each, step i takes `first_s + (i - 1) * slope_s`,
    since each decode attends to one token more than before and steps are near to linear in that. So
    times and totals are arithmetic series, and which step is under way at a moment solves a
    quadratic.
    """

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


def batch_of(runs: Sequence[LegRun], decodes: int = 0) -> StepBatch:
    """The sums over the legs of one step, of which the first `decodes` are known to decode.

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
    """A step of prompts, or of decodes among which some have just come; see `batch_of`."""
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
    """At most `max_steps` steps that decode for so many; the last may be under way at the end."""
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
    """Make it `steps` steps, or half as many until their seconds lie on a straight line."""
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
