"""An oracle of the future: the fewest replicas that any policy could have had ready in time.

Simulated only. What a live policy has to pay more than this is the price of not knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.estimators.stabilization import whole_replicas
from baton.policy.scaling.needs import objective_of
from baton.policy.scaling.observation import Demand, Observation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.pools.groups import PoolGroups, TokenRates, group_needs, pool_groups
from benchmarks._fluid_pools import FluidCapacity
from benchmarks.policies.spread import spread

_AT_RANDOM = 2.0


class Oracle:
    """Has ready what the greatest demand within one cold start needs, by the formulas of `slo`."""

    name = "oracle"

    def __init__(
        self,
        options: AutoscalerOptions,
        demand: Callable[[float], Demand],
        *,
        capacity: Callable[[float], FluidCapacity] | None = None,
        every_s: float = 10.0,
        squared_variation: float = _AT_RANDOM,
    ) -> None:
        """Know what will be asked for, by the time that observations go by.

        Args:
            options: Whose bounds hold.
            demand: At a time.
            capacity: Of a replica of any pool for the requests of a time; None: as observed.
            every_s: How closely the future is looked at.
            squared_variation: Of arrivals and prompts together, see `irregular`.
        """
        self._options = options
        self._demand = demand
        self._capacity = capacity
        self._every_s = every_s
        self._variation = squared_variation

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """What every pool should have."""
        groups = pool_groups(observation, self._options.bounds)
        objectives = objective_of(observation, self._variation)
        most = dict.fromkeys(groups.reference_pools(), 0.0)
        for at_s in self._times(observation):
            demand = self._demand(at_s)
            groups_then = self._groups(observation, at_s)
            rates = TokenRates(
                prompt_tokens_per_s=demand.prompt_tokens_per_s,
                output_tokens_per_s=demand.output_tokens_per_s,
            )
            needs = group_needs(
                groups_then, objectives, rates, mean_tokens=demand.mean_uncached_tokens
            )
            most = {role: max(most[role], need or 0.0) for role, need in needs.items()}
        return spread(
            groups,
            {role: whole_replicas(need) for role, need in most.items()},
            reason=ScalingReason.ORACLE,
            inputs={f"need_{role}": need for role, need in most.items()},
        )

    def _groups(self, observation: Observation, at_s: float) -> PoolGroups:
        """Pools with their capacities for the requests of a time."""
        if self._capacity is not None:
            then = self._capacity(at_s)
            pools = {
                name: replace(
                    pool,
                    prefill_tokens_per_s=then.prefill_tokens_per_s,
                    decode_tokens_per_s=then.decode_tokens_per_s,
                    decode_streams=then.max_streams,
                )
                for name, pool in observation.pools.items()
            }
            observation = replace(observation, pools=pools)
        return pool_groups(observation, self._options.bounds)

    def _times(self, observation: Observation) -> list[float]:
        """From now until a replica that is started now is ready, and a tick longer."""
        cold_s = max((pool.cold_start_s for pool in observation.pools.values()), default=0.0)
        steps = max(1, round((cold_s + self._options.interval_s) / self._every_s))
        return [observation.at_s + step * self._every_s for step in range(steps + 1)]
