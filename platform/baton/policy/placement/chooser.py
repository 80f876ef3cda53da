"""Placement by a plain function that chooses one replica out of several.

Theory of operation. `ChooserPlacer` settles the candidates of a phase for every policy: by roles,
draining, past failures of the request, layouts and links. The chooser runs once for each leg: for
the only leg of a LOCAL request; or for the prefill leg, and for the decode leg after prefill. Until
then the decode replica of a route is provisional, the least loaded one. A chooser that takes turns
would skip replicas if it ran twice.

Roles are hints: without a decode replica a prefill replica runs both phases, and the other way
round. After an exception or an invalid index the failure is counted, and the least loaded candidate
is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from baton.domain.fleet import ReplicaView, Role
from baton.domain.handoff import HandoffMode, LegKind, PlacementDecision, Route, RouteReason
from baton.perf.timing import EngineTiming
from baton.policy.placement.port import (
    Disaggregate,
    NoRoute,
    PlacementContext,
    PlacementQuery,
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
    """The part of the prompt that it holds."""
    timing: EngineTiming


Chooser = Callable[[PlacementQuery, LegKind, Sequence[Candidate], Random], int | None]
"""Chooses a candidate by its index. There is at least one, in order of their ids, and each may be
chosen. Where disaggregation is `auto`, None in answer to a prefill leg says that this request shall
run on one replica."""


@dataclass(slots=True)
class _PlacementCall:
    """One request's turn."""

    query: PlacementQuery
    context: PlacementContext
    decided_by: str
    options_considered: int = 0


class ChooserPlacer:
    """A placer around a chooser; keeps a generator, and count of the chooser's failures."""

    def __init__(
        self, name: str, chooser: Chooser, *, disaggregate: Disaggregate, rng: Random
    ) -> None:
        self.name = name
        self.failures = 0
        self.last_failure = ""
        """The last failure of the chooser; empty when it never failed."""
        self._chooser = chooser
        self._disaggregate = disaggregate
        self._random = rng

    # -------------------------------------------------------------- the port

    def place(
        self, query: PlacementQuery, context: PlacementContext
    ) -> PlacementDecision | NoRoute:
        """Choose the replicas for a request; the reason says what forced it, if anything."""
        eligible, call = context.fleet.eligible, _PlacementCall(query, context, self.name)
        if not eligible.decode and not eligible.prefill:
            return no_route(context.fleet)
        if not eligible.decode:
            fallbacks = _prefer_untried(_views(context, eligible.prefill), query.avoid)
            return self._local(call, fallbacks, RouteReason.NO_DECODE_REPLICA)
        decoders = _prefer_untried(_views(context, eligible.decode), query.avoid)
        if query.local_only is not None:
            return self._local(call, decoders, RouteReason.LOCAL_ONLY)
        if self._disaggregate is Disaggregate.NEVER:
            return self._local(call, decoders, RouteReason.DISAGGREGATION_OFF)
        return self._place_disaggregated(call, decoders)

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, context: PlacementContext
    ) -> str | None:
        """Choose the decode replica of a prompt that `source` has prefilled, or None."""
        reachable = [
            view
            for view in _views(context, context.fleet.eligible.decode)
            if view.replica_id != source.replica_id and _can_transfer(source, view, context)
        ]
        if not reachable:
            return None
        call = _PlacementCall(query, context, self.name)
        return self._choose(
            call, LegKind.DECODE, _prefer_untried(reachable, query.avoid)
        ).replica_id

    # -------------------------------------------------------------- routes

    def _place_disaggregated(
        self, call: _PlacementCall, decoders: list[ReplicaView]
    ) -> PlacementDecision:
        """Over two replicas, if there are two for it."""
        prefillers = [
            view
            for view in _views(call.context, call.context.fleet.eligible.prefill)
            if view.replica_id not in call.query.avoid
        ]
        decoder = least_loaded(decoders)
        if (forced_reason := _forced_local_reason(decoder, prefillers, call.context)) is not None:
            forced_views = [
                view
                for view in decoders
                if _forced_local_reason(view, prefillers, call.context) is forced_reason
            ]
            return self._local(call, forced_views, forced_reason)
        reachable = [view for view in prefillers if _can_transfer(view, decoder, call.context)]
        may_decline = self._disaggregate is Disaggregate.AUTO
        prefiller = self._call_chooser(call, LegKind.PREFILL, reachable, may_decline=may_decline)
        if prefiller is None:
            return self._local(call, decoders, RouteReason.LOCAL_FASTER)
        return self._route(call, prefiller, decoder, RouteReason.DISAGGREGATED)

    def _local(
        self, call: _PlacementCall, views: list[ReplicaView], reason: RouteReason
    ) -> PlacementDecision:
        return self._route(call, None, self._choose(call, LegKind.LOCAL, views), reason)

    def _route(
        self,
        call: _PlacementCall,
        prefill: ReplicaView | None,
        decode: ReplicaView,
        reason: RouteReason,
    ) -> PlacementDecision:
        route = Route(
            mode=HandoffMode.LOCAL if prefill is None else HandoffMode.PULL,
            prefill_replica_id=None if prefill is None else prefill.replica_id,
            decode_replica_id=decode.replica_id,
            reason=reason,
        )
        return PlacementDecision(
            route=route,
            policy=call.decided_by,
            at_s=call.context.fleet.at_s,
            options_considered=call.options_considered,
        )

    # -------------------------------------------------------------- the chooser

    def _choose(self, call: _PlacementCall, kind: LegKind, views: list[ReplicaView]) -> ReplicaView:
        chosen = self._call_chooser(call, kind, views, may_decline=False)
        assert chosen is not None, "only a question that may be declined has None for an answer"
        return chosen

    def _call_chooser(
        self, call: _PlacementCall, kind: LegKind, views: list[ReplicaView], *, may_decline: bool
    ) -> ReplicaView | None:
        call.options_considered += len(views)
        candidates = [_candidate(call, view) for view in views]
        try:
            index = self._chooser(call.query, kind, candidates, self._random)
        except Exception as error:  # noqa: BLE001 - a user's own code; the request must not suffer
            return self._fallback(call, kind, views, f"raised {type(error).__name__}: {error}")
        if index is None and may_decline:
            return None
        if type(index) is not int or not 0 <= index < len(views):
            expected = f"an index from 0 to {len(views) - 1}"
            return self._fallback(call, kind, views, f"answered {index!r:.60}, expected {expected}")
        return views[index]

    def _fallback(
        self, call: _PlacementCall, kind: LegKind, views: list[ReplicaView], reason: str
    ) -> ReplicaView:
        self.failures += 1
        self.last_failure = f"policy {self.name!r}, asked for a {kind} leg, {reason}"
        call.decided_by = LEAST_LOADED
        return least_loaded(views)


def _views(context: PlacementContext, replica_ids: Iterable[str]) -> list[ReplicaView]:
    return [context.fleet.replicas[replica_id] for replica_id in replica_ids]


def _candidate(call: _PlacementCall, view: ReplicaView) -> Candidate:
    hit = call.query.hits.of(view.replica_id)
    return Candidate(view, hit, call.context.timings.of(view))


def _prefer_untried(views: list[ReplicaView], avoid: frozenset[str]) -> list[ReplicaView]:
    return [view for view in views if view.replica_id not in avoid] or views


def _forced_local_reason(
    decoder: ReplicaView, prefillers: Sequence[ReplicaView], context: PlacementContext
) -> RouteReason | None:
    """Why this replica must prefill what it decodes; None when another can."""
    if decoder.facts.role is Role.MIXED:
        return RouteReason.MIXED_POOL
    if not prefillers:
        return RouteReason.NO_PREFILL_REPLICA
    same_layout = [view for view in prefillers if view.facts.layout == decoder.facts.layout]
    if not same_layout:
        return RouteReason.INCOMPATIBLE
    has_link = any(_can_transfer(view, decoder, context) for view in same_layout)
    return None if has_link else RouteReason.NO_LINK


def _can_transfer(source: ReplicaView, target: ReplicaView, context: PlacementContext) -> bool:
    """Whether blocks can go from one to the other."""
    if source.facts.layout != target.facts.layout:
        return False
    return context.links.transfer_s(source.replica_id, target.replica_id, 0) is not None
