"""How many replicas demand needs, in each role, so that the tail is served too."""

from __future__ import annotations

from dataclasses import dataclass

from baton.perf.capacity.capacity import (
    Variability,
    required_decode_replicas,
    required_prefill_replicas,
)
from baton.policy.scaling.observation import Observation, PoolObservation

_NOMINAL_TPOT_S = 0.05
"""How fast a stream is taken to go where nothing says; only the fluctuation hangs on it."""
_MIN_MISS_FRACTION = 1e-4
"""No number of replicas serves every request in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective to keep, and the irregularity of the demand."""

    ttft_s: float | None
    tpot_s: float | None
    allowed_miss_fraction: float
    """The share of requests that may miss one of the two objectives."""
    squared_variation: float
    """ca^2 + cs^2, see `burstiness`."""


def objective_of(observation: Observation, squared_variation: float) -> Objective:
    """Misses are shared evenly between the objectives that there are."""
    miss_fraction = 1.0 - observation.attainment_target
    if observation.ttft_s is not None and observation.tpot_s is not None:
        miss_fraction /= 2
    return Objective(
        ttft_s=observation.ttft_s,
        tpot_s=observation.tpot_s,
        allowed_miss_fraction=max(miss_fraction, _MIN_MISS_FRACTION),
        squared_variation=squared_variation,
    )


def prefill_replicas(
    pool: PoolObservation, objective: Objective, *, tokens_per_s: float, mean_tokens: float
) -> float | None:
    """Replicas like this pool's, for these prompt tokens; None while it is not known."""
    capacity = pool.prefill_tokens_per_s
    if capacity is None:
        return None
    half_variation = objective.squared_variation / 2
    return required_prefill_replicas(
        tokens_per_s / capacity,
        service_s=max(mean_tokens, 1.0) / capacity,
        ttft_s=objective.ttft_s,
        max_late_fraction=objective.allowed_miss_fraction,
        variability=Variability(arrival_scv=half_variation, service_scv=half_variation),
    )


def decode_replicas(
    pool: PoolObservation, objective: Objective, *, tokens_per_s: float
) -> float | None:
    """Replicas like this pool's, for these generated tokens; None while it is not known."""
    capacity = pool.decode_tokens_per_s
    if capacity is None:
        return None
    return required_decode_replicas(
        tokens_per_s / capacity,
        streams_per_replica=streams_per_replica(pool, objective.tpot_s),
        max_overload_fraction=objective.allowed_miss_fraction,
    )


def streams_per_replica(pool: PoolObservation, tpot_s: float | None) -> float:
    """With how many streams one generates what it can."""
    if pool.decode_streams is not None:
        return max(1.0, pool.decode_streams)
    target_tpot_s = _NOMINAL_TPOT_S if tpot_s is None else tpot_s
    return max(1.0, (pool.decode_tokens_per_s or 0.0) * target_tpot_s)
