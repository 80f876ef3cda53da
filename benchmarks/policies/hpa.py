"""Kubernetes' horizontal pod autoscaler, on how busy replicas are.

Source: https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ (algorithm
details, default behaviour), autoscaling/v2.

    autoscaler: {policy: "benchmarks.policies.hpa:Hpa"}
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.estimators.windows import SlidingMax
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions

TARGET = 0.8
"""Without a setting: `kubectl autoscale`'s default of 80 %."""
TOLERANCE = 0.1
STABILIZATION_S = 300.0
PERIOD_S = 15.0
"""Between two decisions, and of the policies that bound how fast it goes up."""
_UP_REPLICAS = 4
_UP_FACTOR = 2.0


class Hpa:
    """`ceil(replicas * utilization / target)`, but for what is within 10 % of it.

    Up to double or four more in 15 s, whichever is more; down to the most that was recommended in
    five minutes. Replicas that start count as idle when it would go up.
    """

    name = "hpa"

    def __init__(self, options: AutoscalerOptions, *, target: float = TARGET) -> None:
        """Aim at a utilization; bounds are the autoscaler's."""
        del options
        self._target = target
        self._pools: dict[str, Stabilized] = {}
        self._kept: dict[str, DesiredReplicas] = {}
        self._at_s: float | None = None

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """Once in 15 s; the same in between."""
        if self._at_s is None or not 0 <= observation.at_s - self._at_s < PERIOD_S:
            self._at_s = observation.at_s
            self._kept = {
                name: self._want(observation.at_s, pool) for name, pool in observation.pools.items()
            }
        return self._kept

    def _want(self, at_s: float, pool: PoolObservation) -> DesiredReplicas:
        have = pool.ready_replicas + pool.starting
        busy = pool.utilization_fraction
        desired = have if busy is None else _desired(pool, have, busy / self._target)
        stabilized = self._pools.setdefault(pool.name, Stabilized())
        return DesiredReplicas(
            replicas=stabilized.next(at_s, have=have, desired=desired),
            reason=ScalingReason.UTILIZATION,
            detail="busy is not known"
            if busy is None
            else f"{busy:.0%} busy, {self._target:.0%} aimed",
            inputs={} if busy is None else {"busy_fraction": busy, "desired": desired},
        )


class Stabilized:
    """What the autoscaler makes of a recommendation: at most so fast up, and slowly down."""

    def __init__(self) -> None:
        self._recommended = SlidingMax(STABILIZATION_S)

    def next(self, at_s: float, *, have: int, desired: int) -> int:
        """How many to have now."""
        stable = round(self._recommended.push(at_s, desired))
        if desired > have:
            return min(desired, max(have + _UP_REPLICAS, math.ceil(have * _UP_FACTOR)))
        return min(have, stable)


def _desired(pool: PoolObservation, have: int, ratio: float) -> int:
    if abs(ratio - 1.0) <= TOLERANCE:
        return have
    if ratio < 1.0:
        return math.ceil(pool.ready_replicas * ratio)
    diluted = ratio * pool.ready_replicas / max(have, 1)  # a starting replica is taken to be idle
    return have if diluted <= 1.0 + TOLERANCE else math.ceil(have * diluted)
