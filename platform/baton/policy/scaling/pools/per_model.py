"""A scaling policy for each of several models, as if each were alone.

What one model is asked for says nothing about the pools of another. What they do share is GPUs: the
autoscaler grants what all of them want together, within one budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.policy.scaling.desired import ScalingPolicy, Want
from baton.policy.scaling.observation import Observation


class PerModel:
    """Asks a policy of its own for each model; where there is one model, that one for all."""

    def __init__(self, make: Callable[[], ScalingPolicy]) -> None:
        self._make = make
        self._of: dict[str, ScalingPolicy] = {}
        self.name = make().name

    def wants(self, seen: Observation) -> Mapping[str, Want]:
        """What every pool in `seen` should have."""
        found: dict[str, Want] = {}
        for model, part in (seen.models or {"": seen}).items():
            if model not in self._of:
                self._of[model] = self._make()
            found |= self._of[model].wants(part)
        return found
