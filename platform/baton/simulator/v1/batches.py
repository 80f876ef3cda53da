"""What a step's legs are to its timing, and how many steps of decodes may be taken at once."""

from __future__ import annotations

from collections.abc import Sequence

from baton.perf.step_timing import StepBatch, StepTiming
from baton.simulator.v1.runs import Run
from baton.simulator.v1.step_run import Stretch

_STRAIGHT = 1e-4
"""By how much of its seconds the middle step may differ from the mean of the first and the last. An
arc that high encloses two thirds of it, so the error of the stretch stays below that."""


def batch_of(work: Sequence[Run], decodes: int = 0) -> StepBatch:
    """The sums over the legs of one step, of which the first `decodes` are known to decode.

    One missing token is the last of a prompt or of an output: a decode either way.
    """
    chunk_tokens = chunks = before_tokens = finished = 0
    pairs = 0.0
    context = sum([run.tokens for run in work[:decodes]])
    for run in work[decodes:]:
        tokens, computed = run.scheduled, run.computed
        missing = run.tokens - computed
        if missing == 1:
            decodes += 1
            context += run.tokens
            continue
        chunks += 1
        chunk_tokens += tokens
        before_tokens += computed
        pairs += tokens * computed + tokens * (tokens + 1) / 2
        finished += tokens == missing
    return StepBatch(chunk_tokens, chunks, pairs, before_tokens, decodes, context, finished)


def one_step(work: Sequence[Run], timing: StepTiming, now_s: float, *, decodes: int = 0) -> Stretch:
    """A step of prompts, or of decodes among which some have just come; see `batch_of`."""
    batch = batch_of(work, decodes)
    return Stretch(
        started_at_s=now_s,
        steps=1,
        first_s=timing.step_s(batch),
        prefill_tokens=batch.prefill_tokens,
        decode_requests=batch.decode_requests,
        context_tokens=batch.decode_context_tokens,
    )


def decode_steps(
    decodes: int, context: int, timing: StepTiming, *, most: int, patience_s: float, now_s: float
) -> Stretch:
    """At most `most` steps that decode for so many, the last one under way when patience ends."""
    first_s = timing.step_s(StepBatch(0, 0, 0.0, 0, decodes, context))
    stretch = Stretch(
        started_at_s=now_s,
        steps=1,
        first_s=first_s,
        decode_requests=decodes,
        context_tokens=context,
    )
    if patience_s < most * first_s:  # steps only get longer
        most = int(max(0.0, patience_s) / first_s) + 1
    if most > 1:
        _lengthen(stretch, timing, most)
        if patience_s < stretch.seconds(stretch.steps):
            stretch.steps = stretch.done_by(now_s + patience_s) + 1
    return stretch


def _lengthen(stretch: Stretch, timing: StepTiming, steps: int) -> None:
    """Make it `steps` steps, or half as many until their seconds lie on a straight line."""
    decodes, context, first_s = stretch.decode_requests, stretch.context_tokens, stretch.first_s
    step_s = timing.step_s
    last_s = step_s(StepBatch(0, 0, 0.0, 0, decodes, context + (steps - 1) * decodes))
    while steps > 2:  # noqa: PLR2004 - two points always lie on a line
        middle = (steps - 1) // 2
        middle_s = step_s(StepBatch(0, 0, 0.0, 0, decodes, context + middle * decodes))
        line_s = first_s + (last_s - first_s) * middle / (steps - 1)
        if abs(middle_s - line_s) <= _STRAIGHT * middle_s:
            break
        steps, last_s = middle + 1, middle_s
    stretch.steps = steps
    stretch.slope_s = (last_s - first_s) / (steps - 1) if steps > 1 else 0.0
