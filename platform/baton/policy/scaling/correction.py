"""By how much needs are raised because requests are late although there should be enough."""

from __future__ import annotations

import math

from baton.domain.fleet import Role
from baton.policy.scaling.observation import Observation

_STEP = 1.1
_STEP_INTERVAL_S = 60.0
"""A step is given so long to show before the next."""
_DECAY_S = 1800.0
_MIN_REQUESTS = 20
"""Fewer in a window say too little about a share."""


class CapacityCorrection:
    """A factor on one role's need, from 1 to a bound.

    Theory of operation. Capacities come from models, and models err. While attainment is below its
    target, this role's objective the worse kept one, and the role has for a minute had all that
    its need called for, the factor goes up a tenth a minute; otherwise it fades, with a time
    constant of half an hour.
    """

    def __init__(self, max_factor: float) -> None:
        self.factor = 1.0
        self._max_factor = max(1.0, max_factor)
        self._updated_at_s: float | None = None
        self._unexplained_since_s: float | None = None

    def update(self, at_s: float, *, is_unexplained: bool) -> None:
        """Take in whether requests are late now for a reason that needs do not explain."""
        elapsed_s = 0.0 if self._updated_at_s is None else max(0.0, at_s - self._updated_at_s)
        self._updated_at_s = at_s
        if not is_unexplained:
            self._unexplained_since_s = None
            self.factor = 1.0 + (self.factor - 1.0) * math.exp(-elapsed_s / _DECAY_S)
        elif self._unexplained_since_s is None or self._unexplained_since_s > at_s:
            self._unexplained_since_s = at_s
        elif at_s - self._unexplained_since_s >= _STEP_INTERVAL_S:
            self._unexplained_since_s = at_s
            self.factor = min(self._max_factor, self.factor * _STEP)


def is_miss_unexplained(observation: Observation, role: Role) -> bool:
    """Whether the target is missed, and more on account of this role than of the other."""
    service = observation.service
    if service.attainment is None or service.attainment >= observation.attainment_target:
        return False
    if observation.demand.requests_per_s * observation.window_s < _MIN_REQUESTS:
        return False
    ttft_ratio = _objective_ratio(service.ttft_p90_s, observation.ttft_s)
    tpot_ratio = _objective_ratio(service.tpot_p90_s, observation.tpot_s)
    match role:
        case Role.PREFILL:
            return ttft_ratio >= tpot_ratio
        case Role.DECODE:
            return tpot_ratio > ttft_ratio
        case Role.MIXED:
            return True


def _objective_ratio(measured_s: float | None, objective_s: float | None) -> float:
    return 0.0 if measured_s is None or objective_s is None else measured_s / objective_s
