"""Who is in which pool and plays which role, while it is being rearranged on paper.

Replicas of a pool that prefills may play at decoding and the other way round; how many do is what a
`Seat` calls *away*. A role's *players* are its own pools' replicas, but for those away, and the
other role's that are away. Pools of one role may be of different strength: players are counted in
replicas of the role's first pool, the one that does most for each GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from baton.domain.fleet import Role
from baton.policy.scaling.observation import PoolObservation
from baton.policy.scaling.options import PoolBounds

_SAME = 1.1
"""Strengths that differ by less are the same: what is measured wavers, and the order must not."""


_ROUNDING = 1e-6


@dataclass(slots=True)
class Seat:
    """One pool, as it is and as it shall be."""

    pool: PoolObservation
    bounds: PoolBounds
    size: int
    """Replicas that take work or start."""
    away: int
    """Of those that take work: how many play the other role."""
    away_before: int

    @property
    def room(self) -> int:
        """How many more it may have."""
        return max(0, self.bounds.max - self.size)


class Roster:
    """Pools that prefill, and pools that decode."""

    def __init__(self, pools: Iterable[PoolObservation], bounds: Mapping[str, PoolBounds]) -> None:
        self.seats: dict[Role, list[Seat]] = {Role.PREFILL: [], Role.DECODE: []}
        for pool in pools:
            self.seats[pool.role].append(_seat(pool, bounds))
        for role, seats in self.seats.items():
            seats.sort(key=lambda seat: _order(seat.pool, role))

    def all_seats(self) -> tuple[Seat, ...]:
        """Of both roles."""
        return (*self.seats[Role.PREFILL], *self.seats[Role.DECODE])

    def players(self, role: Role) -> int:
        """Who plays the role, or will when started; in whole replicas of the first pool."""
        return math.floor(self.strength(role) + _ROUNDING)

    def strength(self, role: Role) -> float:
        """The same, with what is left of a replica."""
        own = sum((seat.size - seat.away) * self._weight(seat, role) for seat in self.seats[role])
        guests = sum(seat.away * self._weight(seat, role) for seat in self.seats[other(role)])
        return own + guests

    def flipped(self, to: Role, replicas: int) -> Roster:
        """What it would be after a flip; this one stays as it is."""
        there = Roster((), {})
        there.seats = {role: [copy(seat) for seat in seats] for role, seats in self.seats.items()}
        there.flip(to, replicas)
        return there

    def most(self, role: Role) -> float:
        """How many players the role's own pools may have."""
        return sum(
            max(seat.bounds.max, seat.size) * self._weight(seat, role) for seat in self.seats[role]
        )

    def flip(self, to: Role, replicas: int) -> int:
        """Have players of the other role play `to`; how many could."""
        left = min(replicas, max(0, self._ready_players(other(to)) - 1))
        wanted = left
        for seat in self.seats[to]:  # who is away comes home first
            home = min(left, seat.away)
            seat.away -= home
            left -= home
        for seat in self.seats[other(to)]:
            if self._may_play(seat, to):
                sent = min(left, seat.pool.ready - seat.away)
                seat.away += sent
                left -= sent
        return wanted - left

    def grow(self, role: Role, players: float) -> float:
        """Start replicas for the role; what is left when its pools, and then all, are full.

        A replica that is started in the other role's pool can play this role once it is ready.
        """
        left = _fill(self.seats[role], players, lambda seat: self._weight(seat, role))
        able = [seat for seat in self.seats[other(role)] if self._may_play(seat, role)]
        return _fill(able, left, lambda seat: self._weight(seat, role))

    def shrink(self, role: Role, players: int) -> None:
        """Stop so many players at most; own ones first, of the weakest pool."""
        left = float(players)
        for seat in reversed(self.seats[role]):
            weight = self._weight(seat, role)
            spare = min(seat.size - seat.bounds.min, seat.size - seat.away)
            stopped = max(0, min(spare, math.floor(left / weight + _ROUNDING)))
            seat.size -= stopped
            left -= stopped * weight
        for seat in reversed(self.seats[other(role)]):
            spare = min(seat.size - seat.bounds.min, seat.away)
            stopped = max(0, min(spare, math.floor(left + _ROUNDING)))
            seat.size -= stopped
            seat.away -= stopped
            left -= stopped

    def _ready_players(self, role: Role) -> int:
        own = sum(seat.pool.ready - seat.away for seat in self.seats[role])
        return own + sum(seat.away for seat in self.seats[other(role)])

    def _may_play(self, seat: Seat, role: Role) -> bool:
        """Whether it is known, or to be expected, what a pool's replicas do in a role.

        A pool that has never played it is taken to do as much as one of the role's own on as many
        GPUs; once it plays, it is seen.
        """
        if _capacity(seat.pool, role) is not None:
            return True
        first = self.seats[role][0].pool
        alike = first.gpus_per_replica == seat.pool.gpus_per_replica
        return alike and _capacity(first, role) is not None

    def _weight(self, seat: Seat, role: Role) -> float:
        one = _capacity(seat.pool, role)
        first = _capacity(self.seats[role][0].pool, role) if self.seats[role] else None
        if one is None or first is None or 1 / _SAME < one / first < _SAME:
            return 1.0
        return one / first


def seats(pools: Sequence[PoolObservation], bounds: Mapping[str, PoolBounds]) -> tuple[Seat, ...]:
    """Pools whose replicas all do the same, the best first."""
    ordered = sorted(pools, key=lambda pool: _order(pool, Role.MIXED))
    return tuple(_seat(pool, bounds) for pool in ordered)


def resize(seated: Sequence[Seat], replicas: int) -> None:
    """Have so many replicas in pools that all do the same, as far as bounds let them."""
    have = sum(seat.size for seat in seated)
    _fill(seated, max(0, replicas - have), lambda _: 1.0)
    left = max(0, have - replicas)
    for seat in reversed(seated):
        stopped = max(0, min(left, seat.size - seat.bounds.min))
        seat.size -= stopped
        left -= stopped


def other(role: Role) -> Role:
    """The role that is not this one, of the two."""
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def _seat(pool: PoolObservation, bounds: Mapping[str, PoolBounds]) -> Seat:
    size = pool.ready + pool.starting
    known = bounds.get(pool.name, PoolBounds(min=size, start=size, max=size))
    away = {Role.PREFILL: pool.decode, Role.DECODE: pool.prefill, Role.MIXED: 0}[pool.role]
    return Seat(pool=pool, bounds=known, size=size, away=away, away_before=away)


def _fill(into: Sequence[Seat], players: float, weight: Callable[[Seat], float]) -> float:
    left = players
    for seat in into:
        if left <= _ROUNDING:
            break
        started = min(seat.room, math.ceil(left / weight(seat) - _ROUNDING))
        seat.size += started
        left -= started * weight(seat)
    return max(0.0, left)


def _capacity(pool: PoolObservation, role: Role) -> float | None:
    return pool.decode_tokens_per_s if role is Role.DECODE else pool.prefill_tokens_per_s


def _order(pool: PoolObservation, role: Role) -> tuple[int, str]:
    """By what a GPU of it does, in coarse steps; then by name."""
    strength = (_capacity(pool, role) or 1.0) / pool.gpus_per_replica
    return (-round(math.log2(strength)), pool.name)
