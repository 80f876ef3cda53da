"""Pools by model and by need, and the need of each group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.domain.fleet import Role
from baton.policy.scaling.desired import DesiredReplicas, ScalingPolicy
from baton.policy.scaling.needs import (
    Objective,
    decode_replicas,
    prefill_replicas,
    streams_per_replica,
)
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import PoolBounds
from baton.policy.scaling.pools.pool_assignment import PlannedPool, PoolAssignment, plan_pools

SPLIT_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRates:
    """Tokens a second: prompts to be computed, and tokens to be generated."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroups:
    """Pools that prefill, pools that decode, and pools that do both."""

    assignment: PoolAssignment | None
    """None unless there are both of the former; the pools of one role alone do both."""
    mixed: tuple[PlannedPool, ...]

    def pools(self, role: Role) -> list[PoolObservation]:
        """A group's, the best first."""
        if role is Role.MIXED or self.assignment is None:
            return [planned_pool.pool for planned_pool in self.mixed]
        return [planned_pool.pool for planned_pool in self.assignment.planned[role]]

    def reference_pools(self) -> dict[Role, PoolObservation]:
        """Each group's best pool, in whose replicas its need is counted."""
        split = () if self.assignment is None else SPLIT_ROLES
        roles = (*split, Role.MIXED) if self.mixed else split
        return {role: self.pools(role)[0] for role in roles}

    def replicas(self, role: Role) -> int:
        """Replicas that play a role, or will when started."""
        if role is Role.MIXED or self.assignment is None:
            return sum(planned_pool.replicas for planned_pool in self.mixed)
        return self.assignment.whole_replicas(role)


def pool_groups(observation: Observation, bounds: Mapping[str, PoolBounds]) -> PoolGroups:
    """The groups that there are."""
    pools = [observation.pools[name] for name in sorted(observation.pools)]
    split = [pool for pool in pools if pool.role is not Role.MIXED]
    if {pool.role for pool in split} != set(SPLIT_ROLES):
        return PoolGroups(assignment=None, mixed=plan_pools(pools, bounds))
    mixed = [pool for pool in pools if pool.role is Role.MIXED]
    return PoolGroups(assignment=PoolAssignment(split, bounds), mixed=plan_pools(mixed, bounds))


def group_needs(
    groups: PoolGroups, objective: Objective, rates: TokenRates, *, mean_tokens: float
) -> dict[Role, float | None]:
    """Replicas of each group's best pool; None where its capacity is not known.

    Pools that do both get what those that do one thing may not grow large enough for.
    """
    reference_pools, assignment = groups.reference_pools(), groups.assignment
    needs: dict[Role, float | None] = {}
    prompts, outputs = rates.prompt_tokens_per_s, rates.output_tokens_per_s
    if assignment is not None:
        prefill, decode = reference_pools[Role.PREFILL], reference_pools[Role.DECODE]
        needs[Role.PREFILL] = prefill_need = prefill_replicas(
            prefill, objective, tokens_per_s=prompts, mean_tokens=mean_tokens
        )
        needs[Role.DECODE] = decode_need = decode_replicas(decode, objective, tokens_per_s=outputs)
        prompts *= _unmet_fraction(prefill_need, assignment.max_effective_replicas(Role.PREFILL))
        outputs *= _unmet_fraction(decode_need, assignment.max_effective_replicas(Role.DECODE))
    if Role.MIXED in reference_pools:
        mixed_pool = reference_pools[Role.MIXED]
        prefill_need = prefill_replicas(
            mixed_pool, objective, tokens_per_s=prompts, mean_tokens=mean_tokens
        )
        decode_need = decode_replicas(mixed_pool, objective, tokens_per_s=outputs)
        needs[Role.MIXED] = (
            None if prefill_need is None or decode_need is None else prefill_need + decode_need
        )
    return needs


def occupied_replicas(
    pools: list[PoolObservation], objective: Objective, *, queued_requests: int
) -> float:
    """The replicas of the first pool that running and held streams occupy.

    Admission lets no more streams run than keep their pace: a role that is short of replicas shows
    it by who waits.
    """
    running = queued_requests + sum(pool.running_requests * pool.ready_replicas for pool in pools)
    if pools[0].decode_tokens_per_s is None:
        return 0.0
    return running / streams_per_replica(pools[0], objective.tpot_s)


def _unmet_fraction(need: float | None, max_replicas: float) -> float:
    return 0.0 if need is None or need <= max_replicas else 1.0 - max_replicas / need


class PerModelPolicy:
    """Asks a policy of its own for each model; where there is one model, that one for all.

    Demand for one model tells nothing about the pools of another. They share GPUs: the autoscaler
    grants the desired replicas of all of them together, within one budget.
    """

    def __init__(self, make: Callable[[], ScalingPolicy]) -> None:
        self._factory = make
        self._policies: dict[str, ScalingPolicy] = {}
        self.name = make().name

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """The desired replicas of every pool in `observation`."""
        desired_by_pool: dict[str, DesiredReplicas] = {}
        for model, model_observation in (observation.models or {"": observation}).items():
            if model not in self._policies:
                self._policies[model] = self._factory()
            desired_by_pool |= self._policies[model].desired(model_observation)
        return desired_by_pool
