"""What no configuration can beat: objectives against data sheets and bare, unqueued engines."""

from __future__ import annotations

from collections.abc import Sequence

from baton.perf.hardware.accelerators import DTYPE_BYTES
from baton.planner.problem import PlanningProblem, SloClass, class_of
from baton.planner.rates.closed_form import MeanRequest, decode_s, prefill_s
from baton.planner.result import UnreachableObjective
from baton.planner.shapes.space import EngineShape
from baton.simulator.outcome import quantile
from baton.simulator.workloads.statistics import reused_tokens
from baton.simulator.workloads.trace import Trace, TraceRequest


def mean_mix(trace: Trace) -> MeanRequest:
    """The mean request of a trace; what prompts share counts as cached, as if for ever."""
    return _mean_request(list(zip(trace.requests, reused_tokens(trace), strict=True)))


def _mean_request(requests: Sequence[tuple[TraceRequest, int]]) -> MeanRequest:
    """The mean of requests, each with how many tokens of its prompt are cached."""
    count = len(requests)
    return MeanRequest(
        prompt_tokens=sum(request.prompt_tokens for request, _ in requests) / count,
        output_tokens=max(1.0, sum(request.output_tokens for request, _ in requests) / count),
        cached_tokens=sum(cached for _, cached in requests) / count,
    )


def unreachable_objectives(
    question: PlanningProblem, prefills: Sequence[EngineShape], decodes: Sequence[EngineShape]
) -> tuple[UnreachableObjective, ...]:
    """The objectives that even the fastest shape misses, with nothing else to do.

    Each class is held to its own requests; one without any bounds nothing.
    """
    traffic = question.traffic
    requests = list(zip(traffic.requests, reused_tokens(traffic), strict=True))
    bounds: list[UnreachableObjective | None] = []
    for class_ in question.classes:
        class_requests = [
            pair for pair in requests if class_of(pair[0], question.classes) is class_
        ]
        if not class_requests:
            continue
        computed_tokens = [
            max(1, request.prompt_tokens - cached) for request, cached in class_requests
        ]
        bounds += [
            _ttft_bound(
                question, class_, round(quantile(computed_tokens, class_.attainment)), prefills
            ),
            _tpot_bound(question, class_, _mean_request(class_requests), decodes),
        ]
    return tuple(bound for bound in bounds if bound is not None)


def _ttft_bound(
    question: PlanningProblem, slo_class: SloClass, tokens: int, shapes: Sequence[EngineShape]
) -> UnreachableObjective | None:
    """The prompt that is longer than the share of prompts that must be in time."""
    limit_s = slo_class.objectives.ttft_s
    if limit_s is None or not shapes:
        return None
    prefill_s_by_shape = {
        shape.key: prefill_s(shape.settings.timing, tokens, budget_tokens=shape.chunk_tokens)
        for shape in shapes
    }
    best = min(shapes, key=lambda shape: prefill_s_by_shape[shape.key])
    if prefill_s_by_shape[best.key] <= limit_s:
        return None
    operations = 2.0 * question.model.active_parameters * tokens
    flops_per_s = best.tp * best.accelerator.flops_of(question.weights_dtype)
    return UnreachableObjective(
        objective="time to first token",
        limit_s=limit_s,
        physical_s=operations / flops_per_s,
        modelled_s=prefill_s_by_shape[best.key],
        shape=best.label,
        operation=f"computing a prompt of {tokens} tokens (a share of {slo_class.attainment:g}"
        " has fewer)",
    )


def _tpot_bound(
    question: PlanningProblem, slo_class: SloClass, mix: MeanRequest, shapes: Sequence[EngineShape]
) -> UnreachableObjective | None:
    limit_s = slo_class.objectives.tpot_s
    if limit_s is None or not shapes:
        return None
    step_s_by_shape = {
        shape.key: decode_s(shape.settings.timing, 1, mix.context_tokens) for shape in shapes
    }
    best = min(shapes, key=lambda shape: step_s_by_shape[shape.key])
    if step_s_by_shape[best.key] <= limit_s:
        return None
    read_bytes = question.model.touched_parameters(1) * DTYPE_BYTES[question.weights_dtype]
    return UnreachableObjective(
        objective="time per token",
        limit_s=limit_s,
        physical_s=read_bytes / (best.tp * best.accelerator.memory_bytes_per_s),
        modelled_s=step_s_by_shape[best.key],
        shape=best.label,
        operation="reading the weights once for a step of a single stream",
    )
