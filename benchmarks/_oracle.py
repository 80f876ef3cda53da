"""Who knows the future: the fewest replicas that any policy could have had ready in time.

Simulated only. What a live policy has to pay more than this is the price of not knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from baton.policy.scaling.desired import ScalingReason, Want
from baton.policy.scaling.estimators.stabilization import whole
from baton.policy.scaling.needs import promise_of
from baton.policy.scaling.observation import Demand, Observation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.pools.groups import Rates, group_needs, groups_of
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
        every_s: float = 10.0,
        squared_variation: float = _AT_RANDOM,
    ) -> None:
        """Know what will be asked for, by the time that observations go by.

        Args:
            options: Whose bounds hold.
            demand: At a time.
            every_s: How closely the future is looked at.
            squared_variation: Of arrivals and prompts together, see `irregular`.
        """
        self._options = options
        self._demand = demand
        self._every_s = every_s
        self._variation = squared_variation

    def wants(self, seen: Observation) -> Mapping[str, Want]:
        """What every pool should have."""
        groups = groups_of(seen, self._options.bounds)
        promise = promise_of(seen, self._variation)
        most = dict.fromkeys(groups.firsts(), 0.0)
        for demand in self._foreseen(seen):
            rates = Rates(prompts=demand.prompt_tokens_per_s, outputs=demand.output_tokens_per_s)
            needs = group_needs(groups, promise, rates, mean_tokens=demand.mean_uncached_tokens)
            most = {role: max(most[role], need or 0.0) for role, need in needs.items()}
        return spread(
            groups,
            {role: whole(need) for role, need in most.items()},
            reason=ScalingReason.FORESEEN,
            inputs={f"need_{role}": need for role, need in most.items()},
        )

    def _foreseen(self, seen: Observation) -> Iterator[Demand]:
        """Everything from now until a replica that is started now is ready, and a tick longer."""
        cold_s = max((pool.cold_start_s for pool in seen.pools.values()), default=0.0)
        steps = max(1, round((cold_s + self._options.interval_s) / self._every_s))
        for step in range(steps + 1):
            yield self._demand(seen.at_s + step * self._every_s)
