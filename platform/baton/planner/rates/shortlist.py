"""Which shapes are worth simulating: those with closed-form rates near the best of their duty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.planner.problem import PATIENCE, Question
from baton.planner.rates.arrivals import Traffic
from baton.planner.rates.closed_form import (
    Mix,
    Service,
    decode_rate,
    decode_s,
    largest_batch,
    mixed_rate,
    prefill_s,
    room_requests,
)
from baton.planner.rates.measure import Task
from baton.planner.rates.trials import HeldTo
from baton.planner.shapes.space import Duty, Instance, Shapes
from baton.simulator.workloads.statistics import reused_tokens

_NEAR = 0.7
"""Of the best closed-form rate for its cost: what is below is not simulated."""
_SAMPLED = 64
"""Prompts whose time is computed for a guess."""
_HEADROOM = 0.95
"""Of what decoding could carry at best, where a search begins."""


class Guesses:
    """What each shape should carry, before anything is simulated."""

    def __init__(self, question: Question, mix: Mix) -> None:
        self._question = question
        self._mix = mix
        aims = question.objectives
        self.ttft_s = aims.ttft_s or PATIENCE.ttft_s or 0.0
        self.tpot_s = aims.tpot_s or PATIENCE.tpot_s
        self._attainment = max(one.attainment for one in question.classes)
        pairs = zip(question.traffic.requests, reused_tokens(question.traffic), strict=True)
        lengths = sorted(max(1, one.prompt_tokens - reused) for one, reused in pairs)
        stride = max(1, len(lengths) // _SAMPLED)
        self._lengths = lengths[stride // 2 :: stride]

    def rate(self, instance: Instance, duty: Duty) -> float:
        """Requests per second; 0 when its closed form says that it cannot be fast enough."""
        match duty:
            case Duty.PREFILL:
                left_s = self.ttft_s - self.elsewhere_s(instance, duty)
                return self._prompts(instance, duty, left_s)
            case Duty.DECODE:
                return _HEADROOM * decode_rate(instance.settings, self._mix, self.tpot_s)
            case Duty.BOTH:
                steps = _HEADROOM * mixed_rate(instance.settings, self._mix, self.tpot_s)
                return min(steps, self._prompts(instance, duty, self.ttft_s))

    def elsewhere_s(self, instance: Instance, duty: Duty) -> float:
        """Of the time to first token, what is not this duty's.

        For prefill, the way to another replica and that one's first step. For decode, which needs
        some only to find a place in the batch, half of it.
        """
        if duty is not Duty.PREFILL:
            return self.ttft_s / 2 if duty is Duty.DECODE else 0.0
        settings, mix = instance.settings, self._mix
        token_bytes = settings.kv_block_bytes / settings.block_size_tokens
        way_s = mix.prompt_tokens * token_bytes / settings.transfer_bytes_per_s
        return settings.transfer_setup_s + way_s + decode_s(settings.timing, 1, mix.context_tokens)

    def under_way_s(self, instance: Instance, duty: Duty) -> float:
        """About how long a request is there."""
        if duty is Duty.PREFILL:
            return self.ttft_s
        settings = instance.settings
        batch = largest_batch(
            settings.timing,
            context_tokens=self._mix.context_tokens,
            tpot_s=self.tpot_s,
            most=room_requests(settings, self._mix),
        )
        step_s = decode_s(settings.timing, max(1, batch), self._mix.context_tokens)
        return self._mix.output_tokens * step_s + (self.ttft_s if duty is Duty.BOTH else 0.0)

    def _prompts(self, instance: Instance, duty: Duty, within_s: float) -> float:
        settings = instance.settings
        service = Service.of(
            [
                prefill_s(settings.timing, tokens, budget_tokens=settings.max_batched_tokens)
                for tokens in self._lengths
            ]
        )
        wanted = HeldTo(duty=duty).wanted(self._attainment)
        waits_s = within_s - service.mean_s
        return settings.pipeline_stages * service.rate_within(waits_s, wanted)


def shortlist(question: Question, found: Shapes, mix: Mix) -> list[Task]:
    """The shapes to be simulated, each with a first guess of what it carries.

    For each accelerator and duty the best few, and the one that takes the fewest devices.
    """
    guesses = Guesses(question, mix)
    traffic = Traffic(question.traffic, question.seed)
    tasks: list[Task] = []
    for duty, instances in found.fitting.items():
        rated = [(one, guesses.rate(one, duty)) for one in instances]
        for name in {one.accelerator.name: None for one in instances}:
            mine = [(one, rate) for one, rate in rated if one.accelerator.name == name]
            tasks += [
                Task(
                    instance=one,
                    duty=duty,
                    traffic=traffic,
                    classes=question.classes,
                    effort=question.effort,
                    guess_per_s=rate,
                    under_way_s=guesses.under_way_s(one, duty),
                    spent_s=guesses.elsewhere_s(one, duty),
                )
                for one, rate in _kept(mine, question.effort.shapes)
            ]
    return tasks


def _kept(rated: Sequence[tuple[Instance, float]], most: int) -> Iterable[tuple[Instance, float]]:
    """The best few splits, each with all its step budgets; and the smallest split."""
    able = [(one, rate) for one, rate in rated if rate > 0]
    splits: dict[tuple[int, int], float] = {}
    for one, rate in able:
        split = one.tp, one.pp
        splits[split] = max(splits.get(split, 0.0), rate / one.gpus)
    best = max(splits.values(), default=0.0)
    ranked = sorted(splits, key=lambda split: -splits[split])
    kept = {split for split in ranked[:most] if splits[split] >= _NEAR * best}
    kept |= set(sorted(splits, key=lambda split: split[0] * split[1])[:1])
    return [(one, rate) for one, rate in able if (one.tp, one.pp) in kept]
