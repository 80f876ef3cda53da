"""Whether replicas should play another role: the cheapest way to help a role that is short."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.domain.fleet import Role
from baton.policy.scaling.observation import Observation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.roster import Roster, other
from baton.policy.scaling.track import whole
from baton.policy.scaling.windows import SlidingMax

_GAIN = 1.1
"""By how much the worse served role must be better served when both are short: a flip is not free,
and a tenth is more than capacities waver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """What comes of a tick."""

    to: Role
    made: int = 0
    awaited: int = 0
    """More that will be, if what is to spare now still is when the window is over."""


class Rebalance:
    """Decides on flips.

    Theory of operation. A replica flips to a role that is short when the other one keeps what it
    needs, and has needed at most for `flip_window_s`: a stream that ended just now says nothing.
    What is to spare now is waited for as long, instead of starting others: a flip takes less.
    Where nothing can be started, for want of GPUs or within bounds, a shortage is shared out: so
    many flip as serve the worse served role best, if that is better by a tenth. Between a flip and
    one in the other direction there is a dwell, so that what a flip costs (the replica's streams
    end first) is earned back.

    Source: the flip of TaiChi (arXiv 2508.01989) and Arrow (arXiv 2505.11916), with this trigger.
    """

    def __init__(self, options: AutoscalerOptions) -> None:
        self._options = options
        self._needs = {
            role: SlidingMax(options.slo.flip_window_s) for role in (Role.PREFILL, Role.DECODE)
        }
        self._since_s: float | None = None
        self._last: tuple[float, Role] | None = None

    def flip(
        self,
        seen: Observation,
        roster: Roster,
        needs: Mapping[Role, float | None],
        lacking: Mapping[Role, int],
    ) -> Flips:
        """Flip what should be, in the roster.

        Args:
            seen: Of the tick.
            roster: As it is now.
            needs: Of each role, in replicas; None: not known, and nothing flips.
            lacking: How many players each role is short of.
        """
        recent = {
            role: window.push(seen.at_s, needs[role] or 0.0) for role, window in self._needs.items()
        }
        if self._since_s is None or self._since_s > seen.at_s:
            self._since_s = seen.at_s
        short = max(lacking, key=lambda role: lacking[role])
        if not self._options.slo.flips or None in needs.values() or lacking[short] <= 0:
            return Flips(to=short)
        if not self._may(seen.at_s, short):
            return Flips(to=short)
        count = self._count(seen, roster, short, lacking[short], recent)
        made = roster.flip(short, count) if count > 0 else 0
        if made:
            self._last = (seen.at_s, short)
        now = max(1, whole(needs[other(short)] or 0.0))
        soon = min(lacking[short] - made, roster.players(other(short)) - now)
        return Flips(to=short, made=made, awaited=max(0, soon))

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
        recent: Mapping[Role, float],
    ) -> int:
        if self._since_s is None or seen.at_s - self._since_s < self._options.slo.flip_window_s:
            return 0  # who has not been watched for long enough may not be to spare
        giver = other(role)
        spare = roster.players(giver) - max(1, whole(recent[giver]))
        if spare > 0:
            return min(spare, lacking)
        if self._can_start(seen, roster, role):
            return 0
        return _shared(roster, role, recent, at_most=lacking)

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


def _shared(roster: Roster, role: Role, needs: Mapping[Role, float], *, at_most: int) -> int:
    """How many flips make the worse served of two roles, both short, served best."""
    mine, its = roster.players(role), roster.players(other(role))
    need, its_need = max(needs[role], 1e-9), max(needs[other(role)], 1e-9)

    def served(flips: int) -> float:
        return min((mine + flips) / need, (its - flips) / its_need)

    best = max(range(max(0, min(at_most, its - 1)) + 1), key=lambda flips: (served(flips), -flips))
    return best if served(best) > _GAIN * max(served(0), 1e-9) or math.isclose(served(0), 0) else 0
