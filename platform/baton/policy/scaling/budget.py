"""Who gets the GPUs when there are not enough for what all pools want."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one pool has and would have."""

    pool: str
    have: int
    want: int
    least: int = 0
    """Not taken from it."""
    gpus: float = 1.0
    """Of one replica."""
    leaving: int = 0
    """Replicas that drain: they still hold their GPUs."""
    fixed: bool = False
    """An operator has said so: it comes first, and is the last to be taken from."""


def within_budget(claims: Iterable[Claim], budget: float | None) -> Mapping[str, int]:
    """How many replicas each pool may have now.

    GPUs are given one replica at a time to the pool that has the smallest part of what it wants.
    What runs is taken away only where a budget was lowered, first where it is missed least. Ties go
    by name, so the order of pools does not matter.
    """
    by_pool = {claim.pool: claim for claim in sorted(claims, key=lambda claim: claim.pool)}
    if budget is None:
        return {pool: claim.want for pool, claim in by_pool.items()}
    granted = {pool: min(claim.have, claim.want) for pool, claim in by_pool.items()}
    used = sum(granted[pool] * claim.gpus for pool, claim in by_pool.items())
    used = _take(by_pool, granted, used=used, budget=budget)
    leaving = sum(claim.leaving * claim.gpus for claim in by_pool.values())
    _give(by_pool, granted, spare=budget - used - leaving)
    return granted


def _take(
    claims: Mapping[str, Claim], granted: dict[str, int], *, used: float, budget: float
) -> float:
    """Take replicas away until the rest fits; what is used then."""
    while used > budget + _ROUNDING:
        losers = [pool for pool, claim in claims.items() if granted[pool] > claim.least]
        if not losers:
            break
        pool = max(losers, key=_share_after_loss(claims, granted))
        granted[pool] -= 1
        used -= claims[pool].gpus
    return used


def _share_after_loss(
    claims: Mapping[str, Claim], granted: Mapping[str, int]
) -> Callable[[str], tuple[bool, float, float]]:
    def share(pool: str) -> tuple[bool, float, float]:
        claim, now = claims[pool], granted[pool]
        return (not claim.fixed, (now - 1) / max(claim.want, 1), now / max(claim.want, 1))

    return share


def _give(claims: Mapping[str, Claim], granted: dict[str, int], *, spare: float) -> None:
    while True:
        takers = [
            pool
            for pool, claim in claims.items()
            if granted[pool] < claim.want and claim.gpus <= spare + _ROUNDING
        ]
        if not takers:
            return
        pool = min(
            takers, key=lambda name: (not claims[name].fixed, granted[name] / claims[name].want)
        )
        granted[pool] += 1
        spare -= claims[pool].gpus
