"""Capacity of a replica, and the replicas that serve the tail and not just the mean.

Theory of operation. An engine's timing gives two capacities. One is the prompt tokens per second of
a replica that only prefills, with as many prompts in a step as the budget and the objective allow.
The other is the generated tokens per second of a replica that only decodes, with as many streams as
meet the objective and fit. Demand over capacity is the *load*, in replicas: enough without any
variation. Variation adds to it:

- Prompts queue. `n` replicas that share arrivals well are an M/G/n queue. Its wait exceeds t with
  probability C(n, load) * exp(-(n - load) * t / (K * service)). C is the probability that all are
  busy; K = (ca^2 + cs^2) / 2 is the variability of arrivals and prompts. The need is the least n
  with few enough long waits. Large pools reach higher utilization than small pools.
- Streams do not queue, they share steps. With random arrivals the number of streams is Poisson
  for any distribution of lengths, so a quantile of it must fit.

Both needs are real numbers and increase with the load; the caller rounds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from baton.perf.timing import EngineTiming

_MAX_STREAMS = 4096
_MIN_STEP_S = 1e-9
_MIN_REPLICAS = 1e-9
"""Any demand needs more than nothing."""
_MAX_UTILIZATION = 0.85
"""Of a pool without an objective. The mean wait of a queue with one server is about six services
here, and rises steeply beyond."""


def prefill_tokens_per_s(
    timing: EngineTiming,
    *,
    mean_uncached_tokens: float,
    max_batched_tokens: int,
    max_running: int,
    ttft_s: float | None = None,
) -> float:
    """Prompt tokens per second of a replica for which prompts of this size always wait.

    A step computes as many of them as fit its budget. With a TTFT objective a step takes at most
    a quarter of it. A prompt waits for the rest of a step and for its own, and half of the time is
    left for the queue. A step has one prompt at least.
    """
    tokens = max(1, round(mean_uncached_tokens))
    one_prompt = tokens / max(timing.prefill_s(tokens), _MIN_STEP_S)
    limit = min(max_batched_tokens, tokens * max(1, max_running))
    if limit <= tokens:
        return one_prompt

    def batch_s(batch_tokens: int) -> float:
        return timing.prefill_s(batch_tokens, length_tokens=tokens)

    if ttft_s is not None:
        limit_s = ttft_s / 4
        limit = _largest(tokens, limit, lambda batch_tokens: batch_s(batch_tokens) <= limit_s)
    return max(one_prompt, limit / max(batch_s(limit), _MIN_STEP_S))


def decode_tokens_per_s(
    timing: EngineTiming,
    *,
    tpot_s: float | None,
    context_tokens: float,
    max_running: int,
) -> float:
    """Tokens per second that a replica generates with `max_decode_streams`."""
    streams = max_decode_streams(
        timing,
        tpot_s=tpot_s,
        context_tokens=context_tokens,
        max_running=max_running,
    )
    return streams / max(_step_s(timing, streams, context_tokens), _MIN_STEP_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulls:
    """Pulls of KV blocks into one replica that decodes.

    A pull begins before a step of the engine and is seen to have ended before a later step. So at
    most `at_once` streams begin in a step, and each lasts as many steps as it has tokens.
    Source: Little's law, with the rate of `at_once` per step.
    """

    at_once: int
    output_tokens: float
    """Of a stream, on average."""


def max_decode_streams(
    timing: EngineTiming,
    *,
    tpot_s: float | None,
    context_tokens: float,
    max_running: int,
    kv_tokens: int | None = None,
    pulls: Pulls | None = None,
) -> int:
    """The most streams that fit the batch and the KV cache and get a token every `tpot_s`.

    At least 1, even where one stream alone misses the objective. `pulls` bounds them where each
    stream begins with a pull.
    """
    streams = max(1, min(max_running, _MAX_STREAMS))
    if pulls is not None:
        streams = max(1, min(streams, int(pulls.at_once * max(pulls.output_tokens, 1.0))))
    if kv_tokens is not None:
        streams = max(1, min(streams, int(kv_tokens / max(context_tokens, 1.0))))
    if tpot_s is None:
        return streams
    limit_s = tpot_s
    return _largest(1, streams, lambda number: _step_s(timing, number, context_tokens) <= limit_s)


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `high` that holds, where smaller numbers hold too; else `low`."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _step_s(timing: EngineTiming, streams: int, context_tokens: float) -> float:
    return timing.step_s(running=streams, context_tokens=round(streams * context_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variability:
    """Variability of arrivals and requests."""

    arrival_scv: float = 1.0
    """Squared coefficient of variation of interarrival times; 1 for random arrivals."""
    service_scv: float = 1.0
    """The same for the lengths of uncached prompts."""

    @property
    def wait_factor(self) -> float:
        """Ratio of the wait to that of random arrivals and services.

        Source: A. Allen, Probability, Statistics and Queueing Theory (the Allen-Cunneen
        approximation for GI/G/c); J. Kingman, The single server queue in heavy traffic (1961).
        """
        return max(0.5, (self.arrival_scv + self.service_scv) / 2)


POISSON = Variability()


def _wait_tail(replicas: int, load: float, blocked: float, max_wait_services: float) -> float:
    if load >= replicas:
        return 1.0
    wait_probability = blocked / (1.0 - load / replicas * (1.0 - blocked))
    return wait_probability * math.exp(-(replicas - load) * max_wait_services)


def required_prefill_replicas(
    load: float,
    *,
    service_s: float,
    ttft_s: float | None,
    max_late_fraction: float,
    variability: Variability = POISSON,
) -> float:
    """Replicas with which at most `max_late_fraction` of prompts wait too long.

    Args:
        load: In replicas: demanded tokens/s over tokens/s of one replica.
        service_s: Time of a mean prompt alone.
        ttft_s: Objective; it less the prompt's own time may be spent waiting. None: no objective,
            and a limit on the pool's utilization applies.
        max_late_fraction: Above 0, less than 1.
        variability: Of arrivals and prompts.
    """
    if load <= 0:
        return 0.0
    if ttft_s is None:
        return load / _MAX_UTILIZATION
    max_wait_services = max(0.0, ttft_s / max(service_s, 1e-9) - 1.0) / variability.wait_factor
    replicas, blocked, late = 0, 1.0, 1.0
    while late > max_late_fraction:
        replicas += 1
        blocked = load * blocked / (replicas + load * blocked)
        late, previous_late = _wait_tail(replicas, load, blocked, max_wait_services), late
    return replicas - 1 + _fractional_replica(previous_late, max_late_fraction, late)


def _fractional_replica(before: float, allowed: float, after: float) -> float:
    """The needed part of the last replica; lateness falls by equal factors in equal parts."""
    if after <= 0:
        return _MIN_REPLICAS
    return max(_MIN_REPLICAS, math.log(before / allowed) / math.log(before / after))


def required_decode_replicas(
    load: float,
    *,
    streams_per_replica: float,
    max_overload_fraction: float,
) -> float:
    """Replicas that have too many streams for at most `max_overload_fraction` of the time.

    Args:
        load: In replicas: demanded tokens/s over tokens/s of one replica.
        streams_per_replica: Streams at that rate.
        max_overload_fraction: Between 0 and 1.

    Source: the number in an M/G/infinity system is Poisson for any services (Palm 1943); a Poisson
    distribution of large mean is nearly normal.
    """
    if load <= 0:
        return 0.0
    z_score = max(0.0, NormalDist().inv_cdf(1.0 - min(max(max_overload_fraction, 1e-9), 0.999)))
    per_replica = max(streams_per_replica, 1.0)
    return load + z_score * math.sqrt(load / per_replica)
