"""Splitwise's two cluster schedulers as placers: by pending tokens, and over a mixed pool.

Source: Splitwise (ISCA'24) §IV-A; splitwise-sim scheduler.py `TokenJSQScheduler` and
`MixedPoolScheduler`, configs/orchestrator_repo/schedulers/mixed_pool.yml.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton.domain.fleet import FleetView, ReplicaView
from baton.domain.handoff import Decision, HandoffMode, LegKind, Route, RouteReason
from baton.policy.choosing import Candidate, ChooserPlacer
from baton.policy.placement import Disaggregate, NoRoute, PlacementQuery, Surroundings, no_route

LONGEST_QUEUE_TOKENS = 8192
"""A machine with more prompt tokens pending than this is passed over."""


def by_pending_tokens() -> ChooserPlacer:
    """Whole requests, each to the machine with the fewest tokens to compute."""
    return ChooserPlacer(
        "token-jsq",
        _fewest_pending,
        disaggregate=Disaggregate.NEVER,
        rng=Random(0),  # noqa: S311 - never drawn from
    )


def pending_tokens(view: ReplicaView) -> int:
    """Prompt tokens to compute, and one for each request that decodes."""
    return view.load.queued_tokens + view.unseen_tokens + view.load.running_requests


class MixedPool:
    """Prompts to one pool and decodes to another, and machines that are lent from one to the other.

    A machine is lent when all of the other pool are full, and goes back when it is idle.
    """

    def __init__(self) -> None:
        self._lent: set[str] = set()

    def place(self, query: PlacementQuery, around: Surroundings) -> Decision | NoRoute:
        """The machine with the fewest tokens pending prefills, that with most room decodes."""
        fleet = around.fleet
        prompts, tokens, lent = self._pools(fleet)
        if not prompts + tokens + lent:
            return no_route(fleet)
        prefill = _shortest(prompts, query) or _shortest(lent, query)
        if prefill is None and tokens:
            prefill = min(tokens, key=_queue)
            self._lend(prefill, tokens, lent)
        decode = _roomiest(tokens, query) or _roomiest(lent, query)
        if decode is None and prompts:
            decode = min(prompts, key=_held)
            self._lend(decode, prompts, lent)
        if prefill is None or decode is None:
            prefill = decode = min(prompts + tokens + lent, key=_queue)
        return _decision(fleet, prefill, decode)

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, around: Surroundings
    ) -> str | None:
        """The machine with most room, now that the prompt is computed."""
        _, tokens, lent = self._pools(around.fleet)
        for pool in (tokens, lent):
            others = [view for view in pool if view.replica_id != source.replica_id]
            if (chosen := _roomiest(others, query)) is not None:
                return chosen.replica_id
        return None

    def _pools(
        self, fleet: FleetView
    ) -> tuple[list[ReplicaView], list[ReplicaView], list[ReplicaView]]:
        """Machines for prompts, for decodes, and those that are lent."""
        views = fleet.replicas
        self._lent = {one for one in self._lent if one in views and views[one].inflight_legs}
        prompts = [views[one] for one in fleet.roster.prefill if one not in self._lent]
        tokens = [views[one] for one in fleet.roster.decode if one not in self._lent]
        return prompts, tokens, [views[one] for one in sorted(self._lent)]

    def _lend(self, view: ReplicaView, owner: list[ReplicaView], lent: list[ReplicaView]) -> None:
        owner.remove(view)
        lent.append(view)
        self._lent.add(view.replica_id)


def _fewest_pending(
    query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
) -> int:
    pending = [pending_tokens(one.view) for one in candidates]
    return pending.index(min(pending))


def _queue(view: ReplicaView) -> tuple[int, str]:
    # Legs of prompts end with the prompt, so what is in flight is what is pending.
    return view.inflight_tokens, view.replica_id


def _held(view: ReplicaView) -> tuple[float, int, str]:
    held = view.load.kv_used_fraction * view.facts.kv_blocks * view.facts.block_size_tokens
    return held + view.unseen_tokens, view.inflight_legs, view.replica_id


def _shortest(views: Sequence[ReplicaView], query: PlacementQuery) -> ReplicaView | None:
    """The one with the shortest queue, unless that is too long for this prompt."""
    if not views:
        return None
    view = min(views, key=_queue)
    pending = view.inflight_tokens
    return None if pending and pending + query.prompt_tokens > LONGEST_QUEUE_TOKENS else view


def _roomiest(views: Sequence[ReplicaView], query: PlacementQuery) -> ReplicaView | None:
    """The one that holds the fewest tokens, unless there is no room for this request."""
    if not views:
        return None
    view = min(views, key=_held)
    room = view.facts.kv_blocks * view.facts.block_size_tokens
    return view if _held(view)[0] + query.prompt_tokens + query.max_tokens < room else None


def _decision(fleet: FleetView, prefill: ReplicaView, decode: ReplicaView) -> Decision:
    alone = prefill.replica_id == decode.replica_id
    route = Route(
        mode=HandoffMode.LOCAL if alone else HandoffMode.PULL,
        prefill_replica_id=None if alone else prefill.replica_id,
        decode_replica_id=decode.replica_id,
        reason=RouteReason.MIXED_POOL if alone else RouteReason.DISAGGREGATED,
    )
    return Decision(route=route, policy="mixed-pool", at_s=fleet.at_s, considered=2)
