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

Without objectives every stream's second counts as one: the least sum of everybody's waiting wins.

In a large fleet only a shortlist is looked at: those that hold most of the prompt, and the idler
ones of a few pairs drawn by chance, which are close to the idlest of all (Source: Mitzenmacher, The
Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12(10), 2001). The draw, and how ties
break, differ between coordinators, so that several that see the same stale loads do not all choose
the same replica.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple
from zlib import crc32

from baton.domain.fleet import FleetView, ReplicaView, Role
from baton.domain.handoff import Decision, HandoffMode, Option, Route, RouteReason
from baton.policy.placement import Disaggregate, NoRoute, PlacementQuery, Surroundings, no_route
from baton.policy.replica_cost import ReplicaCost, compare, delay_s, replica_cost

NAME = "predicted"
_SHOWN = 3
"""Options kept with a decision."""
_SMALL = 8
"""A pool of so many is looked at as a whole."""
_PAIRS = 2
"""Best prefill and best decode replicas that are paired with each other, and holders that a prefix
is fetched from."""
_WORTH = 0.05
"""A handoff must be predicted to save this fraction: it takes two legs, a lease and a transfer, and
the model errs by as much."""
_NEAR = 0.1
"""A session's own replica is preferred when it costs at most this fraction more than the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedOptions:
    """What placement aims at."""

    disaggregate: Disaggregate = Disaggregate.AUTO
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    shortlist: int = 4
    """Holders of the prompt's prefix, and others, that are looked at for each phase."""

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "tpot_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"placement: {name} is {value}, wanted more than 0")
        if self.shortlist < 1:
            raise ValueError(f"placement: shortlist is {self.shortlist}, wanted at least 1")


class _Way(NamedTuple):
    """An option, what it is compared by, and the route it stands for."""

    late_s: float
    cost_s: float
    option: Option
    reason: RouteReason
    prefill_tokens: int | None = None


class PredictedPlacer:
    """Places by predicted seconds; keeps nothing but its generator."""

    def __init__(self, options: PredictedOptions | None = None, *, seed: int = 0) -> None:
        self._options = options or PredictedOptions()
        self._random = random.Random(seed)  # noqa: S311 - spreads load, guards nothing
        self._seed = crc32(str(seed).encode())

    # -------------------------------------------------------------- the port

    def place(self, query: PlacementQuery, around: Surroundings) -> Decision | NoRoute:
        """Choose the replicas for a request; the reason says what forced it, if anything."""
        roster = around.fleet.roster
        if not roster.decode and not roster.prefill:
            return no_route(around.fleet)
        decoders = self._costs(query, around, roster.decode or roster.prefill)
        forced = self._forced_local(query, around, decoders)
        prefillers = [] if forced else self._prefillers(query, around)
        remotes = [] if forced else self._remotes(query, around, prefillers, decoders)
        if forced is None and not remotes:
            forced = RouteReason.NO_LINK
        if remotes and self._options.disaggregate is Disaggregate.ALWAYS:
            return self._decide(query, around, remotes)
        reason = forced or RouteReason.LOCAL_FASTER
        ways = [self._local(query, cost, reason) for cost in decoders] + remotes
        if self._may_fetch(query):
            used = min(ways, key=_seconds).option.hit_tokens
            known = {cost.view.replica_id: cost for cost in (*prefillers, *decoders)}
            ways += self._fetches(query, around, decoders, known, used)
        return self._decide(query, around, ways)

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, around: Surroundings
    ) -> str | None:
        """Choose who decodes a prompt that `source` has prefilled; None when nobody can."""
        ids = around.fleet.roster.decode
        best: tuple[float, int, str] | None = None
        for cost in self._costs(query, around, ids) if ids else ():
            transfer_s = self._transfer_s(query, around, source, cost)
            if transfer_s is None or cost.view.replica_id == source.replica_id:
                continue
            spent_s = transfer_s + self._decode_s(cost) + cost.own_s
            spent_s += self._weight(cost) * cost.running * cost.join_s
            key = (spent_s, self._tie(cost.view.replica_id), cost.view.replica_id)
            best = key if best is None else min(best, key)
        return None if best is None else best[2]

    # -------------------------------------------------------------- candidates

    def _costs(
        self, query: PlacementQuery, around: Surroundings, ids: Sequence[str]
    ) -> list[ReplicaCost]:
        chosen = self._shortlist(query, around.fleet, ids)
        replicas = around.fleet.replicas
        return _costs_of(query, around, [replicas[one] for one in chosen])

    def _shortlist(
        self, query: PlacementQuery, fleet: FleetView, ids: Sequence[str]
    ) -> Iterable[str]:
        """Who of `ids` is looked at: all in a small fleet, holders and a sample in a large one.

        Replicas on which the request has failed are looked at only when there are no others.
        """
        avoid = query.avoid
        if avoid:
            ids = [one for one in ids if one not in avoid] or ids
        limit = self._options.shortlist
        if len(ids) <= max(_SMALL, 2 * limit):
            return ids
        chosen = dict.fromkeys(self._idle(fleet, ids, limit))
        named = [*query.hits.holders(limit), query.session_replica_id]
        prefill = fleet.replicas[ids[0]].facts.role is Role.PREFILL
        for one in named:
            view = None if one is None or one in avoid else fleet.replicas.get(one)
            # Cheaper than to look for it in a thousand ids; the source of a handoff is ruled out
            # by its role, or later, because it cannot pull from itself.
            if view and not view.draining and (view.facts.role is Role.PREFILL) == prefill:
                chosen[view.replica_id] = None
        return chosen

    def _idle(self, fleet: FleetView, ids: Sequence[str], wanted: int) -> Iterable[str]:
        """So many times the idler one of two: at even distances, from a random one on."""
        count, start = len(ids), self._random.randrange(len(ids))
        step = count // (2 * wanted)
        sample = [ids[(start + i * step) % count] for i in range(2 * wanted)]
        replicas = fleet.replicas
        for one, other in zip(sample[:wanted], sample[wanted:], strict=True):
            yield min(one, other, key=lambda each: _load_key(replicas[each]))

    def _prefillers(self, query: PlacementQuery, around: Surroundings) -> list[ReplicaCost]:
        """The prefill pool's; one on which the request has failed is not asked again."""
        ids: Sequence[str] = around.fleet.roster.prefill
        if query.avoid:
            ids = [one for one in ids if one not in query.avoid]
        return self._costs(query, around, ids) if ids else []

    # -------------------------------------------------------------- ways to run it

    def _forced_local(
        self, query: PlacementQuery, around: Surroundings, decoders: Sequence[ReplicaCost]
    ) -> RouteReason | None:
        """Why no prefill replica can, or may, do its part; None when one can."""
        roster = around.fleet.roster
        if not roster.decode:
            return RouteReason.NO_DECODE_REPLICA
        if query.local_only is not None:
            return RouteReason.LOCAL_ONLY
        if self._options.disaggregate is Disaggregate.NEVER:
            return RouteReason.DISAGGREGATION_OFF
        return _no_prefill(query, around, decoders)

    def _may_fetch(self, query: PlacementQuery) -> bool:
        return query.local_only is None and self._options.disaggregate is Disaggregate.AUTO

    def _local(self, query: PlacementQuery, cost: ReplicaCost, reason: RouteReason) -> _Way:
        uncached = query.prompt_tokens - cost.hit_tokens
        harm_s = _harm_s(cost, uncached)
        option = Option(
            HandoffMode.LOCAL,
            None,
            cost.view.replica_id,
            cost.hit_tokens,
            cost.hit.source,
            cost.hit.age_s,
            cost.queue_s,
            cost.prefill_s,
            0.0,
            0.0,
            harm_s,
        )
        return self._way(query, option, cost, reason, displaced_s=cost.displaced_s)

    def _remotes(
        self,
        query: PlacementQuery,
        around: Surroundings,
        prefillers: Sequence[ReplicaCost],
        decoders: Sequence[ReplicaCost],
    ) -> list[_Way]:
        sources = sorted(
            prefillers, key=lambda cost: (cost.queue_s + cost.prefill_s, cost.view.replica_id)
        )
        targets = sorted(decoders, key=_readiness)
        near = self._pairs(query, around, sources[:_PAIRS], targets[:_PAIRS])
        # All of the best may be quarantined with each other; the rest is then looked at too.
        return near or self._pairs(query, around, sources, targets)

    def _pairs(
        self,
        query: PlacementQuery,
        around: Surroundings,
        prefillers: Sequence[ReplicaCost],
        decoders: Sequence[ReplicaCost],
    ) -> list[_Way]:
        ways = []
        for source in prefillers:
            for target in decoders:
                transfer_s = self._transfer_s(query, around, source.view, target)
                if transfer_s is None or source.view is target.view:
                    continue
                uncached = query.prompt_tokens - source.hit_tokens
                harm_s = target.running * target.join_s
                if source.running:
                    harm_s += source.running * delay_s(source.timing, uncached)
                option = Option(
                    HandoffMode.PULL,
                    source.view.replica_id,
                    target.view.replica_id,
                    source.hit_tokens,
                    source.hit.source,
                    source.hit.age_s,
                    source.queue_s,
                    source.prefill_s,
                    transfer_s,
                    self._decode_s(target),
                    harm_s,
                )
                reason, displaced_s = RouteReason.DISAGGREGATED, source.displaced_s
                ways.append(self._way(query, option, target, reason, displaced_s=displaced_s))
        return ways

    def _fetches(
        self,
        query: PlacementQuery,
        around: Surroundings,
        decoders: Sequence[ReplicaCost],
        known: Mapping[str, ReplicaCost],
        used_tokens: int,
    ) -> list[_Way]:
        """Ways in which a replica that holds more of the prompt gives its blocks to another.

        None when the best other way makes use of as many cached tokens, `used_tokens`, already.
        """
        ways: list[_Way] = []
        targets = sorted(decoders, key=_readiness)[:_PAIRS]
        for holder_id in query.hits.holders(_PAIRS):
            view = around.fleet.replicas.get(holder_id)
            if view is None or view.draining or holder_id in query.avoid:
                continue
            if not view.facts.prefix_fetch:
                continue
            holder = known.get(holder_id) or _costs_of(query, around, [view])[0]
            if holder.hit_tokens <= used_tokens:
                break
            for target in targets:
                if target.hit_tokens < holder.hit_tokens and target.view is not view:
                    way = self._fetch(query, around, holder, target)
                    ways += [way] if way is not None else []
        return ways

    def _fetch(
        self,
        query: PlacementQuery,
        around: Surroundings,
        holder: ReplicaCost,
        target: ReplicaCost,
    ) -> _Way | None:
        tokens = holder.hit_tokens
        transfer_s = self._transfer_s(query, around, holder.view, target, tokens=tokens)
        if transfer_s is None:
            return None
        # The holder computes one token, so that its engine hands the blocks out.
        handed_out_s = holder.queue_s + holder.timing.prefill_s(1, running=holder.running)
        rest = query.prompt_tokens - tokens
        option = Option(
            HandoffMode.PULL,
            holder.view.replica_id,
            target.view.replica_id,
            tokens,
            holder.hit.source,
            holder.hit.age_s,
            handed_out_s,
            target.timing.prefill_s(rest, running=target.running),
            transfer_s,
            max(0.0, target.queue_s - handed_out_s - transfer_s),  # it waits meanwhile
            _harm_s(target, rest),
        )
        way = self._way(
            query, option, target, RouteReason.PREFIX_FETCH, displaced_s=target.displaced_s
        )
        return way._replace(prefill_tokens=tokens + 1)

    # -------------------------------------------------------------- seconds

    @staticmethod
    def _transfer_s(
        query: PlacementQuery,
        around: Surroundings,
        source: ReplicaView,
        target: ReplicaCost,
        *,
        tokens: int | None = None,
    ) -> float | None:
        """To move the blocks that the target does not hold itself; None when it cannot be done."""
        facts = target.view.facts
        if source.facts.layout != facts.layout:
            return None
        tokens = query.prompt_tokens if tokens is None else tokens
        blocks = max(0, -(-(tokens - target.hit_tokens) // facts.block_size_tokens))
        moved_bytes = blocks * facts.kv_block_bytes
        return around.links.transfer_s(source.replica_id, target.view.replica_id, moved_bytes)

    @staticmethod
    def _decode_s(target: ReplicaCost) -> float:
        """From the blocks' arrival to the first token: the step under way, a wait for room, a step.

        Prompts that queue there are not ahead of it: one token fits into the next step.
        """
        under_way_s = target.step_s / 2 if target.running else 0.0
        return under_way_s + target.room_wait_s + target.step_s

    def _weight(self, cost: ReplicaCost) -> float:
        """What a second lost by a running stream counts: less, far from its TPOT objective."""
        slo_s = self._options.tpot_slo_s
        return 1.0 if slo_s is None else min(1.0, cost.step_s / slo_s)

    def _way(
        self,
        query: PlacementQuery,
        option: Option,
        decoder: ReplicaCost,
        reason: RouteReason,
        *,
        displaced_s: float,
    ) -> _Way:
        ttft_s = option.ttft_s
        slo_s = self._options.ttft_slo_s
        late_s = 0.0 if slo_s is None else max(0.0, query.waited_s + ttft_s - slo_s)
        harm_s = self._weight(decoder) * option.harm_s + displaced_s
        cost_s = ttft_s + decoder.own_s + harm_s
        if option.mode is not HandoffMode.LOCAL:
            cost_s *= 1 + _WORTH
        return _Way(late_s, cost_s, option, reason)

    def _tie(self, replica_id: str) -> int:
        """An order of the replicas of this coordinator's own."""
        return crc32(replica_id.encode(), self._seed)

    # -------------------------------------------------------------- the choice

    def _decide(
        self, query: PlacementQuery, around: Surroundings, ways: Sequence[_Way]
    ) -> Decision:
        ranked = sorted(ways, key=_seconds)
        best = self._session_way(query, ranked) or self._first_of_equals(ranked)
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
            options=tuple(way.option for way in shown),
            considered=len(ways),
        )

    def _first_of_equals(self, ranked: Sequence[_Way]) -> _Way:
        """The best way; among equals it depends on the coordinator, but not on their order."""
        best = _seconds(ranked[0])
        equals = takewhile(lambda way: _seconds(way) == best, ranked)
        return min(equals, key=lambda way: self._tie(way.option.decode_replica_id))

    @staticmethod
    def _session_way(query: PlacementQuery, ranked: Sequence[_Way]) -> _Way | None:
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


def _costs_of(
    query: PlacementQuery, around: Surroundings, views: Iterable[ReplicaView]
) -> list[ReplicaCost]:
    timings, at_s, crowd = around.timings, around.fleet.at_s, around.fleet.crowd
    output_tokens = timings.expected_output_tokens(query.max_tokens)
    costs = [
        replica_cost(
            query, view, timings.of(view), output_tokens=output_tokens, at_s=at_s, crowd=crowd
        )
        for view in views
    ]
    compare(costs, reuses=query.reuses)
    return costs


def _harm_s(cost: ReplicaCost, prompt_tokens: int) -> float:
    """What the streams on a replica lose by one that computes so much of its prompt there."""
    if not cost.running:
        return 0.0
    return cost.running * (cost.join_s + delay_s(cost.timing, prompt_tokens))


def _load_key(view: ReplicaView) -> tuple[int, int]:
    """How much work a replica has, cheaply: tokens to compute, then requests."""
    load = view.load
    legs = load.running_requests + load.queued_requests + view.unseen_legs
    return load.queued_tokens + view.unseen_tokens, legs


def _readiness(cost: ReplicaCost) -> tuple[float, int, str]:
    """Who can take a prompt's blocks soonest, beside the fewest streams."""
    return cost.room_wait_s, cost.running, cost.view.replica_id


def _seconds(way: _Way) -> tuple[float, float]:
    return way.late_s, way.cost_s


def _no_prefill(
    query: PlacementQuery, around: Surroundings, decoders: Sequence[ReplicaCost]
) -> RouteReason | None:
    """Why no replica of the prefill pool would do; None when one would."""
    prefillers = around.fleet.roster.prefill
    if all(cost.view.facts.role is Role.MIXED for cost in decoders):
        return RouteReason.MIXED_POOL
    if all(one in query.avoid for one in prefillers):
        return RouteReason.NO_PREFILL_REPLICA
    layouts = {cost.view.facts.layout for cost in decoders}
    replicas = around.fleet.replicas
    if all(replicas[one].facts.layout not in layouts for one in prefillers):
        return RouteReason.INCOMPATIBLE
    return None
