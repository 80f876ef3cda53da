"""The known facts of the start of a coordinator's next replica of its model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from baton.domain.demand import ColdStart
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions


def forecast_cold_starts(
    observation: Observation, *, startable: Collection[str]
) -> dict[str, ColdStart]:
    """By model, as in coordinators' reports; `startable` are the pools that can get a replica.

    A request is served by whichever replica is there first: all pools can run both phases.
    """
    models = observation.models or {"": observation}
    return {
        model: _forecast(tuple(other.pools.values()), startable) for model, other in models.items()
    }


def startable_pools(options: AutoscalerOptions, overrides: Mapping[str, int]) -> frozenset[str]:
    """The pools that get a replica when a request waits for one.

    `overrides` are numbers of replicas that operators have set: 0 stays 0.
    """
    if options.dry_run or not options.scale_to_zero:
        return frozenset()
    return frozenset(pool for pool in options.bounds if overrides.get(pool, 1) > 0)


def _forecast(pools: Collection[PoolObservation], startable: Collection[str]) -> ColdStart:
    candidates = [pool for pool in pools if pool.name in startable] or list(pools)
    fastest = min(candidates, key=lambda pool: pool.cold_start_s, default=None)
    all_remaining_s = list(_remaining_s(pools))
    can_start = bool(all_remaining_s) or any(pool.name in startable for pool in pools)
    remaining_s = min(all_remaining_s, default=None)
    if fastest is None:
        return ColdStart(can_start=can_start, remaining_s=remaining_s)
    return ColdStart(
        can_start=can_start,
        duration_s=fastest.cold_start_s,
        is_measured=fastest.is_cold_start_measured,
        remaining_s=remaining_s,
    )


def _remaining_s(pools: Collection[PoolObservation]) -> Iterator[float]:
    """Of each pool that starts any, how long until the first is expected."""
    for pool in pools:
        if pool.starting > 0 and not pool.ready_replicas:
            yield max(0.0, pool.cold_start_s - (pool.oldest_start_age_s or 0.0))
