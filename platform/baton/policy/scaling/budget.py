"""Division of the GPUs when there are not enough for all pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClaim:
    """The present and desired replicas of one pool."""

    pool: str
    current_replicas: int
    desired_replicas: int
    min_replicas: int = 0
    """Not taken from it."""
    gpus_per_replica: float = 1.0
    """Of one replica."""
    draining_replicas: int = 0
    """Replicas that drain: they still hold their GPUs."""
    is_overridden: bool = False
    """An operator's override: it comes first, and is the last to be taken from."""


def apply_gpu_budget(claims: Iterable[GpuClaim], budget: float | None) -> Mapping[str, int]:
    """How many replicas each pool may have now.

    GPUs are given one replica at a time to the pool that has the smallest part of its claim.
    Running replicas are taken away only where a budget was lowered, first where they are missed
    least. Ties go by name, so the order of pools does not matter.
    """
    by_pool = {claim.pool: claim for claim in sorted(claims, key=lambda claim: claim.pool)}
    if budget is None:
        return {pool: claim.desired_replicas for pool, claim in by_pool.items()}
    granted = {
        pool: min(claim.current_replicas, claim.desired_replicas) for pool, claim in by_pool.items()
    }
    used = sum(granted[pool] * claim.gpus_per_replica for pool, claim in by_pool.items())
    used = _reclaim(by_pool, granted, used=used, budget=budget)
    draining_gpus = sum(
        claim.draining_replicas * claim.gpus_per_replica for claim in by_pool.values()
    )
    _grant(by_pool, granted, free_gpus=budget - used - draining_gpus)
    return granted


def _reclaim(
    claims: Mapping[str, GpuClaim], granted: dict[str, int], *, used: float, budget: float
) -> float:
    """Take replicas away until the rest fits; the GPUs used then."""
    while used > budget + _ROUNDING:
        reclaimable = [pool for pool, claim in claims.items() if granted[pool] > claim.min_replicas]
        if not reclaimable:
            break
        pool = max(reclaimable, key=_reclaim_order(claims, granted))
        granted[pool] -= 1
        used -= claims[pool].gpus_per_replica
    return used


def _reclaim_order(
    claims: Mapping[str, GpuClaim], granted: Mapping[str, int]
) -> Callable[[str], tuple[bool, float, float]]:
    def share(pool: str) -> tuple[bool, float, float]:
        claim, now = claims[pool], granted[pool]
        return (
            not claim.is_overridden,
            (now - 1) / max(claim.desired_replicas, 1),
            now / max(claim.desired_replicas, 1),
        )

    return share


def _grant(claims: Mapping[str, GpuClaim], granted: dict[str, int], *, free_gpus: float) -> None:
    while True:
        unsatisfied = [
            pool
            for pool, claim in claims.items()
            if granted[pool] < claim.desired_replicas
            and claim.gpus_per_replica <= free_gpus + _ROUNDING
        ]
        if not unsatisfied:
            return
        pool = min(
            unsatisfied,
            key=lambda name: (
                not claims[name].is_overridden,
                granted[name] / claims[name].desired_replicas,
            ),
        )
        granted[pool] += 1
        free_gpus -= claims[pool].gpus_per_replica
