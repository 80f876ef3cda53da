"""Who is looked at when a request is placed: everyone in a small pool, a few in a large one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from baton.domain.fleet import FleetView, ReplicaView, Role
from baton.policy.placement.port import PlacementQuery

_SMALL_POOL_REPLICAS = 8
"""A pool of so many is looked at as a whole."""


class Shortlist:
    """Holders of the prefix, and the idler ones of pairs drawn by chance; keeps a generator."""

    def __init__(self, limit: int, *, seed: int) -> None:
        self._limit = limit
        self._random = random.Random(seed)  # noqa: S311 - spreads load, guards nothing

    def select(
        self, query: PlacementQuery, fleet: FleetView, replica_ids: Sequence[str]
    ) -> Iterable[str]:
        """Who of one pool's `replica_ids` is looked at.

        Replicas on which the request has failed are looked at only when there are no others.
        """
        avoid, replica_ids = query.avoid, self.prefer_untried(query, replica_ids)
        if not self.needs_sampling(replica_ids):
            return replica_ids
        chosen = dict.fromkeys(self._sample_idle(fleet, replica_ids))
        preferred = [*query.hits.holders(self._limit), query.session_replica_id]
        is_prefill = fleet.replicas[replica_ids[0]].facts.role is Role.PREFILL
        for replica_id in preferred:
            view = (
                None
                if replica_id is None or replica_id in avoid
                else fleet.replicas.get(replica_id)
            )
            # Cheaper than to look for it in a thousand ids; the source of a handoff is ruled out
            # by its role, or later, because it cannot pull from itself.
            if view and view.is_eligible and (view.facts.role is Role.PREFILL) == is_prefill:
                chosen[view.replica_id] = None
        if query.adapter is not None:
            chosen |= dict.fromkeys(self._with_adapter(query.adapter, fleet, replica_ids))
        return chosen

    def prefer_untried(self, query: PlacementQuery, ids: Sequence[str]) -> Sequence[str]:
        """Those it is drawn from: on whom the request has not failed, or else all."""
        avoid = query.avoid
        return ([id_ for id_ in ids if id_ not in avoid] or ids) if avoid else ids

    def needs_sampling(self, ids: Sequence[str]) -> bool:
        """Whether these are too many to look at each."""
        return len(ids) > max(_SMALL_POOL_REPLICAS, 2 * self._limit)

    def _with_adapter(self, name: str, fleet: FleetView, ids: Sequence[str]) -> Iterable[str]:
        """The first replicas that have an adapter, from a random one on."""
        start, replicas = self._random.randrange(len(ids)), fleet.replicas
        holders = (
            id_ for id_ in chain(ids[start:], ids[:start]) if replicas[id_].has_adapter(name)
        )
        return islice(holders, self._limit)

    def _sample_idle(self, fleet: FleetView, ids: Sequence[str]) -> Iterable[str]:
        """The idler one of each of some pairs, at even distances from a random one on."""
        count, pairs = len(ids), self._limit
        start, step = self._random.randrange(count), count // (2 * pairs)
        replicas, half, idler = fleet.replicas, pairs * step, []
        for position in range(start, start + half, step):
            first, second = (
                replicas[ids[position % count]],
                replicas[ids[(position + half) % count]],
            )
            idler.append((first if _is_less_loaded(first, second) else second).facts.replica_id)
        return idler


def _is_less_loaded(first: ReplicaView, second: ReplicaView) -> bool:
    """Whether one has less work than another, or as much: tokens to compute, then requests."""
    first_load, second_load = first.load, second.load
    first_tokens = first_load.queued_tokens + first.unreported_tokens
    second_tokens = second_load.queued_tokens + second.unreported_tokens
    if first_tokens != second_tokens:
        return first_tokens < second_tokens
    legs = first_load.running_requests + first_load.queued_requests + first.unreported_legs
    return (
        legs <= second_load.running_requests + second_load.queued_requests + second.unreported_legs
    )
