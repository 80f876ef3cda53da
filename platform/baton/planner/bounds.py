"""What no configuration can beat: objectives against data sheets and bare, unqueued engines."""

from __future__ import annotations

from collections.abc import Sequence

from baton.perf.hardware import BYTES
from baton.planner.answer import Bound
from baton.planner.question import Question, SloClass
from baton.planner.rates import Mix, decode_s, prefill_s
from baton.planner.space import Instance
from baton.simulator.outcome import quantile
from baton.simulator.workloads.statistics import reused_tokens
from baton.simulator.workloads.trace import Trace


def mean_mix(trace: Trace) -> Mix:
    """The mean request of a trace; what prompts share counts as cached, as if for ever."""
    requests, count = trace.requests, len(trace)
    return Mix(
        prompt_tokens=sum(one.prompt_tokens for one in requests) / count,
        output_tokens=max(1.0, sum(one.output_tokens for one in requests) / count),
        cached_tokens=sum(reused_tokens(trace)) / count,
    )


def out_of_reach(
    question: Question, mix: Mix, prefills: Sequence[Instance], decodes: Sequence[Instance]
) -> tuple[Bound, ...]:
    """The objectives that even the fastest shape misses, with nothing else to do."""
    reused = reused_tokens(question.traffic)
    found: list[Bound | None] = []
    for one in question.classes:
        mine = [
            max(1, request.prompt_tokens - cached)
            for request, cached in zip(question.traffic.requests, reused, strict=True)
        ]
        tokens = round(quantile(mine, one.attainment))
        found += [
            _first_token(question, one, tokens, prefills),
            _per_token(question, one, mix, decodes),
        ]
    return tuple(bound for bound in found if bound is not None)


def _first_token(
    question: Question, one: SloClass, tokens: int, shapes: Sequence[Instance]
) -> Bound | None:
    """The prompt that is longer than the share of prompts that must be in time."""
    limit_s = one.objectives.ttft_s
    if limit_s is None or not shapes:
        return None
    took = {
        shape.key: prefill_s(shape.settings.timing, tokens, budget_tokens=shape.chunk_tokens)
        for shape in shapes
    }
    best = min(shapes, key=lambda shape: took[shape.key])
    if took[best.key] <= limit_s:
        return None
    operations = 2.0 * question.model.active_parameters * tokens
    speed = best.tp * best.accelerator.flops_of(question.weights)
    return Bound(
        term="time to first token",
        limit_s=limit_s,
        physical_s=operations / speed,
        modelled_s=took[best.key],
        shape=best.label,
        what=f"computing a prompt of {tokens} tokens (a share of {one.attainment:g} has fewer)",
    )


def _per_token(
    question: Question, one: SloClass, mix: Mix, shapes: Sequence[Instance]
) -> Bound | None:
    limit_s = one.objectives.tpot_s
    if limit_s is None or not shapes:
        return None
    took = {shape.key: decode_s(shape.settings.timing, 1, mix.context_tokens) for shape in shapes}
    best = min(shapes, key=lambda shape: took[shape.key])
    if took[best.key] <= limit_s:
        return None
    read = question.model.touched_parameters(1) * BYTES[question.weights]
    return Bound(
        term="time per token",
        limit_s=limit_s,
        physical_s=read / (best.tp * best.accelerator.memory_bytes_per_s),
        modelled_s=took[best.key],
        shape=best.label,
        what="reading the weights once for a step of a single stream",
    )
