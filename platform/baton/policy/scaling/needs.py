"""How many replicas demand needs, in each role, so that the tail is served too."""

from __future__ import annotations

from dataclasses import dataclass

from baton.perf.capacity.capacity import Irregularity, decode_need, prefill_need
from baton.policy.scaling.observation import Observation, PoolObservation

_NOMINAL_TPOT_S = 0.05
"""How fast a stream is taken to go where nothing says; only the fluctuation hangs on it."""
_LEAST_LATE = 1e-4
"""No number of replicas serves everybody in time, whatever comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What has to be kept, and how irregular the demand is for which."""

    ttft_s: float | None
    tpot_s: float | None
    late_allowed: float
    """The share of requests that may miss one of the two objectives."""
    squared_variation: float
    """ca^2 + cs^2, see `irregular`."""


def promise_of(seen: Observation, squared_variation: float) -> Promise:
    """Misses are shared evenly between the objectives that there are."""
    late = 1.0 - seen.attainment_target
    if seen.ttft_s is not None and seen.tpot_s is not None:
        late /= 2
    return Promise(
        ttft_s=seen.ttft_s,
        tpot_s=seen.tpot_s,
        late_allowed=max(late, _LEAST_LATE),
        squared_variation=squared_variation,
    )


def prefill_replicas(
    pool: PoolObservation, promise: Promise, *, tokens_per_s: float, mean_tokens: float
) -> float | None:
    """Replicas like this pool's, for so many prompt tokens; None while it is not known."""
    capacity = pool.prefill_tokens_per_s
    if capacity is None:
        return None
    half = promise.squared_variation / 2
    return prefill_need(
        tokens_per_s / capacity,
        service_s=max(mean_tokens, 1.0) / capacity,
        ttft_s=promise.ttft_s,
        late_allowed=promise.late_allowed,
        irregularity=Irregularity(arrivals=half, prompts=half),
    )


def decode_replicas(
    pool: PoolObservation, promise: Promise, *, tokens_per_s: float
) -> float | None:
    """Replicas like this pool's, for so many generated tokens; None while it is not known."""
    capacity = pool.decode_tokens_per_s
    if capacity is None:
        return None
    return decode_need(
        tokens_per_s / capacity,
        streams_per_replica=streams_per_replica(pool, promise.tpot_s),
        late_allowed=promise.late_allowed,
    )


def streams_per_replica(pool: PoolObservation, tpot_s: float | None) -> float:
    """With how many streams one generates what it can."""
    if pool.decode_streams is not None:
        return max(1.0, pool.decode_streams)
    pace_s = _NOMINAL_TPOT_S if tpot_s is None else tpot_s
    return max(1.0, (pool.decode_tokens_per_s or 0.0) * pace_s)
