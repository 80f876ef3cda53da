"""Whether replicas should play another role: the cheapest way to help a role that is short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.domain.fleet import Role
from baton.policy.scaling.estimators.stabilization import headroom_replicas, whole_replicas
from baton.policy.scaling.estimators.windows import SlidingMax
from baton.policy.scaling.observation import Observation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.pools.pool_assignment import PoolAssignment, other_role

_ROLES = (Role.PREFILL, Role.DECODE)
_MIN_GAIN_RATIO = 1.1
"""By how much the worse served role must be better served when both are short: a flip is not free,
and a tenth is more than capacities waver."""
_PREFILL_ON_DECODE_FRACTION = 0.5
"""Of a prefill replica's prompts, what a decode replica computes between the steps of streams, in
small chunks. Not the other way round: large chunks hold up a stream for longer than its objective.
Source: three of each under code completions, which need 5.2 and 0.2, serve 0.84 of them (S,
`hybrid 3P3D` of `make bench-slo`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipResult:
    """The result of a tick."""

    role: Role
    flipped: int = 0
    pending: int = 0
    """More that will be, if what is to spare now still is when the window is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeeds:
    """Of both roles, in replicas."""

    greatest: Mapping[Role, float | None]
    """With the forecast; None: not known, and nothing flips."""
    present: Mapping[Role, float]
    """Without the forecast, as it is or will be within seconds: a flip is done long before the
    horizon of starts."""


class RoleRebalancer:
    """Decides on flips.

    Theory of operation. Of two roles that are short, the worse served role is helped. A replica
    flips to it when the other role keeps its need, and the greatest need of the last
    `flip_window_s`: a stream that ended just now says nothing. Where replicas can be started, it
    keeps the headroom of a stop, too, so that needs which waver undo no flip. Replicas that become
    free soon are waited for as long, instead of starting others: a flip takes less. Where nothing
    can be started, for want of GPUs or within bounds, a shortage is shared by the roles' needs of
    the last `flip_urgent_s`. The number of flips is the best for the worse served role, if that is
    better by a tenth. Requests pay for every second then, and rates are means over half a minute.
    Between a flip and a flip in the other direction there is a dwell, so that the cost of a flip
    (the replica's streams end first) is earned back.

    Source: the flip of TaiChi (arXiv 2508.01989) and Arrow (arXiv 2505.11916), with this trigger.
    """

    def __init__(self, options: AutoscalerOptions) -> None:
        slo = options.slo
        self._options = options
        self._greatest = {role: SlidingMax(slo.flip_window_s) for role in _ROLES}
        self._present = {role: SlidingMax(slo.flip_urgent_s) for role in _ROLES}
        self._observed_since_s: float | None = None
        self._last_flip: tuple[float, Role] | None = None

    def flip(
        self,
        observation: Observation,
        assignment: PoolAssignment,
        needs: RoleNeeds,
        lacking: Mapping[Role, int],
    ) -> FlipResult:
        """Flip what should be, in the roster.

        Args:
            observation: Of the tick.
            assignment: As it is now.
            needs: As they are now.
            lacking: How many players each role is short of.
        """
        recent_peaks = self._recent_peaks(observation.at_s, needs)
        short_role = _worse_served(assignment, needs.present, lacking)
        is_need_unknown = None in needs.greatest.values()
        if is_need_unknown or not self._options.slo.flips or lacking[short_role] <= 0:
            return FlipResult(role=short_role)
        if not self._is_dwell_over(observation.at_s, short_role):
            return FlipResult(role=short_role)
        can_start = self._can_start(observation, assignment, short_role)
        count = self._flip_count(
            observation.at_s,
            assignment,
            short_role,
            lacking[short_role],
            recent_peaks,
            can_start=can_start,
        )
        flipped = assignment.flip(short_role, count) if count > 0 else 0
        if flipped:
            self._last_flip = (observation.at_s, short_role)
        other_role_need = self._kept_replicas(
            needs.greatest[other_role(short_role)], can_start=can_start
        )
        pending = min(
            lacking[short_role] - flipped,
            assignment.whole_replicas(other_role(short_role)) - other_role_need,
        )
        return FlipResult(role=short_role, flipped=flipped, pending=max(0, pending))

    def _recent_peaks(self, at_s: float, needs: RoleNeeds) -> RoleNeeds:
        """The most of each in its window."""
        if self._observed_since_s is None or self._observed_since_s > at_s:
            self._observed_since_s = at_s
        return RoleNeeds(
            greatest={
                role: self._greatest[role].push(at_s, needs.greatest[role] or 0.0)
                for role in _ROLES
            },
            present={role: self._present[role].push(at_s, needs.present[role]) for role in _ROLES},
        )

    def _is_dwell_over(self, at_s: float, target_role: Role) -> bool:
        """Whether the last flip the other way is long enough ago."""
        if self._last_flip is None or self._last_flip[1] is target_role:
            return True
        return not 0 <= at_s - self._last_flip[0] < self._options.slo.flip_dwell_s

    def _flip_count(
        self,
        at_s: float,
        assignment: PoolAssignment,
        role: Role,
        lacking: int,
        recent_peaks: RoleNeeds,
        *,
        can_start: bool,
    ) -> int:
        options, source_role = self._options.slo, other_role(role)
        observed_s = 0.0 if self._observed_since_s is None else at_s - self._observed_since_s
        surplus = assignment.whole_replicas(source_role) - self._kept_replicas(
            recent_peaks.greatest[source_role], can_start=can_start
        )
        if surplus > 0 and observed_s >= options.flip_window_s:
            return min(surplus, lacking)
        if observed_s < options.flip_urgent_s or can_start:
            return 0
        return _best_flip_count(assignment, role, recent_peaks.present, max_flips=lacking)

    def _kept_replicas(self, need: float | None, *, can_start: bool) -> int:
        """How many replicas a role keeps when it gives others away."""
        need = need or 0.0
        if can_start:
            need += headroom_replicas(need, self._options.scale_down.headroom_fraction)
        return max(1, whole_replicas(need))

    def _can_start(self, observation: Observation, assignment: PoolAssignment, role: Role) -> bool:
        growable = [
            planned_pool for planned_pool in assignment.planned[role] if planned_pool.free_slots > 0
        ]
        budget = self._options.gpu_budget
        if budget is None or not growable:
            return bool(growable)
        used = sum(
            (pool.ready_replicas + pool.starting + pool.draining) * pool.gpus_per_replica
            for pool in observation.pools.values()
        )
        return any(
            planned_pool.pool.gpus_per_replica <= budget - used + 1e-9 for planned_pool in growable
        )


def _worse_served(
    assignment: PoolAssignment, needs: Mapping[Role, float], lacking: Mapping[Role, int]
) -> Role:
    """The role to help: targets alone do not tell, for they go down late."""

    def shortage(role: Role) -> tuple[bool, float]:
        return lacking[role] > 0, needs[role] / max(assignment.effective_replicas(role), 1e-9)

    return max(lacking, key=shortage)


def _best_flip_count(
    assignment: PoolAssignment, role: Role, needs: Mapping[Role, float], *, max_flips: int
) -> int:
    """How many flips make the worse served of two roles, both short, served best."""
    served_fractions = [
        _served_fraction(assignment.with_flip(role, flips), needs)
        for flips in range(max(1, min(max_flips + 1, assignment.whole_replicas(other_role(role)))))
    ]
    best_count = max(
        range(len(served_fractions)), key=lambda flips: (served_fractions[flips], -flips)
    )
    return (
        best_count
        if served_fractions[best_count] > _MIN_GAIN_RATIO * max(served_fractions[0], 1e-9)
        else 0
    )


def _served_fraction(assignment: PoolAssignment, needs: Mapping[Role, float]) -> float:
    """How much of its need the worse served role has, prompts on spare decoders counted."""
    prefill, decode = needs[Role.PREFILL], needs[Role.DECODE]
    decode_replicas = assignment.effective_replicas(Role.DECODE)
    prefill_replicas = assignment.effective_replicas(
        Role.PREFILL
    ) + _PREFILL_ON_DECODE_FRACTION * max(0.0, decode_replicas - decode)
    return min(prefill_replicas / max(prefill, 1e-9), decode_replicas / max(decode, 1e-9))
