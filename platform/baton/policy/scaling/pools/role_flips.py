"""Whether replicas should play another role: the cheapest way to help a role that is short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.domain.fleet import Role
from baton.policy.scaling.estimators.stabilization import whole
from baton.policy.scaling.estimators.windows import SlidingMax
from baton.policy.scaling.observation import Observation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.pools.pool_assignment import Roster, other

_ROLES = (Role.PREFILL, Role.DECODE)
_GAIN = 1.1
"""By how much the worse served role must be better served when both are short: a flip is not free,
and a tenth is more than capacities waver."""
_DEFLECTED = 0.5
"""Of a prefill replica's prompts, what a decode replica computes between the steps of streams, in
small chunks. Not the other way round: large chunks hold up a stream for longer than its objective.
Source: three of each under code completions, which need 5.2 and 0.2, serve 0.84 of them (S,
`hybrid 3P3D` of `make bench-slo`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """What comes of a tick."""

    to: Role
    made: int = 0
    awaited: int = 0
    """More that will be, if what is to spare now still is when the window is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitNeeds:
    """Of both roles, in replicas."""

    greatest: Mapping[Role, float | None]
    """With what is foreseen; None: not known, and nothing flips."""
    present: Mapping[Role, float]
    """Without it, as it is or will be within seconds: a flip is done long before what is foreseen
    for starts."""


class Rebalance:
    """Decides on flips.

    Theory of operation. Of two roles that are short, the worse served one is helped. A replica
    flips to it when the other one keeps what it needs, and has needed at most for `flip_window_s`:
    a stream that ended just now says nothing. What is to spare now is waited for as long, instead
    of starting others: a flip takes less.
    Where nothing can be started, for want of GPUs or within bounds, a shortage is shared out by
    what roles needed at present, in the last `flip_urgent_s`: so many flip as serve the worse
    served role best, if that is better by a tenth. Every second is paid for by somebody then, and
    rates are means over half a minute as it is. Between a flip and one in the other direction there
    is a dwell, so that what a flip costs (the replica's streams end first) is earned back.

    Source: the flip of TaiChi (arXiv 2508.01989) and Arrow (arXiv 2505.11916), with this trigger.
    """

    def __init__(self, options: AutoscalerOptions) -> None:
        slo = options.slo
        self._options = options
        self._greatest = {role: SlidingMax(slo.flip_window_s) for role in _ROLES}
        self._present = {role: SlidingMax(slo.flip_urgent_s) for role in _ROLES}
        self._since_s: float | None = None
        self._last: tuple[float, Role] | None = None

    def flip(
        self, seen: Observation, roster: Roster, needs: SplitNeeds, lacking: Mapping[Role, int]
    ) -> Flips:
        """Flip what should be, in the roster.

        Args:
            seen: Of the tick.
            roster: As it is now.
            needs: As they are now.
            lacking: How many players each role is short of.
        """
        lately = self._lately(seen.at_s, needs)
        short = _worse_served(roster, needs.present, lacking)
        unknown = None in needs.greatest.values()
        if unknown or not self._options.slo.flips or lacking[short] <= 0:
            return Flips(to=short)
        if not self._may(seen.at_s, short):
            return Flips(to=short)
        count = self._count(seen, roster, short, lacking[short], lately)
        made = roster.flip(short, count) if count > 0 else 0
        if made:
            self._last = (seen.at_s, short)
        now = max(1, whole(needs.greatest[other(short)] or 0.0))
        soon = min(lacking[short] - made, roster.players(other(short)) - now)
        return Flips(to=short, made=made, awaited=max(0, soon))

    def _lately(self, at_s: float, needs: SplitNeeds) -> SplitNeeds:
        """The most of each in its window."""
        if self._since_s is None or self._since_s > at_s:
            self._since_s = at_s
        return SplitNeeds(
            greatest={
                role: self._greatest[role].push(at_s, needs.greatest[role] or 0.0)
                for role in _ROLES
            },
            present={role: self._present[role].push(at_s, needs.present[role]) for role in _ROLES},
        )

    def _may(self, at_s: float, to: Role) -> bool:
        """Whether the last flip the other way is long enough ago."""
        if self._last is None or self._last[1] is to:
            return True
        return not 0 <= at_s - self._last[0] < self._options.slo.flip_dwell_s

    def _count(
        self,
        seen: Observation,
        roster: Roster,
        role: Role,
        lacking: int,
        lately: SplitNeeds,
    ) -> int:
        options, giver = self._options.slo, other(role)
        watched_s = 0.0 if self._since_s is None else seen.at_s - self._since_s
        spare = roster.players(giver) - max(1, whole(lately.greatest[giver] or 0.0))
        if spare > 0 and watched_s >= options.flip_window_s:
            return min(spare, lacking)
        if watched_s < options.flip_urgent_s or self._can_start(seen, roster, role):
            return 0
        return _shared(roster, role, lately.present, at_most=lacking)

    def _can_start(self, seen: Observation, roster: Roster, role: Role) -> bool:
        seats = [seat for seat in roster.seats[role] if seat.room > 0]
        budget = self._options.gpu_budget
        if budget is None or not seats:
            return bool(seats)
        used = sum(
            (pool.ready + pool.starting + pool.draining) * pool.gpus_per_replica
            for pool in seen.pools.values()
        )
        return any(seat.pool.gpus_per_replica <= budget - used + 1e-9 for seat in seats)


def _worse_served(roster: Roster, needs: Mapping[Role, float], lacking: Mapping[Role, int]) -> Role:
    """Whom to help: targets alone do not tell, for they go down late."""

    def shortage(role: Role) -> tuple[bool, float]:
        return lacking[role] > 0, needs[role] / max(roster.strength(role), 1e-9)

    return max(lacking, key=shortage)


def _shared(roster: Roster, role: Role, needs: Mapping[Role, float], *, at_most: int) -> int:
    """How many flips make the worse served of two roles, both short, served best."""
    served = [
        _served(roster.flipped(role, flips), needs)
        for flips in range(max(1, min(at_most + 1, roster.players(other(role)))))
    ]
    best = max(range(len(served)), key=lambda flips: (served[flips], -flips))
    return best if served[best] > _GAIN * max(served[0], 1e-9) else 0


def _served(roster: Roster, needs: Mapping[Role, float]) -> float:
    """How much of its need the worse served role has, prompts on spare decoders counted."""
    prefill, decode = needs[Role.PREFILL], needs[Role.DECODE]
    decoding = roster.strength(Role.DECODE)
    prefilling = roster.strength(Role.PREFILL) + _DEFLECTED * max(0.0, decoding - decode)
    return min(prefilling / max(prefill, 1e-9), decoding / max(decode, 1e-9))
