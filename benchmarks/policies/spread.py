"""From replicas for each group of pools to replicas in each pool."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.fleet import Role
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.pools.groups import SPLIT_ROLES, PoolGroups
from baton.policy.scaling.pools.pool_assignment import resize


def spread(
    groups: PoolGroups,
    replicas: Mapping[Role, int],
    *,
    reason: ScalingReason,
    inputs: Mapping[str, float],
) -> dict[str, DesiredReplicas]:
    """The best pool of a group grows first, and the worst shrinks first; nothing flips."""
    roster = groups.assignment
    if roster is not None:
        for role in SPLIT_ROLES:
            lacking = replicas[role] - roster.whole_replicas(role)
            if lacking > 0:
                roster.grow(role, lacking)
            else:
                roster.shrink(role, -lacking)
    if groups.mixed:
        resize(groups.mixed, replicas[Role.MIXED])
    planned = (
        () if roster is None else (pool for role in SPLIT_ROLES for pool in roster.planned[role])
    )
    return {
        planned_pool.pool.name: DesiredReplicas(
            replicas=planned_pool.replicas, reason=reason, inputs=inputs
        )
        for planned_pool in (*groups.mixed, *planned)
    }
