"""From so many replicas for each group of pools to so many in each pool."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.fleet import Role
from baton.policy.scaling.desired import ScalingReason, Want
from baton.policy.scaling.pools.groups import SPLIT_ROLES, Groups
from baton.policy.scaling.pools.pool_assignment import resize


def spread(
    groups: Groups,
    replicas: Mapping[Role, int],
    *,
    reason: ScalingReason,
    inputs: Mapping[str, float],
) -> dict[str, Want]:
    """The best pool of a group grows first, and the worst shrinks first; nothing flips."""
    roster = groups.roster
    if roster is not None:
        for role in SPLIT_ROLES:
            lacking = replicas[role] - roster.players(role)
            if lacking > 0:
                roster.grow(role, lacking)
            else:
                roster.shrink(role, -lacking)
    if groups.mixed:
        resize(groups.mixed, replicas[Role.MIXED])
    return {
        seat.pool.name: Want(replicas=seat.size, reason=reason, inputs=inputs)
        for seat in (*groups.mixed, *(roster.all_seats() if roster is not None else ()))
    }
