"""A scaling policy for each of several models, as if each were alone.

What one model is asked for says nothing about the pools of another. What they do share is GPUs: the
autoscaler grants what all of them want together, within one budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.policy.scaling.desired import DesiredReplicas, ScalingPolicy
from baton.policy.scaling.observation import Observation


class PerModelPolicy:
    """Asks a policy of its own for each model; where there is one model, that one for all."""

    def __init__(self, make: Callable[[], ScalingPolicy]) -> None:
        self._factory = make
        self._policies: dict[str, ScalingPolicy] = {}
        self.name = make().name

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """What every pool in `observation` should have."""
        desired_by_pool: dict[str, DesiredReplicas] = {}
        for model, model_observation in (observation.models or {"": observation}).items():
            if model not in self._policies:
                self._policies[model] = self._factory()
            desired_by_pool |= self._policies[model].desired(model_observation)
        return desired_by_pool
