"""Who is looked at when a request is placed: everyone in a small pool, a few in a large one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from baton.domain.fleet import FleetView, ReplicaView, Role
from baton.policy.placement.port import PlacementQuery

_SMALL = 8
"""A pool of so many is looked at as a whole."""


class Shortlist:
    """Holders of the prefix, and the idler ones of pairs drawn by chance; keeps a generator."""

    def __init__(self, limit: int, *, seed: int) -> None:
        self._limit = limit
        self._random = random.Random(seed)  # noqa: S311 - spreads load, guards nothing

    def of(self, query: PlacementQuery, fleet: FleetView, ids: Sequence[str]) -> Iterable[str]:
        """Who of one pool's `ids` is looked at.

        Replicas on which the request has failed are looked at only when there are no others.
        """
        avoid, ids = query.avoid, self.pool(query, ids)
        if not self.leaves_out(ids):
            return ids
        chosen = dict.fromkeys(self._idle(fleet, ids))
        named = [*query.hits.holders(self._limit), query.session_replica_id]
        prefill = fleet.replicas[ids[0]].facts.role is Role.PREFILL
        for one in named:
            view = None if one is None or one in avoid else fleet.replicas.get(one)
            # Cheaper than to look for it in a thousand ids; the source of a handoff is ruled out
            # by its role, or later, because it cannot pull from itself.
            if view and view.is_counted_on and (view.facts.role is Role.PREFILL) == prefill:
                chosen[view.replica_id] = None
        if query.adapter is not None:
            chosen |= dict.fromkeys(self._with_adapter(query.adapter, fleet, ids))
        return chosen

    def pool(self, query: PlacementQuery, ids: Sequence[str]) -> Sequence[str]:
        """Those it is drawn from: on whom the request has not failed, or else all."""
        avoid = query.avoid
        return ([one for one in ids if one not in avoid] or ids) if avoid else ids

    def leaves_out(self, ids: Sequence[str]) -> bool:
        """Whether these are too many to look at each."""
        return len(ids) > max(_SMALL, 2 * self._limit)

    def _with_adapter(self, name: str, fleet: FleetView, ids: Sequence[str]) -> Iterable[str]:
        """The first replicas that have an adapter, from a random one on."""
        start, replicas = self._random.randrange(len(ids)), fleet.replicas
        having = (one for one in chain(ids[start:], ids[:start]) if replicas[one].has_adapter(name))
        return islice(having, self._limit)

    def _idle(self, fleet: FleetView, ids: Sequence[str]) -> Iterable[str]:
        """The idler one of each of some pairs, at even distances from a random one on."""
        count, pairs = len(ids), self._limit
        start, step = self._random.randrange(count), count // (2 * pairs)
        replicas, half, idler = fleet.replicas, pairs * step, []
        for place in range(start, start + half, step):
            one, other = replicas[ids[place % count]], replicas[ids[(place + half) % count]]
            idler.append((one if _is_idler(one, other) else other).facts.replica_id)
        return idler


def _is_idler(one: ReplicaView, other: ReplicaView) -> bool:
    """Whether one has less work than another, or as much: tokens to compute, then requests."""
    here, there = one.load, other.load
    tokens = here.queued_tokens + one.unseen_tokens
    others = there.queued_tokens + other.unseen_tokens
    if tokens != others:
        return tokens < others
    legs = here.running_requests + here.queued_requests + one.unseen_legs
    return legs <= there.running_requests + there.queued_requests + other.unseen_legs
