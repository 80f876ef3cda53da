"""Pools by what they are needed for, and what demand needs of each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.domain.fleet import Role
from baton.policy.scaling.needs import (
    Promise,
    decode_replicas,
    prefill_replicas,
    streams_per_replica,
)
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import PoolBounds
from baton.policy.scaling.pools.pool_assignment import Roster, Seat, seats

SPLIT_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens a second: prompts to be computed, and tokens to be generated."""

    prompts: float
    outputs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Pools that prefill, pools that decode, and pools that do both."""

    roster: Roster | None
    """None unless there are both of the former; the pools of one role alone do both."""
    mixed: tuple[Seat, ...]

    def pools(self, role: Role) -> list[PoolObservation]:
        """A group's, the best first."""
        if role is Role.MIXED or self.roster is None:
            return [seat.pool for seat in self.mixed]
        return [seat.pool for seat in self.roster.seats[role]]

    def firsts(self) -> dict[Role, PoolObservation]:
        """Each group's best pool, in whose replicas its need is counted."""
        split = () if self.roster is None else SPLIT_ROLES
        roles = (*split, Role.MIXED) if self.mixed else split
        return {role: self.pools(role)[0] for role in roles}

    def players(self, role: Role) -> int:
        """Who plays a role, or will when started."""
        if role is Role.MIXED or self.roster is None:
            return sum(seat.size for seat in self.mixed)
        return self.roster.players(role)


def groups_of(seen: Observation, bounds: Mapping[str, PoolBounds]) -> Groups:
    """The groups that there are."""
    pools = [seen.pools[name] for name in sorted(seen.pools)]
    split = [pool for pool in pools if pool.role is not Role.MIXED]
    if {pool.role for pool in split} != set(SPLIT_ROLES):
        return Groups(roster=None, mixed=seats(pools, bounds))
    both = [pool for pool in pools if pool.role is Role.MIXED]
    return Groups(roster=Roster(split, bounds), mixed=seats(both, bounds))


def group_needs(
    groups: Groups, promise: Promise, rates: Rates, *, mean_tokens: float
) -> dict[Role, float | None]:
    """Replicas of each group's best pool; None where its capacity is not known.

    Pools that do both get what those that do one thing may not grow large enough for.
    """
    firsts, roster = groups.firsts(), groups.roster
    needs: dict[Role, float | None] = {}
    prompts, outputs = rates.prompts, rates.outputs
    if roster is not None:
        prefill, decode = firsts[Role.PREFILL], firsts[Role.DECODE]
        needs[Role.PREFILL] = one = prefill_replicas(
            prefill, promise, tokens_per_s=prompts, mean_tokens=mean_tokens
        )
        needs[Role.DECODE] = two = decode_replicas(decode, promise, tokens_per_s=outputs)
        prompts *= _left_over(one, roster.most(Role.PREFILL))
        outputs *= _left_over(two, roster.most(Role.DECODE))
    if Role.MIXED in firsts:
        first = firsts[Role.MIXED]
        one = prefill_replicas(first, promise, tokens_per_s=prompts, mean_tokens=mean_tokens)
        two = decode_replicas(first, promise, tokens_per_s=outputs)
        needs[Role.MIXED] = None if one is None or two is None else one + two
    return needs


def busy_replicas(pools: list[PoolObservation], promise: Promise, *, held: int) -> float:
    """What the streams under way occupy, and those held will, in replicas of the first pool.

    Admission lets no more streams run than keep their pace: a role that is short of replicas shows
    it by who waits.
    """
    running = held + sum(pool.running_requests * pool.ready for pool in pools)
    if pools[0].decode_tokens_per_s is None:
        return 0.0
    return running / streams_per_replica(pools[0], promise.tpot_s)


def _left_over(need: float | None, most: float) -> float:
    return 0.0 if need is None or need <= most else 1.0 - most / need
