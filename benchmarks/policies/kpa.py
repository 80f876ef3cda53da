"""Knative's pod autoscaler, on concurrency, with its panic window.

Source: https://knative.dev/docs/serving/autoscaling/kpa-specific/ (windows, rates, thresholds and
their defaults) and knative.dev/serving pkg/autoscaler/scaling/autoscaler.go (the order in which
they apply).

    autoscaler: {policy: "benchmarks.policies.kpa:Kpa"}
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from baton.domain.fleet import Role
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions

STABLE_S = 60.0
PANIC_S = 6.0
PANIC_THRESHOLD = 2.0
MAX_UP_RATE = 1000.0
MAX_DOWN_RATE = 2.0
UTILIZATION = 0.7
"""Of the concurrency that a replica can take: container-concurrency-target-percentage."""
DEFAULT_CONCURRENCY = 100.0
"""container-concurrency-target-default: where how many streams a replica takes is not known."""


class Kpa:
    """Concurrency over target, on average of a minute; of six seconds when that is twice as much.

    A replica that prefills can take one prompt at a time, one that decodes the most streams that
    meet the objective. Knative knows nothing of either; without them it would be hopeless.
    """

    name = "kpa"

    def __init__(self, options: AutoscalerOptions) -> None:
        """Nothing is taken from the options: bounds are the autoscaler's."""
        del options
        self._pools: dict[str, _Scaler] = {}

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """What every pool should have."""
        return {
            name: self._pools.setdefault(name, _Scaler()).want(observation.at_s, pool)
            for name, pool in observation.pools.items()
        }


class _Scaler:
    """One pool's windows."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        self._panic_since_s: float | None = None
        self._most_in_panic = 0

    def want(self, at_s: float, pool: PoolObservation) -> DesiredReplicas:
        concurrency = (pool.running_requests + pool.queued_requests) * pool.ready_replicas
        self._note(at_s, concurrency)
        target = _concurrency(pool) * UTILIZATION
        stable, panic = self._mean(at_s, STABLE_S), self._mean(at_s, PANIC_S)
        ready = max(1, pool.ready_replicas)
        most, least = math.ceil(MAX_UP_RATE * ready), math.floor(ready / MAX_DOWN_RATE)
        by_stable = min(max(math.ceil(stable / target), least), most)
        by_panic = min(max(math.ceil(panic / target), least), most)
        if math.ceil(panic / target) / ready >= PANIC_THRESHOLD:
            self._panic_since_s = at_s
        elif self._panic_since_s is not None and at_s - self._panic_since_s > STABLE_S:
            self._panic_since_s, self._most_in_panic = None, 0
        replicas, reason = by_stable, ScalingReason.CONCURRENCY
        if self._panic_since_s is not None:
            self._most_in_panic = max(self._most_in_panic, by_panic, by_stable, ready)
            replicas, reason = self._most_in_panic, ScalingReason.PANIC
        return DesiredReplicas(
            replicas=replicas,
            reason=reason,
            detail=(
                f"{stable:.1f} at once in a minute, {panic:.1f} now, {target:.1f} for each replica"
            ),
            inputs={"stable": stable, "panic": panic, "target": target},
        )

    def _note(self, at_s: float, concurrency: float) -> None:
        if self._seen and at_s < self._seen[-1][0]:
            self._seen.clear()
            self._panic_since_s = None
        self._seen.append((at_s, concurrency))
        while self._seen[0][0] <= at_s - STABLE_S:
            self._seen.popleft()

    def _mean(self, at_s: float, window_s: float) -> float:
        values = [value for when_s, value in self._seen if when_s > at_s - window_s]
        return sum(values) / len(values)


def _concurrency(pool: PoolObservation) -> float:
    if pool.role is Role.PREFILL:
        return 1.0
    return pool.decode_streams or DEFAULT_CONCURRENCY
