"""NVIDIA Dynamo's planner: demand over profiled throughput, and one more when everybody is late.

Source: ai-dynamo/dynamo 0.8, components/planner (the rules with correction factors), and 1.6,
planner/core (the load-based loop, its bounds, and which of the two is the floor).

    autoscaler: {policy: "benchmarks.policies.dynamo_planner:DynamoPlanner"}
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from baton.domain.fleet import Role
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.observation import Demand, Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.pools.groups import PoolGroups, pool_groups
from benchmarks.policies.spread import spread

ADJUSTMENT_S = 180.0
LOAD_S = 5.0
MAX_STEP = 8
SENSITIVITY = 0.8
"""One less only if all stay below this part of the objective afterwards."""


class DynamoPlanner:
    """Two loops.

    Every three minutes, by throughput: n_P = ceil(rate ISL min(1, c) / V_P) and
    n_D = ceil(rate OSL / V_D), for the mean of the last three minutes (its constant predictor), by
    at most eight; c is observed over expected TTFT. Every five seconds, by load: one more while the
    latency of all exceeds the objective, one less while it would stay under 80 % of it; not while
    anything starts, and never below what the first loop says.
    """

    name = "dynamo"

    def __init__(self, options: AutoscalerOptions) -> None:
        self._bounds = options.bounds
        self._seen: deque[tuple[float, Demand]] = deque()
        self._floors: dict[Role, int] = {}
        self._planned_s: float | None = None
        self._stepped_s: float | None = None

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """What every pool should have."""
        self._seen.append((observation.at_s, observation.demand))
        while self._seen[0][0] <= observation.at_s - ADJUSTMENT_S:
            self._seen.popleft()
        groups = pool_groups(observation, self._bounds)
        counts = {role: groups.replicas(role) for role in groups.reference_pools()}
        if self._is_due(observation.at_s, self._planned_s, ADJUSTMENT_S):
            self._planned_s = observation.at_s
            counts = self._floors = {
                role: self._planned(observation, role, pool, counts[role])
                for role, pool in groups.reference_pools().items()
            }
        elif self._is_due(observation.at_s, self._stepped_s, LOAD_S):
            self._stepped_s = observation.at_s
            counts = {role: self._stepped(observation, groups, role) for role in counts}
        inputs = {f"floor_{role}": float(count) for role, count in self._floors.items()}
        return spread(groups, counts, reason=ScalingReason.LATENCY, inputs=inputs)

    def _is_due(self, at_s: float, last_s: float | None, every_s: float) -> bool:
        return last_s is None or not 0 <= at_s - last_s < every_s

    def _planned(
        self, observation: Observation, role: Role, pool: PoolObservation, have: int
    ) -> int:
        prompts = sum(demand.prompt_tokens_per_s for _, demand in self._seen) / len(self._seen)
        outputs = sum(demand.output_tokens_per_s for _, demand in self._seen) / len(self._seen)
        prefill, decode = pool.prefill_tokens_per_s, pool.decode_tokens_per_s
        if (prefill is None and role is not Role.DECODE) or (
            decode is None and role is not Role.PREFILL
        ):
            return have
        load = 0.0
        if role is not Role.DECODE and prefill is not None:
            load += prompts * min(1.0, _correction(observation, prefill)) / prefill
        if role is not Role.PREFILL and decode is not None:
            load += outputs / decode
        return min(max(math.ceil(load), 1, have - MAX_STEP), have + MAX_STEP)

    def _stepped(self, observation: Observation, groups: PoolGroups, role: Role) -> int:
        have, floor = groups.replicas(role), self._floors.get(role, 1)
        if any(pool.starting for pool in groups.pools(role)):
            return max(have, floor)
        ratios = [
            got_s / objective_s
            for got_s, objective_s, of in (
                (observation.service.ttft_mean_s, observation.ttft_s, Role.PREFILL),
                (observation.service.tpot_mean_s, observation.tpot_s, Role.DECODE),
            )
            if got_s is not None and objective_s is not None and role in {of, Role.MIXED}
        ]
        if ratios and max(ratios) > 1.0:
            return max(have + 1, floor)
        if ratios and have > 1 and max(ratios) * have / (have - 1) < SENSITIVITY:
            return max(have - 1, floor)
        return max(have, floor)


def _correction(observation: Observation, capacity: float) -> float:
    """Observed over expected TTFT; below 1 what is cached shows, for it knows of no hits."""
    expected_s = observation.demand.mean_uncached_tokens / capacity
    got_s = observation.service.ttft_mean_s
    return 1.0 if got_s is None or expected_s <= 0 else got_s / expected_s
