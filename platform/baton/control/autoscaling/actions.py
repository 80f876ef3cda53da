"""From what was decided for each pool to what is to be done, in order."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.fleet import Role
from baton.policy.scaling.actions import (
    FlipReplicas,
    ScalingAction,
    ScalingDecision,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.desired import ScalingReason
from baton.policy.scaling.observation import Observation, PoolObservation


def actions_of(
    decisions: tuple[ScalingDecision, ...], observation: Observation
) -> tuple[ScalingAction, ...]:
    """Flips, then starts, then stops: the cheapest first."""
    flips: list[ScalingAction] = []
    starts: list[ScalingAction] = []
    stops: list[ScalingAction] = []
    for decision in decisions:
        if decision.reason not in {ScalingReason.PAUSED, ScalingReason.OVERRIDE}:
            flips.extend(_flips(observation.pools[decision.pool], decision.role_flips))
        difference = decision.target_replicas - decision.current_replicas
        if difference > 0:
            starts.append(StartReplicas(pool=decision.pool, replicas=difference))
        elif difference < 0:
            stops.append(StopReplicas(pool=decision.pool, replicas=-difference))
    return (*flips, *starts, *stops)


def _flips(pool: PoolObservation, desired_roles: Mapping[Role, int]) -> list[ScalingAction]:
    """What takes the pool from the roles that its replicas play to those that they should."""
    replicas_by_role = {
        Role.PREFILL: pool.prefill,
        Role.DECODE: pool.decode,
        Role.MIXED: pool.mixed,
    }
    spare = replicas_by_role.pop(pool.role)
    flips: list[ScalingAction] = []
    for role, replicas in replicas_by_role.items():
        if (surplus := replicas - desired_roles.get(role, 0)) > 0:
            flips.append(FlipReplicas(pool=pool.name, replicas=surplus, role=pool.role))
            spare += surplus
    for role, replicas in replicas_by_role.items():
        if (missing := min(desired_roles.get(role, 0) - replicas, spare)) > 0:
            flips.append(FlipReplicas(pool=pool.name, replicas=missing, role=role))
            spare -= missing
    return flips
