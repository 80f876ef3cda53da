"""What a step's legs are to its timing, and how many steps of decodes may be taken at once."""

from __future__ import annotations

from collections.abc import Sequence

from baton.perf.step_timing import StepBatch, StepTiming
from baton.simulator.v1.runs import LegRun
from baton.simulator.v1.step_run import StepRun

_LINEARITY_TOLERANCE = 1e-4
"""By how much of its seconds the middle step may differ from the mean of the first and the last. An
arc that high encloses two thirds of it, so the error of the stretch stays below that."""


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
