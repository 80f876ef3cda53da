"""Placement by predicted seconds: what each way to run a request costs it, and costs the others.

Theory of operation: for every candidate decode replica d there is LOCAL (d prefills too); for every
prefill replica p and decode replica d there is REMOTE (p prefills, d pulls the blocks); and where
some replica h holds much more of the prompt than d does, there is a prefix FETCH (h's blocks are
pulled, d computes the rest). Each gets a predicted time to first token, from the engines' fitted
timing, the load they reported, what was sent since, the link and its flows, and a *harm*: what the
streams running there lose, added up over all of them. The costs are seconds, so nothing is weighed
against unlike things:

    cost = predicted seconds over the TTFT objective, first; then
           ttft + own decode time + harm x (how near the streams are to their TPOT objective)
           + prefill that is done again later because of what this one drives out of a cache

With a TPOT objective, the requests that are predicted to miss an objective are counted instead of
the seconds over one, and each has a price in seconds; see `promises`.

Without objectives every stream's second counts as one: the least sum of everybody's waiting wins.

In a large fleet only a shortlist is looked at: those that hold most of the prompt, and the idler
ones of a few pairs drawn by chance, which are close to the idlest of all (Source: Mitzenmacher, The
Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12(10), 2001). The draw, and how ties
break, differ between coordinators, so that several that see the same stale loads do not all choose
the same replica. Where nobody on it can hand a prompt over to another, see `partners`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from zlib import crc32

from baton.domain.fleet import ReplicaView, Role
from baton.domain.handoff import Decision, Route, RouteReason
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.placement.candidates import Way, Ways
from baton.policy.placement.compatible_pairs import givers, takers
from baton.policy.placement.port import (
    Disaggregate,
    NoRoute,
    PlacementQuery,
    Surroundings,
    no_route,
)
from baton.policy.placement.replica_cost import ReplicaCost
from baton.policy.placement.shortlist import Shortlist
from baton.policy.placement.slo_impact import Promises
from baton.policy.prefix_cache.hits import NO_HITS

NAME = "predicted"
_SHOWN = 3
"""Options kept with a decision."""
_SECONDS = attrgetter("late_s", "cost_s")
"""What ways are compared by."""
_KEEPS = 0.5
"""Requests that are to miss an objective less, as predicted, for a stream to stay where it was
prefilled. Found by trying: with less, streams stayed while nobody prefilled there, and were held up
when somebody did."""
_NEAR = 0.1
"""A session's own replica is preferred when it costs at most this fraction more than the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedOptions:
    """What placement aims at."""

    disaggregate: Disaggregate = Disaggregate.AUTO
    ttft_slo_s: float | None = None
    """Of requests that bring no objectives of their own."""
    tpot_slo_s: float | None = None
    """Likewise; and of the streams that run, whatever they are promised."""
    deflect_streams_fraction: float = 0.25
    """Of a prefill replica's places in the batch, what streams may take that stay where they were
    prefilled; 0: none do."""
    deflect_prompt_fraction: float = 1.0
    """Of a decode replica's time, what prompts may take before others go to the prefill pool only;
    where there is a TPOT objective."""
    shortlist: int = 3
    """Holders of the prefix, and idle others, that are looked at for each phase."""

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "tpot_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"placement: {name} is {value}, wanted more than 0")
        for name in ("deflect_streams_fraction", "deflect_prompt_fraction"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(f"placement: {name} is {share}, wanted from 0 to 1")
        if self.shortlist < 1:
            raise ValueError(f"placement: shortlist is {self.shortlist}, wanted at least 1")


class PredictedPlacer:
    """Places by predicted seconds; keeps nothing but its shortlist's generator."""

    def __init__(self, options: PredictedOptions | None = None, *, seed: int = 0) -> None:
        self._options = options or PredictedOptions()
        self._slo = Slo(ttft_s=self._options.ttft_slo_s, tpot_s=self._options.tpot_slo_s)
        """Of requests that come without one."""
        self._shortlist = Shortlist(self._options.shortlist, seed=seed)
        self._seed = crc32(str(seed).encode())

    # -------------------------------------------------------------- the port

    def place(self, query: PlacementQuery, around: Surroundings) -> Decision | NoRoute:
        """Choose the replicas for a request; the reason says what forced it, if anything."""
        roster = around.fleet.roster
        if not roster.decode and not roster.prefill:
            return no_route(around.fleet)
        ways = self._ways(query, around)
        decoders = self._costs(ways, query, around, roster.decode or roster.prefill)
        forced, prefillers, found = self._handoffs(ways, query, around, decoders)
        if found and self._options.disaggregate is Disaggregate.ALWAYS:
            return self._decide(ways, query, around, found)
        reason = forced or RouteReason.LOCAL_FASTER
        found += self._locals(ways, decoders, reason, may_skip=bool(found))
        may_choose = self._options.disaggregate is Disaggregate.AUTO
        if forced is None and may_choose:
            stay = self._deflected(ways, query, prefillers, than=min(found, key=_SECONDS))
            if stay and query.decode_full:
                return self._decide(ways, query, around, stay)
            found += stay
        if query.local_only is None and may_choose and query.hits is not NO_HITS:
            used_tokens = min(found, key=_SECONDS).option.hit_tokens
            known = {cost.view.replica_id: cost for cost in (*prefillers, *decoders)}
            found += ways.fetches(decoders, known, used_tokens=used_tokens)
        return self._decide(ways, query, around, found)

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, around: Surroundings
    ) -> str | None:
        """Choose who decodes a prompt that `source` has prefilled; None when nobody can."""
        ids = around.fleet.roster.decode
        if not ids:
            return None
        ways = self._ways(query, around)
        best = self._best_taker(ways, source, self._costs(ways, query, around, ids))
        if best is None and self._shortlist.leaves_out(ids):
            able = takers([source], self._shortlist.pool(query, ids), around)
            best = self._best_taker(ways, source, self._costs(ways, query, around, able))
        return best

    def _best_taker(
        self, ways: Ways, source: ReplicaView, costs: Sequence[ReplicaCost]
    ) -> str | None:
        able = [
            (left_s, self._tie(cost.view.replica_id), cost.view.replica_id)
            for cost in costs
            if (left_s := ways.handoff_s(source, cost)) is not None
        ]
        return min(able)[2] if able else None

    # -------------------------------------------------------------- candidates

    def _ways(self, query: PlacementQuery, around: Surroundings) -> Ways:
        options, slo = self._options, query.slo or self._slo
        promises = None
        if slo.tpot_s is not None or options.tpot_slo_s is not None:
            promises = Promises(slo.tpot_s, slo.ttft_s, options.tpot_slo_s)
        return Ways(query, around, slo=slo, promises=promises)

    def _costs(
        self, ways: Ways, query: PlacementQuery, around: Surroundings, ids: Sequence[str]
    ) -> list[ReplicaCost]:
        return ways.costs(self._shortlist.of(query, around.fleet, ids))

    def _handoffs(
        self,
        ways: Ways,
        query: PlacementQuery,
        around: Surroundings,
        decoders: Sequence[ReplicaCost],
    ) -> tuple[RouteReason | None, list[ReplicaCost], list[Way]]:
        """Why there is no handoff, if there is none; who may prefill; and the handoffs."""
        forced = self._forced_local(query, around, decoders)
        prefillers = [] if forced else self._prefillers(ways, query, around, decoders)
        found = [] if forced else ways.remotes(prefillers, decoders)
        if found or forced not in {None, RouteReason.INCOMPATIBLE}:
            return forced, prefillers, found
        roster = around.fleet.roster
        if self._shortlist.leaves_out(roster.prefill) or self._shortlist.leaves_out(roster.decode):
            others, found = self._further_handoffs(ways, query, around)
            if found:
                return None, others, found
        return forced or RouteReason.NO_LINK, prefillers, []

    def _further_handoffs(
        self, ways: Ways, query: PlacementQuery, around: Surroundings
    ) -> tuple[list[ReplicaCost], list[Way]]:
        """The handoffs among those that were not looked at, where nobody else can do it."""
        roster = around.fleet.roster
        targets = self._shortlist.pool(query, roster.decode)
        fresh = (one for one in roster.prefill if one not in query.avoid)
        able = givers(fresh, targets, around)
        sources = self._costs(ways, query, around, able) if able else []
        pulling = takers((cost.view for cost in sources), targets, around)
        return sources, ways.remotes(sources, self._costs(ways, query, around, pulling))

    def _prefillers(
        self,
        ways: Ways,
        query: PlacementQuery,
        around: Surroundings,
        decoders: Sequence[ReplicaCost],
    ) -> list[ReplicaCost]:
        """The prefill pool's, and those that do both beside others that only decode.

        One on which the request has failed is not asked again.
        """
        ids: Sequence[str] = around.fleet.roster.prefill
        if query.avoid:
            ids = [one for one in ids if one not in query.avoid]
        found = self._costs(ways, query, around, ids) if ids else []
        return found + _do_both(query, decoders)

    def _locals(
        self, ways: Ways, decoders: Sequence[ReplicaCost], reason: RouteReason, *, may_skip: bool
    ) -> list[Way]:
        """A decode replica prefills, too; one that is busy with prompts only if nobody else can."""
        most = self._options.deflect_prompt_fraction
        free = [cost for cost in decoders if not may_skip or cost.prompt_share <= most]
        return [ways.local(cost, reason) for cost in free]

    def _deflected(
        self, ways: Ways, query: PlacementQuery, prefillers: Sequence[ReplicaCost], *, than: Way
    ) -> list[Way]:
        """A prefill replica decodes, too: where that keeps an objective more, or is no decoding.

        What will be prefilled there later is not known, and would hold the stream up.
        """
        most = self._options.deflect_streams_fraction
        ends_there = query.max_tokens == 1
        if not most or not (than.missed >= _KEEPS or ends_there or query.decode_full):
            return []
        pure = [cost for cost in prefillers if cost.view.facts.role is Role.PREFILL]
        found = ways.deflected(pure, streams_fraction=most)
        if query.decode_full:
            return [way for way in found if way.missed < _KEEPS]
        return [way for way in found if ends_there or way.missed <= than.missed - _KEEPS]

    def _forced_local(
        self, query: PlacementQuery, around: Surroundings, decoders: Sequence[ReplicaCost]
    ) -> RouteReason | None:
        """Why no prefill replica can, or may, do its part; None when one can."""
        if not around.fleet.roster.decode:
            return RouteReason.NO_DECODE_REPLICA
        if query.local_only is not None:
            return RouteReason.LOCAL_ONLY
        if self._options.disaggregate is Disaggregate.NEVER:
            return RouteReason.DISAGGREGATION_OFF
        return _no_prefill(query, around, decoders)

    # -------------------------------------------------------------- the choice

    def _decide(
        self, ways: Ways, query: PlacementQuery, around: Surroundings, found: Sequence[Way]
    ) -> Decision:
        ranked = sorted(found, key=_SECONDS)
        spread, forgone = ways.spread(ranked)
        best = spread or _session_way(query, ranked) or self._first_of_equals(ranked)
        shown = [best, *(way for way in ranked[:_SHOWN] if way is not best)][:_SHOWN]
        option = best.option
        route = Route(
            mode=option.mode,
            prefill_replica_id=option.prefill_replica_id,
            decode_replica_id=option.decode_replica_id,
            reason=best.reason,
            prefill_tokens=best.prefill_tokens,
        )
        return Decision(
            route=route,
            policy=NAME,
            at_s=around.fleet.at_s,
            options=tuple(
                [evolve(way.option, cost_s=way.cost_s, missed=way.missed) for way in shown]
            ),
            considered=len(found),
            forgone=forgone,
        )

    def _first_of_equals(self, ranked: Sequence[Way]) -> Way:
        """The best way; among equals it depends on the coordinator, but not on their order."""
        first = ranked[0]
        best = _SECONDS(first)
        if len(ranked) == 1 or _SECONDS(ranked[1]) != best:
            return first
        equals = takewhile(lambda way: _SECONDS(way) == best, ranked)
        return min(equals, key=lambda way: self._tie(way.option.decode_replica_id))

    def _tie(self, replica_id: str) -> int:
        """An order of the replicas of this coordinator's own."""
        return crc32(replica_id.encode(), self._seed)


def _session_way(query: PlacementQuery, ranked: Sequence[Way]) -> Way | None:
    """The way over the session's last replica, when that costs hardly more than the best."""
    wanted = query.session_replica_id
    if wanted is None:
        return None
    best = ranked[0]
    for way in ranked:
        if way.late_s > best.late_s or way.cost_s > best.cost_s * (1 + _NEAR):
            return None
        if way.option.decode_replica_id == wanted:
            return way
    return None


def _no_prefill(
    query: PlacementQuery, around: Surroundings, decoders: Sequence[ReplicaCost]
) -> RouteReason | None:
    """Why nobody could prefill for another; None when somebody could."""
    prefillers = around.fleet.roster.prefill
    if not prefillers and all(cost.view.facts.role is Role.MIXED for cost in decoders):
        return RouteReason.MIXED_POOL
    if _do_both(query, decoders):
        return None
    if all(one in query.avoid for one in prefillers):
        return RouteReason.NO_PREFILL_REPLICA
    layouts = {cost.view.facts.layout for cost in decoders}
    replicas = around.fleet.replicas
    if all(replicas[one].facts.layout not in layouts for one in prefillers):
        return RouteReason.INCOMPATIBLE
    return None


def _do_both(query: PlacementQuery, decoders: Sequence[ReplicaCost]) -> list[ReplicaCost]:
    """Mixed replicas beside others that only decode: they may prefill for these, too.

    Where all do both, each keeps what it has prefilled: the next request goes to another anyway.
    """
    mixed = [cost for cost in decoders if cost.view.facts.role is Role.MIXED]
    if not mixed or len(mixed) == len(decoders):
        return []
    return [cost for cost in mixed if cost.view.replica_id not in query.avoid]
