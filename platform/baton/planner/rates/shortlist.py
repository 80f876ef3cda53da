"""Shapes worth simulating: their closed-form rates are near the best of their duty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from baton.planner.problem import DEFAULT_OBJECTIVES, PlanningProblem
from baton.planner.rates.arrivals import TrafficSampler
from baton.planner.rates.closed_form import (
    MeanRequest,
    ServiceTime,
    decode_rate,
    decode_s,
    max_batch,
    max_concurrent_requests,
    mixed_rate,
    prefill_s,
    steady_rate,
)
from baton.planner.rates.measure import InstanceTask
from baton.planner.rates.trials import DutyRequirement, steady_tpot_s
from baton.planner.shapes.space import Duty, EngineShape, ShapeCatalogue, Split
from baton.simulator.workloads.statistics import reused_tokens

_MIN_RATE_FRACTION = 0.7
"""Of the best closed-form rate for its cost: shapes below are not simulated."""
_SAMPLE_SIZE = 64
_ACHIEVABLE_FRACTION = 0.95
"""Of the best decode rate, where a search begins."""


class RateEstimates:
    """Estimated rates of shapes, before simulations."""

    def __init__(self, question: PlanningProblem, mix: MeanRequest) -> None:
        self._question = question
        self._mix = mix
        objectives = question.objectives
        self.ttft_s = objectives.ttft_s or DEFAULT_OBJECTIVES.ttft_s or 0.0
        self.tpot_s = objectives.tpot_s or DEFAULT_OBJECTIVES.tpot_s
        self._attainment = max(class_.attainment for class_ in question.classes)
        pairs = zip(question.traffic.requests, reused_tokens(question.traffic), strict=True)
        lengths = sorted(max(1, request.prompt_tokens - reused) for request, reused in pairs)
        stride = max(1, len(lengths) // _SAMPLE_SIZE)
        self._lengths = lengths[stride // 2 :: stride]

    def rate(self, engine_shape: EngineShape, duty: Duty) -> float:
        """Requests per second; 0 if it cannot be fast enough."""
        match duty:
            case Duty.PREFILL:
                remaining_s = self.ttft_s - self.elsewhere_s(engine_shape, duty)
                return self._prompt_rate(engine_shape, duty, remaining_s)
            case Duty.DECODE:
                return _ACHIEVABLE_FRACTION * decode_rate(
                    engine_shape.settings, self._mix, self.tpot_s
                )
            case Duty.BOTH:
                step_limited_rate = _ACHIEVABLE_FRACTION * mixed_rate(
                    engine_shape.settings, self._mix, self.tpot_s
                )
                return min(step_limited_rate, self._prompt_rate(engine_shape, duty, self.ttft_s))

    def steady_rate(self, engine_shape: EngineShape, duty: Duty) -> float:
        """Requests per second above which streams are too many; infinite without them."""
        if duty is Duty.PREFILL:
            return inf
        tpot_s = steady_tpot_s(self._question.classes)
        return steady_rate(engine_shape.settings, self._mix, tpot_s)

    def elsewhere_s(self, engine_shape: EngineShape, duty: Duty) -> float:
        """The part of the time to first token that other replicas use.

        For prefill: the handoff and the decode replica's first step. For decode, which only needs
        time to enter the batch: half of it.
        """
        if duty is not Duty.PREFILL:
            return self.ttft_s / 2 if duty is Duty.DECODE else 0.0
        settings, mix = engine_shape.settings, self._mix
        token_bytes = settings.kv_block_bytes / settings.block_size_tokens
        transfer_s = mix.prompt_tokens * token_bytes / settings.transfer_bytes_per_s
        return (
            settings.transfer_setup_s
            + transfer_s
            + decode_s(settings.timing, 1, mix.context_tokens)
        )

    def residence_s(self, engine_shape: EngineShape, duty: Duty) -> float:
        """Approximate time that a request spends on the replica."""
        if duty is Duty.PREFILL:
            return self.ttft_s
        settings = engine_shape.settings
        batch = max_batch(
            settings.timing,
            context_tokens=self._mix.context_tokens,
            tpot_s=self.tpot_s,
            limit=max_concurrent_requests(settings, self._mix),
        )
        step_s = decode_s(settings.timing, max(1, batch), self._mix.context_tokens)
        return self._mix.output_tokens * step_s + (self.ttft_s if duty is Duty.BOTH else 0.0)

    def _prompt_rate(self, engine_shape: EngineShape, duty: Duty, ttft_budget_s: float) -> float:
        settings, ranks = engine_shape.settings, engine_shape.dp
        service = ServiceTime.from_times(
            [
                prefill_s(
                    settings.timing,
                    tokens,
                    budget_tokens=settings.prompt_chunk_tokens,
                    prompts=ranks,
                )
                for tokens in self._lengths
            ]
        )
        required_fraction = DutyRequirement(duty=duty).required_attainment(self._attainment)
        max_wait_s = ttft_budget_s - service.mean_s - settings.first_token_s
        servers = ranks * settings.pipeline_stages
        return servers * service.rate_within(max_wait_s, required_fraction)


def shortlist_shapes(
    question: PlanningProblem, catalogue: ShapeCatalogue, mix: MeanRequest
) -> list[InstanceTask]:
    """The shapes to simulate, each with an estimated rate.

    For each accelerator and duty the best few, and the shape with the fewest devices.
    """
    estimates = RateEstimates(question, mix)
    traffic = TrafficSampler(question.traffic, question.seed)
    tasks: list[InstanceTask] = []
    for duty, instances in catalogue.shapes_by_duty.items():
        rated = [(instance, estimates.rate(instance, duty)) for instance in instances]
        for name in {instance.accelerator.name: None for instance in instances}:
            rated_on_accelerator = [
                (shape, rate) for shape, rate in rated if shape.accelerator.name == name
            ]
            tasks += [
                InstanceTask(
                    engine_shape=shape,
                    duty=duty,
                    traffic=traffic,
                    classes=question.classes,
                    effort=question.effort,
                    guess_per_s=rate,
                    residence_s=estimates.residence_s(shape, duty),
                    elsewhere_s=estimates.elsewhere_s(shape, duty),
                    steady_per_s=estimates.steady_rate(shape, duty),
                )
                for shape, rate in _best_splits(
                    rated_on_accelerator, question.effort.shapes_per_duty
                )
            ]
    return tasks


def _best_splits(
    rated: Sequence[tuple[EngineShape, float]], max_splits: int
) -> Iterable[tuple[EngineShape, float]]:
    """The best few splits, each with all its step budgets; and the smallest split."""
    feasible = [(shape, rate) for shape, rate in rated if rate > 0]
    rate_per_gpu: dict[Split, float] = {}
    for shape, rate in feasible:
        rate_per_gpu[shape.split] = max(rate_per_gpu.get(shape.split, 0.0), rate / shape.gpus)
    best = max(rate_per_gpu.values(), default=0.0)
    ranked = sorted(rate_per_gpu, key=lambda split: -rate_per_gpu[split])
    kept_splits = {
        split for split in ranked[:max_splits] if rate_per_gpu[split] >= _MIN_RATE_FRACTION * best
    }
    kept_splits |= set(sorted(rate_per_gpu, key=lambda split: split.devices)[:1])
    return [(shape, rate) for shape, rate in feasible if shape.split in kept_splits]
