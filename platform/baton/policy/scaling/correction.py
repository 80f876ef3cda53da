"""By how much needs are raised because requests are late although there should be enough."""

from __future__ import annotations

import math

from baton.domain.fleet import Role
from baton.policy.scaling.observation import Observation

_STEP = 1.1
_EVERY_S = 60.0
"""A step is given so long to show before the next."""
_FADE_S = 1800.0
_FEWEST_REQUESTS = 20
"""Fewer in a window say too little about a share."""


class Correction:
    """A factor on one role's need, from 1 to a bound.

    Theory of operation. Capacities come from models, and models err. While attainment is below its
    target, this role's objective the worse kept one, and the role has for a minute had all that
    its need called for, the factor goes up a tenth a minute; otherwise it fades, with a time
    constant of half an hour.
    """

    def __init__(self, most: float) -> None:
        self.factor = 1.0
        self._most = max(1.0, most)
        self._at_s: float | None = None
        self._wrong_since_s: float | None = None

    def update(self, at_s: float, *, wrong: bool) -> None:
        """Take in whether requests are late now for a reason that needs do not explain."""
        passed_s = 0.0 if self._at_s is None else max(0.0, at_s - self._at_s)
        self._at_s = at_s
        if not wrong:
            self._wrong_since_s = None
            self.factor = 1.0 + (self.factor - 1.0) * math.exp(-passed_s / _FADE_S)
        elif self._wrong_since_s is None or self._wrong_since_s > at_s:
            self._wrong_since_s = at_s
        elif at_s - self._wrong_since_s >= _EVERY_S:
            self._wrong_since_s = at_s
            self.factor = min(self._most, self.factor * _STEP)


def is_unexplained(seen: Observation, role: Role) -> bool:
    """Whether the target is missed, and more on account of this role than of the other."""
    service = seen.service
    if service.attainment is None or service.attainment >= seen.attainment_target:
        return False
    if seen.demand.requests_per_s * seen.window_s < _FEWEST_REQUESTS:
        return False
    ttft = _over(service.ttft_p90_s, seen.ttft_s)
    tpot = _over(service.tpot_p90_s, seen.tpot_s)
    match role:
        case Role.PREFILL:
            return ttft >= tpot
        case Role.DECODE:
            return tpot > ttft
        case Role.MIXED:
            return True


def _over(got_s: float | None, objective_s: float | None) -> float:
    return 0.0 if got_s is None or objective_s is None else got_s / objective_s
