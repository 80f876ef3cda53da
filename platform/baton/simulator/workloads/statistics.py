"""Statistics of a trace: rate, bursts, lengths, and reuse of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from baton.simulator.outcome import quantile
from baton.simulator.workloads.trace import Trace, TraceRequest

PEAK_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean, percentiles and maximum."""

    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Statistics of a trace."""

    requests: int
    span_s: float
    rate_per_s: float
    gap_cv: float
    """Coefficient of variation of the time between arrivals: 1 is Poisson, more is bursty."""
    peak_to_mean: float
    """Requests in the busiest 10 s, counted from the first arrival, over the mean of 10 s."""
    prompt_tokens: Distribution
    output_tokens: Distribution
    reused_tokens_fraction: float
    """Leading prompt tokens that an endless cache would hold, of all prompt tokens."""
    mean_reused_fraction: float
    """The mean over requests of that fraction."""


def describe(trace: Trace) -> TraceStatistics:
    """The statistics of a trace.

    Raises:
        ValueError: the trace has no requests.
    """
    if not trace.requests:
        raise ValueError(f"trace {trace.name!r} has no requests to describe")
    arrivals_s = [request.at_s for request in trace.requests]
    reused = reused_tokens(trace)
    prompts = [request.prompt_tokens for request in trace.requests]
    return TraceStatistics(
        requests=len(trace),
        span_s=trace.span_s,
        rate_per_s=trace.rate_per_s,
        gap_cv=_gap_cv(arrivals_s),
        peak_to_mean=_peak_to_mean(arrivals_s),
        prompt_tokens=distribution(prompts),
        output_tokens=distribution([request.output_tokens for request in trace.requests]),
        reused_tokens_fraction=sum(reused) / sum(prompts),
        mean_reused_fraction=fmean(
            cached_tokens / prompt_tokens
            for cached_tokens, prompt_tokens in zip(reused, prompts, strict=True)
        ),
    )


def distribution(values: Sequence[float]) -> Distribution:
    """The distribution of values, of which there is at least one."""
    p50, p90, p99 = (quantile(values, q) for q in (0.5, 0.9, 0.99))
    return Distribution(mean=fmean(values), p50=p50, p90=p90, p99=p99, maximum=max(values))


def reused_tokens(trace: Trace) -> list[int]:
    """Leading tokens of each request that an endless cache would hold when it arrives.

    A partly filled last block counts as far as it is filled.
    """
    cached_chains: set[int] = set()
    return [
        _reused_tokens(request, trace.block_tokens, cached_chains) for request in trace.requests
    ]


def _reused_tokens(request: TraceRequest, block_tokens: int, cached_chains: set[int]) -> int:
    """One request's; adds the blocks of its prompt and output to `cached_chains`."""
    chain, hits = 0, 0
    for block in request.block_ids:
        chain = hash((chain, block))
        hits += chain in cached_chains
        cached_chains.add(chain)
    return min(hits * block_tokens, request.prompt_tokens)


def _gap_cv(arrivals_s: Sequence[float]) -> float:
    gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
    mean_s = fmean(gaps_s) if gaps_s else 0.0
    return pstdev(gaps_s) / mean_s if mean_s else 0.0


def _peak_to_mean(arrivals_s: Sequence[float]) -> float:
    span_s = arrivals_s[-1] - arrivals_s[0]
    if span_s < PEAK_WINDOW_S:
        return 1.0
    windows = Counter(int((at_s - arrivals_s[0]) / PEAK_WINDOW_S) for at_s in arrivals_s)
    return max(windows.values()) / (len(arrivals_s) * PEAK_WINDOW_S / span_s)
