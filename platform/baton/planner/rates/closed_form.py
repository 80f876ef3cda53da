"""Upper bounds of engines' rates, in closed form, for means, without queues.

The engine is in steady state without headroom. A prefill engine computes one prompt after the
other, or several in one step where they are short. A decode engine keeps the largest batch that is
fast enough and fits. An engine with both duties spreads prompts evenly over its steps. Real rates
within objectives are lower, because of bursts and varying lengths: the simulator finds them.

Source: rate matching of DistServe (OSDI'24) section 4 and TokenScale's token velocities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp

from baton.perf.step_timing import StepBatch, StepTiming, attention_pairs
from baton.simulator.v1.settings import V1Settings

_BISECTION_STEPS = 24
"""Halvings of an interval: to one part in 16 million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRequest:
    """The mean request."""

    prompt_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens to compute: at least one."""
        return max(1.0, self.prompt_tokens - self.cached_tokens)

    @property
    def context_tokens(self) -> float:
        """Mean context of a stream over its life."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def final_kv_tokens(self) -> float:
        """Tokens in the KV cache at the end."""
        return self.prompt_tokens + self.output_tokens


def prefill_s(
    timing: StepTiming,
    tokens: int,
    *,
    cached_tokens: int = 0,
    budget_tokens: int = 8192,
    prompts: int = 1,
) -> float:
    """Time of one prompt, alone, in chunks, until its first token.

    Or of several at once that are alike, one for each rank of a group.
    """
    computed_tokens, total_s = min(cached_tokens, tokens - 1), 0.0
    while computed_tokens < tokens:
        chunk = min(budget_tokens, tokens - computed_tokens)
        total_s += timing.step_s(
            StepBatch(
                prefill_tokens=prompts * chunk,
                prefill_requests=prompts,
                prefill_pairs=prompts * attention_pairs(chunk, computed_tokens),
                prefill_context_tokens=prompts * computed_tokens,
                finished_prefills=prompts * int(computed_tokens + chunk == tokens),
            )
        )
        computed_tokens += chunk
    return total_s


def decode_s(timing: StepTiming, batch: int, context_tokens: float) -> float:
    """One step for `batch` streams that attend to `context_tokens` each."""
    return timing.step_s(
        StepBatch(decode_requests=batch, decode_context_tokens=round(batch * context_tokens))
    )


def max_batch(
    timing: StepTiming, *, context_tokens: float, tpot_s: float | None, limit: int
) -> int:
    """The most streams, up to `limit`, with steps of at most `tpot_s`; 0 if none."""
    if tpot_s is None:
        return max(0, limit)
    limit_s = tpot_s
    return _largest_holding(lambda batch: decode_s(timing, batch, context_tokens) <= limit_s, limit)


def max_concurrent_requests(settings: V1Settings, mix: MeanRequest) -> int:
    """Mean requests that fit at once: KV cache and scheduler."""
    tokens = settings.kv_blocks * settings.block_size_tokens
    request_tokens = mix.final_kv_tokens + settings.request_blocks * settings.block_size_tokens
    return min(settings.max_running_requests, int(tokens / request_tokens))


def prefill_rate(settings: V1Settings, mix: MeanRequest) -> float:
    """Prompts per second: one after the other, or as many as a step takes."""
    cached_tokens = round(mix.prompt_tokens - mix.computed_tokens)
    tokens = max(1, round(mix.computed_tokens))
    prompt_s = prefill_s(
        settings.timing,
        max(1, round(mix.prompt_tokens)),
        cached_tokens=cached_tokens,
        budget_tokens=settings.prompt_chunk_tokens,
    )
    prompts = min(max_concurrent_requests(settings, mix), settings.max_batched_tokens // tokens)
    if prompts <= 1:
        return settings.pipeline_stages / prompt_s
    step_s = settings.timing.step_s(
        StepBatch(
            prefill_tokens=prompts * tokens,
            prefill_requests=prompts,
            prefill_pairs=prompts * attention_pairs(tokens, cached_tokens),
            prefill_context_tokens=prompts * cached_tokens,
            finished_prefills=prompts,
        )
    )
    return settings.pipeline_stages * max(1 / prompt_s, prompts / step_s)


def decode_rate(settings: V1Settings, mix: MeanRequest, tpot_s: float | None) -> float:
    """Requests per second with every token within `tpot_s`; 0 if one stream is too slow."""
    stages = settings.pipeline_stages
    batch = max_batch(
        settings.timing,
        context_tokens=mix.context_tokens,
        tpot_s=tpot_s,
        limit=min(
            max_concurrent_requests(settings, mix) // stages,
            # A pull takes a step at least, and a stream as many steps as it has tokens.
            int(settings.max_pulls * max(1.0, mix.output_tokens)),
        ),
    )
    if not batch:
        return 0.0
    step_s = decode_s(settings.timing, batch, mix.context_tokens)
    return stages * batch / step_s / mix.output_tokens


def steady_rate(
    settings: V1Settings,
    mix: MeanRequest,
    tpot_s: float | None,
    *,
    places_fraction: float = 1.0,
) -> float:
    """Requests per second above which no run can go on: by places in the batch and `tpot_s`.

    By Little's law, more requests per second are more streams at a time, whose steps are longer. A
    short run shows this late. KV memory is not considered: prompts may share it. Streams may take
    `places_fraction` of the batch.
    """
    stages = settings.pipeline_stages
    places = ceil(places_fraction * settings.max_running_requests)
    batch = max_batch(
        settings.timing,
        context_tokens=mix.context_tokens,
        tpot_s=tpot_s,
        limit=ceil(places / stages),
    )
    if not batch:
        return 0.0
    return stages * batch / decode_s(settings.timing, batch, mix.context_tokens) / mix.output_tokens


def mixed_rate(settings: V1Settings, mix: MeanRequest, tpot_s: float | None) -> float:
    """Requests per second of an engine that prefills and decodes in the same steps.

    With x requests per step in the mean, a step computes x prompts and one token for each of x
    times the output length streams. x is limited by step time, token budget and capacity.
    """
    stages, request_tokens = settings.pipeline_stages, mix.computed_tokens + mix.output_tokens
    max_requests_per_step = min(
        settings.max_batched_tokens / request_tokens,
        max_concurrent_requests(settings, mix) / stages / mix.output_tokens,
    )
    low, high = max_requests_per_step / (1 << _BISECTION_STEPS), max_requests_per_step
    if tpot_s is not None and settings.timing.step_s(_mixed_batch(mix, low)) > tpot_s:
        return 0.0
    for _ in range(_BISECTION_STEPS):
        requests_per_step = (low + high) / 2
        if tpot_s is None or settings.timing.step_s(_mixed_batch(mix, requests_per_step)) <= tpot_s:
            low = requests_per_step
        else:
            high = requests_per_step
    return stages * low / settings.timing.step_s(_mixed_batch(mix, low))


def _mixed_batch(mix: MeanRequest, requests_per_step: float) -> StepBatch:
    computed = mix.computed_tokens
    streams = requests_per_step * mix.output_tokens
    return StepBatch(
        prefill_tokens=round(requests_per_step * computed),
        prefill_requests=round(requests_per_step + 0.5),
        prefill_pairs=requests_per_step
        * attention_pairs(round(computed), round(mix.prompt_tokens - computed)),
        prefill_context_tokens=round(requests_per_step * mix.prompt_tokens / 2),
        decode_requests=round(streams),
        decode_context_tokens=round(streams * mix.context_tokens),
        finished_prefills=round(requests_per_step),
    )


def _largest_holding(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which the monotonic `holds` is true."""
    low, high = 0, max(0, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTime:
    """Busy time of one engine per prompt of a workload."""

    mean_s: float
    scv: float
    """Squared coefficient of variation."""

    @staticmethod
    def from_times(times_s: Sequence[float]) -> ServiceTime:
        """Of these prompts' times."""
        mean_s = sum(times_s) / len(times_s)
        variance = sum((value - mean_s) ** 2 for value in times_s) / len(times_s)
        return ServiceTime(mean_s=mean_s, scv=variance / mean_s**2)

    def rate_within(self, wait_s: float, fraction: float) -> float:
        """Prompts per second of which `fraction` wait at most `wait_s`; 0 without time to wait.

        Source: Kingman's exponential tail of the wait in heavy traffic (1962) with Poisson
        arrivals: P(W > t) = rho * exp(-2 (1 - rho) t / (S (1 + cv^2))).
        """
        if wait_s <= 0:
            return 0.0
        scale = 2 * wait_s / (self.mean_s * (1 + self.scv))
        low, high = 0.0, 1.0
        for _ in range(_BISECTION_STEPS):
            utilization = (low + high) / 2
            if utilization * exp(-scale * (1 - utilization)) <= 1 - fraction:
                low = utilization
            else:
                high = utilization
        return low / self.mean_s
