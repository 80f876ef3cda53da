"""Placement by a plain function that chooses one replica out of several.

Theory of operation: who may run a phase follows from roles, draining, past failures of the request,
layouts and links, and is the same for every policy; `ChooserPlacer` settles it. Who does is the
chooser's word, and it is asked once for each leg: for the only leg of a LOCAL request, for the
prefill leg, and for the decode leg when the prompt is finished. Until then the decode replica of a
route is provisional: the least loaded one. A chooser that takes turns would skip replicas if it
were asked twice.

Roles are hints, never walls: with no decode replica left a prefill replica runs both phases, and
with no prefill replica a decode replica does. A chooser that raises, or answers with what is no
index, loses nothing: its failure is counted, and the least loaded candidate is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from baton.domain.fleet import ReplicaView, Role
from baton.domain.handoff import Decision, HandoffMode, LegKind, Route, RouteReason
from baton.perf.timing import EngineTiming
from baton.policy.placement.port import (
    Disaggregate,
    NoRoute,
    PlacementQuery,
    Surroundings,
    least_loaded,
    no_route,
)
from baton.policy.prefix_cache.hits import Hit

LEAST_LOADED = "least-loaded"
"""Named in decisions that were made for a chooser that failed."""


class Candidate(NamedTuple):
    """A replica that may run a leg."""

    view: ReplicaView
    hit: Hit
    """What it holds of the prompt."""
    timing: EngineTiming


Chooser = Callable[[PlacementQuery, LegKind, Sequence[Candidate], Random], int | None]
"""Chooses a candidate by its index. There is at least one, in order of their ids, and never one
that must not be chosen. Where disaggregation is `auto`, None in answer to a prefill leg says that
this request shall run on one replica."""


@dataclass(slots=True)
class _Turn:
    """One request's turn."""

    query: PlacementQuery
    around: Surroundings
    decided_by: str
    considered: int = 0


class ChooserPlacer:
    """A placer around a chooser; keeps a generator, and count of the chooser's failures."""

    def __init__(
        self, name: str, chooser: Chooser, *, disaggregate: Disaggregate, rng: Random
    ) -> None:
        self.name = name
        self.failures = 0
        self.last_failure = ""
        """What went wrong when the chooser last failed; empty when it never did."""
        self._chooser = chooser
        self._disaggregate = disaggregate
        self._random = rng

    # -------------------------------------------------------------- the port

    def place(self, query: PlacementQuery, around: Surroundings) -> Decision | NoRoute:
        """Choose the replicas for a request; the reason says what forced it, if anything."""
        roster, turn = around.fleet.roster, _Turn(query, around, self.name)
        if not roster.decode and not roster.prefill:
            return no_route(around.fleet)
        if not roster.decode:
            stand_ins = _untried_first(_views(around, roster.prefill), query.avoid)
            return self._local(turn, stand_ins, RouteReason.NO_DECODE_REPLICA)
        decoders = _untried_first(_views(around, roster.decode), query.avoid)
        if query.local_only is not None:
            return self._local(turn, decoders, RouteReason.LOCAL_ONLY)
        if self._disaggregate is Disaggregate.NEVER:
            return self._local(turn, decoders, RouteReason.DISAGGREGATION_OFF)
        return self._split(turn, decoders)

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, around: Surroundings
    ) -> str | None:
        """Choose who decodes a prompt that `source` has prefilled; None when nobody can."""
        able = [
            view
            for view in _views(around, around.fleet.roster.decode)
            if view.replica_id != source.replica_id and _hands_over(source, view, around)
        ]
        if not able:
            return None
        turn = _Turn(query, around, self.name)
        return self._choose(turn, LegKind.DECODE, _untried_first(able, query.avoid)).replica_id

    # -------------------------------------------------------------- routes

    def _split(self, turn: _Turn, decoders: list[ReplicaView]) -> Decision:
        """Over two replicas, if there are two for it."""
        prefillers = [
            view
            for view in _views(turn.around, turn.around.fleet.roster.prefill)
            if view.replica_id not in turn.query.avoid
        ]
        decoder = least_loaded(decoders)
        if (forced := _forced_local(decoder, prefillers, turn.around)) is not None:
            alike = [
                view for view in decoders if _forced_local(view, prefillers, turn.around) is forced
            ]
            return self._local(turn, alike, forced)
        able = [view for view in prefillers if _hands_over(view, decoder, turn.around)]
        may_stay = self._disaggregate is Disaggregate.AUTO
        prefiller = self._ask(turn, LegKind.PREFILL, able, may_decline=may_stay)
        if prefiller is None:
            return self._local(turn, decoders, RouteReason.LOCAL_FASTER)
        return self._route(turn, prefiller, decoder, RouteReason.DISAGGREGATED)

    def _local(self, turn: _Turn, views: list[ReplicaView], reason: RouteReason) -> Decision:
        return self._route(turn, None, self._choose(turn, LegKind.LOCAL, views), reason)

    def _route(
        self, turn: _Turn, prefill: ReplicaView | None, decode: ReplicaView, reason: RouteReason
    ) -> Decision:
        route = Route(
            mode=HandoffMode.LOCAL if prefill is None else HandoffMode.PULL,
            prefill_replica_id=None if prefill is None else prefill.replica_id,
            decode_replica_id=decode.replica_id,
            reason=reason,
        )
        return Decision(
            route=route,
            policy=turn.decided_by,
            at_s=turn.around.fleet.at_s,
            considered=turn.considered,
        )

    # -------------------------------------------------------------- the chooser

    def _choose(self, turn: _Turn, kind: LegKind, views: list[ReplicaView]) -> ReplicaView:
        chosen = self._ask(turn, kind, views, may_decline=False)
        assert chosen is not None, "only a question that may be declined has None for an answer"
        return chosen

    def _ask(
        self, turn: _Turn, kind: LegKind, views: list[ReplicaView], *, may_decline: bool
    ) -> ReplicaView | None:
        turn.considered += len(views)
        candidates = [_seen(turn, view) for view in views]
        try:
            index = self._chooser(turn.query, kind, candidates, self._random)
        except Exception as error:  # noqa: BLE001 - a user's own code; the request must not suffer
            return self._stand_in(turn, kind, views, f"raised {type(error).__name__}: {error}")
        if index is None and may_decline:
            return None
        if type(index) is not int or not 0 <= index < len(views):
            wanted = f"an index from 0 to {len(views) - 1}"
            return self._stand_in(turn, kind, views, f"answered {index!r:.60}, wanted {wanted}")
        return views[index]

    def _stand_in(
        self, turn: _Turn, kind: LegKind, views: list[ReplicaView], why: str
    ) -> ReplicaView:
        self.failures += 1
        self.last_failure = f"policy {self.name!r}, asked for a {kind} leg, {why}"
        turn.decided_by = LEAST_LOADED
        return least_loaded(views)


def _views(around: Surroundings, replica_ids: Iterable[str]) -> list[ReplicaView]:
    return [around.fleet.replicas[one] for one in replica_ids]


def _seen(turn: _Turn, view: ReplicaView) -> Candidate:
    hit = turn.query.hits.of(view.replica_id)
    return Candidate(view, hit, turn.around.timings.of(view))


def _untried_first(views: list[ReplicaView], avoid: frozenset[str]) -> list[ReplicaView]:
    return [view for view in views if view.replica_id not in avoid] or views


def _forced_local(
    decoder: ReplicaView, prefillers: Sequence[ReplicaView], around: Surroundings
) -> RouteReason | None:
    """Why this replica must prefill what it decodes; None when another can."""
    if decoder.facts.role is Role.MIXED:
        return RouteReason.MIXED_POOL
    if not prefillers:
        return RouteReason.NO_PREFILL_REPLICA
    alike = [view for view in prefillers if view.facts.layout == decoder.facts.layout]
    if not alike:
        return RouteReason.INCOMPATIBLE
    linked = any(_hands_over(view, decoder, around) for view in alike)
    return None if linked else RouteReason.NO_LINK


def _hands_over(source: ReplicaView, target: ReplicaView, around: Surroundings) -> bool:
    """Whether blocks can go from one to the other."""
    if source.facts.layout != target.facts.layout:
        return False
    return around.links.transfer_s(source.replica_id, target.replica_id, 0) is not None
