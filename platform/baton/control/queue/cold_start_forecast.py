"""What a coordinator is told of the start of its model's next replica."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from baton.domain.demand import ColdStart
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions


def cold_starts(seen: Observation, *, startable: Collection[str]) -> dict[str, ColdStart]:
    """By model, as in coordinators' reports; `startable` are the pools that can get a replica.

    A request is served by whichever replica is there first: all pools can run both phases.
    """
    models = seen.models or {"": seen}
    return {
        model: _cold_start(tuple(one.pools.values()), startable) for model, one in models.items()
    }


def startable(options: AutoscalerOptions, overrides: Mapping[str, int]) -> frozenset[str]:
    """The pools that get a replica when a request waits for one.

    `overrides` are numbers of replicas that operators have set: 0 stays 0.
    """
    if options.dry_run or not options.scale_to_zero:
        return frozenset()
    return frozenset(pool for pool in options.bounds if overrides.get(pool, 1) > 0)


def _cold_start(pools: Collection[PoolObservation], startable: Collection[str]) -> ColdStart:
    able = [pool for pool in pools if pool.name in startable] or list(pools)
    first = min(able, key=lambda pool: pool.cold_start_s, default=None)
    lefts_s = list(_lefts_s(pools))
    can_start = bool(lefts_s) or any(pool.name in startable for pool in pools)
    left_s = min(lefts_s, default=None)
    if first is None:
        return ColdStart(can_start=can_start, left_s=left_s)
    return ColdStart(can_start, first.cold_start_s, first.cold_start_measured, left_s)


def _lefts_s(pools: Collection[PoolObservation]) -> Iterator[float]:
    """Of each pool that starts any, how long until the first is expected."""
    for pool in pools:
        if pool.starting > 0 and not pool.ready:
            yield max(0.0, pool.cold_start_s - (pool.starting_for_s or 0.0))
