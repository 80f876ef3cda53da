"""The planned pool and role of each replica, while the plan is made.

Replicas of a prefill pool may play at decoding and the other way round; a `PlannedPool` calls their
number *away*. A role's *players* are its own pools' replicas, but for those away, and the other
role's that are away. Pools of one role may be of different strength: players are counted in
replicas of the role's first pool, which does most for each GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from baton.domain.fleet import Role
from baton.policy.scaling.observation import PoolObservation
from baton.policy.scaling.options import PoolBounds

_EQUAL_CAPACITY_RATIO = 1.1
"""Strengths that differ by less are the same: measurements waver, and the order must not."""


_ROUNDING = 1e-6


@dataclass(slots=True)
class PlannedPool:
    """One pool, as it is and as it shall be."""

    pool: PoolObservation
    bounds: PoolBounds
    replicas: int
    """Replicas that take work or start."""
    flipped: int
    """Of those that take work: how many play the other role."""
    flipped_before: int
    denied: int = 0
    """Replicas that it would have in addition, if bounds did not deny them."""

    @property
    def free_slots(self) -> int:
        """How many more it may have."""
        return max(0, self.bounds.max - self.replicas)


class PoolAssignment:
    """Pools that prefill, and pools that decode."""

    def __init__(self, pools: Iterable[PoolObservation], bounds: Mapping[str, PoolBounds]) -> None:
        self.planned: dict[Role, list[PlannedPool]] = {Role.PREFILL: [], Role.DECODE: []}
        for pool in pools:
            self.planned[pool.role].append(_plan_pool(pool, bounds))
        for role, planned_pools in self.planned.items():
            planned_pools.sort(key=lambda planned_pool: _capacity_order(planned_pool.pool, role))

    def whole_replicas(self, role: Role) -> int:
        """Replicas, now or when started, of the role; in whole replicas of the first pool."""
        return math.floor(self.effective_replicas(role) + _ROUNDING)

    def effective_replicas(self, role: Role) -> float:
        """The same, with fractions of a replica."""
        own_replicas = sum(
            (planned_pool.replicas - planned_pool.flipped)
            * self._relative_capacity(planned_pool, role)
            for planned_pool in self.planned[role]
        )
        borrowed = sum(
            planned_pool.flipped * self._relative_capacity(planned_pool, role)
            for planned_pool in self.planned[other_role(role)]
        )
        return own_replicas + borrowed

    def with_flip(self, target_role: Role, replicas: int) -> PoolAssignment:
        """The assignment after a flip; this assignment stays as it is."""
        flipped = PoolAssignment((), {})
        flipped.planned = {
            role: [copy(planned_pool) for planned_pool in planned_pools]
            for role, planned_pools in self.planned.items()
        }
        flipped.flip(target_role, replicas)
        return flipped

    def max_effective_replicas(self, role: Role) -> float:
        """How many players the role's own pools may have."""
        return sum(
            max(planned_pool.bounds.max, planned_pool.replicas)
            * self._relative_capacity(planned_pool, role)
            for planned_pool in self.planned[role]
        )

    def flip(self, target_role: Role, replicas: int) -> int:
        """Have players of the other role play `target_role`; how many could."""
        remaining = min(replicas, max(0, self._ready_replicas(other_role(target_role)) - 1))
        requested = remaining
        for planned_pool in self.planned[target_role]:  # replicas that are away come home first
            returned = min(remaining, planned_pool.flipped)
            planned_pool.flipped -= returned
            remaining -= returned
        for planned_pool in self.planned[other_role(target_role)]:
            if self._can_serve(planned_pool, target_role):
                newly_flipped = min(
                    remaining, planned_pool.pool.ready_replicas - planned_pool.flipped
                )
                planned_pool.flipped += newly_flipped
                remaining -= newly_flipped
        return requested - remaining

    def grow(self, role: Role, replicas: float) -> float:
        """Start replicas for the role; the rest when its pools, and then all, are full.

        The first of the role's own pools is denied the replicas that they cannot have.
        A replica that is started in the other role's pool can play this role once it is ready.
        """
        remaining = _start_replicas(
            self.planned[role],
            replicas,
            lambda planned_pool: self._relative_capacity(planned_pool, role),
        )
        self.planned[role][0].denied = math.ceil(remaining - _ROUNDING)
        flippable = [
            planned_pool
            for planned_pool in self.planned[other_role(role)]
            if self._can_serve(planned_pool, role)
        ]
        return _start_replicas(
            flippable, remaining, lambda planned_pool: self._relative_capacity(planned_pool, role)
        )

    def shrink(self, role: Role, replicas: int) -> None:
        """Stop at most this many players; own replicas first, of the weakest pool."""
        remaining = float(replicas)
        for planned_pool in reversed(self.planned[role]):
            weight = self._relative_capacity(planned_pool, role)
            stoppable = min(
                planned_pool.replicas - planned_pool.bounds.min,
                planned_pool.replicas - planned_pool.flipped,
            )
            stopped = max(0, min(stoppable, math.floor(remaining / weight + _ROUNDING)))
            planned_pool.replicas -= stopped
            remaining -= stopped * weight
        for planned_pool in reversed(self.planned[other_role(role)]):
            stoppable = min(planned_pool.replicas - planned_pool.bounds.min, planned_pool.flipped)
            stopped = max(0, min(stoppable, math.floor(remaining + _ROUNDING)))
            planned_pool.replicas -= stopped
            planned_pool.flipped -= stopped
            remaining -= stopped

    def _ready_replicas(self, role: Role) -> int:
        own_replicas = sum(
            planned_pool.pool.ready_replicas - planned_pool.flipped
            for planned_pool in self.planned[role]
        )
        return own_replicas + sum(
            planned_pool.flipped for planned_pool in self.planned[other_role(role)]
        )

    def _can_serve(self, planned_pool: PlannedPool, role: Role) -> bool:
        """Whether it is known, or to be expected, what a pool's replicas do in a role.

        A pool that has never played it is taken to do as much as one of the role's own on as many
        GPUs; once it plays, it is seen.
        """
        if _capacity(planned_pool.pool, role) is not None:
            return True
        first = self.planned[role][0].pool
        has_same_gpus = first.gpus_per_replica == planned_pool.pool.gpus_per_replica
        return has_same_gpus and _capacity(first, role) is not None

    def _relative_capacity(self, planned_pool: PlannedPool, role: Role) -> float:
        capacity = _capacity(planned_pool.pool, role)
        first_capacity = _capacity(self.planned[role][0].pool, role) if self.planned[role] else None
        if (
            capacity is None
            or first_capacity is None
            or 1 / _EQUAL_CAPACITY_RATIO < capacity / first_capacity < _EQUAL_CAPACITY_RATIO
        ):
            return 1.0
        return capacity / first_capacity


def plan_pools(
    pools: Sequence[PoolObservation], bounds: Mapping[str, PoolBounds]
) -> tuple[PlannedPool, ...]:
    """Pools whose replicas all do the same, the best first."""
    ordered = sorted(pools, key=lambda pool: _capacity_order(pool, Role.MIXED))
    return tuple(_plan_pool(pool, bounds) for pool in ordered)


def resize(planned_pools: Sequence[PlannedPool], replicas: int) -> None:
    """Have this many replicas in pools that all do the same, as far as bounds let them.

    The first pool is denied the rest.
    """
    current = sum(planned_pool.replicas for planned_pool in planned_pools)
    denied = _start_replicas(planned_pools, max(0, replicas - current), lambda _: 1.0)
    if planned_pools:
        planned_pools[0].denied = math.ceil(denied - _ROUNDING)
    surplus = max(0, current - replicas)
    for planned_pool in reversed(planned_pools):
        stopped = max(0, min(surplus, planned_pool.replicas - planned_pool.bounds.min))
        planned_pool.replicas -= stopped
        surplus -= stopped


def other_role(role: Role) -> Role:
    """The other role of the two."""
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def _plan_pool(pool: PoolObservation, bounds: Mapping[str, PoolBounds]) -> PlannedPool:
    size = pool.ready_replicas + pool.starting
    pool_bounds = bounds.get(pool.name, PoolBounds(min=size, initial=size, max=size))
    flipped = {Role.PREFILL: pool.decode, Role.DECODE: pool.prefill, Role.MIXED: 0}[pool.role]
    return PlannedPool(
        pool=pool, bounds=pool_bounds, replicas=size, flipped=flipped, flipped_before=flipped
    )


def _start_replicas(
    planned_pools: Sequence[PlannedPool], replicas: float, weight: Callable[[PlannedPool], float]
) -> float:
    remaining = replicas
    for planned_pool in planned_pools:
        if remaining <= _ROUNDING:
            break
        started = min(
            planned_pool.free_slots, math.ceil(remaining / weight(planned_pool) - _ROUNDING)
        )
        planned_pool.replicas += started
        remaining -= started * weight(planned_pool)
    return max(0.0, remaining)


def _capacity(pool: PoolObservation, role: Role) -> float | None:
    return pool.decode_tokens_per_s if role is Role.DECODE else pool.prefill_tokens_per_s


def _capacity_order(pool: PoolObservation, role: Role) -> tuple[int, str]:
    """Sort key: performance of a GPU, in coarse steps; then the name."""
    capacity_per_gpu = (_capacity(pool, role) or 1.0) / pool.gpus_per_replica
    return (-round(math.log2(capacity_per_gpu)), pool.name)
