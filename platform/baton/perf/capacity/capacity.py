"""What one replica can carry, and how many it takes so that the tail is served, not just the mean.

Theory of operation. Two capacities come from an engine's timing: prompt tokens a second of a
replica that only prefills, and generated tokens a second of one that only decodes, with as many
streams as still meet the objective. Dividing demand by capacity gives *loads*, in replicas'
worth: what would just do if nothing fluctuated. How many it takes in truth depends on chance:

- Prompts queue. `n` replicas that share arrivals well are an M/G/n queue; its wait exceeds t with
  probability C(n, load) * exp(-(n - load) * t / (K * service)), where C is the probability that
  all are busy and K = (ca^2 + cs^2) / 2 counts how irregular arrivals and prompts are. The need is
  the least n for which too long a wait is rare enough. Large pools run fuller than small ones.
- Streams do not queue: they crowd. With arrivals at random the number of streams at a moment is
  Poisson, however their lengths are distributed, so a quantile of that many must fit.

Both needs are real numbers, go up with the load, and are rounded up by whoever starts replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from baton.perf.timing import EngineTiming

_MAX_STREAMS = 4096
_MIN_REPLICAS = 1e-9
"""Of a replica: who asks for anything needs more than nothing."""
_MAX_UTILIZATION = 0.85
"""How full a pool may run for which no objective is given: where the mean wait of a queue with one
server is about six services, and rises steeply beyond."""


def prefill_tokens_per_s(timing: EngineTiming, *, mean_uncached_tokens: float) -> float:
    """Prompt tokens that a replica computes a second, prompts of such a size one after another."""
    tokens = max(1, round(mean_uncached_tokens))
    return tokens / max(timing.prefill_s(tokens), 1e-9)


def decode_tokens_per_s(
    timing: EngineTiming,
    *,
    tpot_s: float | None,
    context_tokens: float,
    max_running: int,
    kv_tokens: int | None = None,
) -> float:
    """Tokens that a replica generates a second with `max_decode_streams`."""
    streams = max_decode_streams(
        timing,
        tpot_s=tpot_s,
        context_tokens=context_tokens,
        max_running=max_running,
        kv_tokens=kv_tokens,
    )
    return streams / max(_step_s(timing, streams, context_tokens), 1e-9)


def max_decode_streams(
    timing: EngineTiming,
    *,
    tpot_s: float | None,
    context_tokens: float,
    max_running: int,
    kv_tokens: int | None = None,
) -> int:
    """The most streams that a replica may have.

    Those are as many as its batch and its KV cache hold, and as still get a token every `tpot_s`;
    one where even a stream alone does not.
    """
    streams = max(1, min(max_running, _MAX_STREAMS))
    if kv_tokens is not None:
        streams = max(1, min(streams, int(kv_tokens / max(context_tokens, 1.0))))
    if tpot_s is None:
        return streams
    return _max_streams_within(timing, tpot_s, context_tokens, streams)


def _max_streams_within(
    timing: EngineTiming, tpot_s: float, context_tokens: float, limit: int
) -> int:
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if _step_s(timing, middle, context_tokens) <= tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def _step_s(timing: EngineTiming, streams: int, context_tokens: float) -> float:
    return timing.step_s(running=streams, context_tokens=round(streams * context_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variability:
    """How far from evenly spaced and alike requests are."""

    arrival_scv: float = 1.0
    """The squared coefficient of variation of the time between them; 1 for arrivals at random."""
    service_scv: float = 1.0
    """Likewise of the uncached prompts' lengths."""

    @property
    def wait_factor(self) -> float:
        """How much longer the wait is than in a queue of arrivals and services at random.

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
    """Replicas so that no more than a share `max_late_fraction` of prompts waits too long.

    Args:
        load: Replicas' worth of prompts: tokens/s asked for over tokens/s that one computes.
        service_s: How long a mean prompt takes alone.
        ttft_s: What is promised; what is left of it after the prompt's own time may be waited.
            None: nothing is, and the pool is kept from being full.
        max_late_fraction: Above 0, and less than 1.
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
    """How much of the last replica it takes, shares falling by the same factor in each part."""
    if after <= 0:
        return _MIN_REPLICAS
    return max(_MIN_REPLICAS, math.log(before / allowed) / math.log(before / after))


def required_decode_replicas(
    load: float,
    *,
    streams_per_replica: float,
    max_overload_fraction: float,
) -> float:
    """Replicas so that only a share `max_overload_fraction` of the time more streams run than may.

    Args:
        load: Replicas' worth of streams: tokens/s asked for over what one replica generates.
        streams_per_replica: With how many it does that.
        max_overload_fraction: Between 0 and 1.

    Source: the number in an M/G/infinity system is Poisson whatever the services (Palm 1943), and
    Poisson is near normal where many are many.
    """
    if load <= 0:
        return 0.0
    z_score = max(0.0, NormalDist().inv_cdf(1.0 - min(max(max_overload_fraction, 1e-9), 0.999)))
    per_replica = max(streams_per_replica, 1.0)
    return load + z_score * math.sqrt(load / per_replica)
