"""From what was decided for each pool to what is to be done, in order."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.fleet import Role
from baton.policy.scaling.actions import (
    Action,
    FlipReplicas,
    ScalingDecision,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.desired import ScalingReason
from baton.policy.scaling.observation import Observation, PoolObservation


def actions_of(decisions: tuple[ScalingDecision, ...], seen: Observation) -> tuple[Action, ...]:
    """Flips, then starts, then stops: the cheapest first."""
    flips: list[Action] = []
    starts: list[Action] = []
    stops: list[Action] = []
    for decision in decisions:
        if decision.reason not in {ScalingReason.HELD, ScalingReason.OVERRIDE}:
            flips.extend(_flips(seen.pools[decision.pool], decision.flips))
        difference = decision.want - decision.have
        if difference > 0:
            starts.append(StartReplicas(pool=decision.pool, replicas=difference))
        elif difference < 0:
            stops.append(StopReplicas(pool=decision.pool, replicas=-difference))
    return (*flips, *starts, *stops)


def _flips(pool: PoolObservation, wanted: Mapping[Role, int]) -> list[Action]:
    """What takes the pool from the roles that its replicas play to those that they should."""
    plays = {Role.PREFILL: pool.prefill, Role.DECODE: pool.decode, Role.MIXED: pool.mixed}
    spare = plays.pop(pool.role)
    flips: list[Action] = []
    for role, playing in plays.items():
        if (back := playing - wanted.get(role, 0)) > 0:
            flips.append(FlipReplicas(pool=pool.name, replicas=back, to=pool.role))
            spare += back
    for role, playing in plays.items():
        if (more := min(wanted.get(role, 0) - playing, spare)) > 0:
            flips.append(FlipReplicas(pool=pool.name, replicas=more, to=role))
            spare -= more
    return flips
