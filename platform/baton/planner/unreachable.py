"""What no configuration can beat: objectives against data sheets and bare, unqueued engines."""

from __future__ import annotations

from collections.abc import Sequence

from baton.perf.hardware.accelerators import BYTES
from baton.planner.problem import Question, SloClass, class_of
from baton.planner.rates.closed_form import Mix, decode_s, prefill_s
from baton.planner.result import Bound
from baton.planner.shapes.space import Instance
from baton.simulator.outcome import quantile
from baton.simulator.workloads.statistics import reused_tokens
from baton.simulator.workloads.trace import Trace, TraceRequest


def mean_mix(trace: Trace) -> Mix:
    """The mean request of a trace; what prompts share counts as cached, as if for ever."""
    return _mean(list(zip(trace.requests, reused_tokens(trace), strict=True)))


def _mean(served: Sequence[tuple[TraceRequest, int]]) -> Mix:
    """The mean of requests, each with how many tokens of its prompt are cached."""
    count = len(served)
    return Mix(
        prompt_tokens=sum(one.prompt_tokens for one, _ in served) / count,
        output_tokens=max(1.0, sum(one.output_tokens for one, _ in served) / count),
        cached_tokens=sum(cached for _, cached in served) / count,
    )


def out_of_reach(
    question: Question, prefills: Sequence[Instance], decodes: Sequence[Instance]
) -> tuple[Bound, ...]:
    """The objectives that even the fastest shape misses, with nothing else to do.

    Each class is held to its own requests; one without any bounds nothing.
    """
    traffic = question.traffic
    served = list(zip(traffic.requests, reused_tokens(traffic), strict=True))
    found: list[Bound | None] = []
    for one in question.classes:
        mine = [pair for pair in served if class_of(pair[0], question.classes) is one]
        if not mine:
            continue
        computed = [max(1, request.prompt_tokens - cached) for request, cached in mine]
        found += [
            _first_token(question, one, round(quantile(computed, one.attainment)), prefills),
            _per_token(question, one, _mean(mine), decodes),
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
