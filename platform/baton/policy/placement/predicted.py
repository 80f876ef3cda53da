"""Placement by predicted seconds: the cost of each way for the request and for the others.

Theory of operation: for every candidate decode replica d there is LOCAL (d prefills too). For every
prefill replica p and decode replica d there is REMOTE (p prefills, d pulls the blocks). Where some
replica h holds much more of the prompt than d does, there is a prefix FETCH (h's blocks are pulled,
d computes the rest). The predicted time to first token of each way follows from the engines' fitted
timing, reported load, later legs, and the link with its flows. Its *harm* is the delay of the
streams running there, added up over all of them. The costs are seconds, so nothing is weighed
against unlike things:

    cost = predicted seconds over the TTFT objective, first; then
           ttft + own decode time + harm x (how near the streams are to their TPOT objective)
           + prefill that is done again later because of what this one drives out of a cache

With a TPOT objective, the requests that are predicted to miss an objective are counted instead of
the seconds over one, and each has a price in seconds; see `slo_impact`.

Without objectives every stream's second counts as one: the least sum of everybody's waiting wins.

In a large fleet only a shortlist is evaluated. It has the replicas that hold most of the prompt,
and the idler of each of a few random pairs, which is close to the idlest. The draw, and how ties
break, differ between coordinators, so several with the same stale loads do not all choose the same
replica. Where no pair on it can hand a prompt over, see `can_receive`. Source: Mitzenmacher, The
Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12(10), 2001.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from operator import attrgetter
from zlib import crc32

from baton.domain.fleet import FleetView, ReplicaView, Role
from baton.domain.handoff import PlacementDecision, Route, RouteReason
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.placement.candidates import PlacementOption, PlacementOptions
from baton.policy.placement.port import (
    Disaggregate,
    NoRoute,
    PlacementContext,
    PlacementQuery,
    no_route,
)
from baton.policy.placement.replica_cost import ReplicaCost
from baton.policy.placement.slo_impact import SloImpact
from baton.policy.prefix_cache.hits import NO_HITS

NAME = "predicted"
_MAX_OPTIONS_KEPT = 3
"""Options kept with a decision."""
_COST_KEY = attrgetter("late_s", "cost_s")
"""The costs by which ways are compared."""
_MIN_MISSES_AVOIDED = 0.5
"""Predicted misses that a way must avoid for a stream to stay where it was prefilled. Found by
trying: with less, streams stayed while the replica was free of prefills, and were held up by the
next prefill."""
_SESSION_TOLERANCE_FRACTION = 0.1
"""A session's own replica is preferred when it costs at most this fraction more than the best."""
_SMALL_POOL_REPLICAS = 8
"""A pool of at most this size is looked at as a whole."""
_MAX_PAIR_CHECKS = 5_000
"""Checks without a result, about 2 ms: if a whole large pool is cut off, each request pays that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedOptions:
    """The objectives of placement."""

    disaggregate: Disaggregate = Disaggregate.AUTO
    ttft_slo_s: float | None = None
    """Of requests that bring no objectives of their own."""
    tpot_slo_s: float | None = None
    """Likewise; and of the running streams, of any class."""
    decode_on_prefill_fraction: float = 0.25
    """Of a prefill replica's places in the batch, what streams may take that stay where they were
    prefilled; 0: none do."""
    prefill_on_decode_fraction: float = 1.0
    """Of a decode replica's time, what prompts may take before others go to the prefill pool only;
    where there is a TPOT objective."""
    shortlist: int = 3
    """Holders of the prefix, and idle others, that are looked at for each phase."""

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "tpot_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"placement: {name} is {value}, expected more than 0")
        for name in ("decode_on_prefill_fraction", "prefill_on_decode_fraction"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(f"placement: {name} is {share}, expected from 0 to 1")
        if self.shortlist < 1:
            raise ValueError(f"placement: shortlist is {self.shortlist}, expected at least 1")


class PredictedPlacer:
    """Places by predicted seconds; keeps nothing but its shortlist's generator."""

    def __init__(self, options: PredictedOptions | None = None, *, seed: int = 0) -> None:
        self._options = options or PredictedOptions()
        self._slo = Slo(ttft_s=self._options.ttft_slo_s, tpot_s=self._options.tpot_slo_s)
        """Of requests that come without one."""
        self._shortlist = Shortlist(self._options.shortlist, seed=seed)
        self._seed = crc32(str(seed).encode())

    # -------------------------------------------------------------- the port

    def place(
        self, query: PlacementQuery, context: PlacementContext
    ) -> PlacementDecision | NoRoute:
        """Choose the replicas for a request; the reason says what forced it, if anything."""
        eligible = context.fleet.eligible
        if not eligible.decode and not eligible.prefill:
            return no_route(context.fleet)
        placement_options = self._placement_options(query, context)
        decoders = self._costs(
            placement_options, query, context, eligible.decode or eligible.prefill
        )
        forced_reason, prefillers, candidates = self._handoffs(
            placement_options, query, context, decoders
        )
        if candidates and self._options.disaggregate is Disaggregate.ALWAYS:
            return self._decide(placement_options, query, context, candidates)
        reason = forced_reason or RouteReason.LOCAL_FASTER
        candidates += self._local_candidates(
            placement_options, decoders, reason, skip_busy=bool(candidates)
        )
        is_auto = self._options.disaggregate is Disaggregate.AUTO
        if forced_reason is None and is_auto:
            overflow = self._overflow_candidates(
                placement_options, query, prefillers, best=min(candidates, key=_COST_KEY)
            )
            if overflow and query.is_decode_saturated:
                return self._decide(placement_options, query, context, overflow)
            candidates += overflow
        if query.local_only is None and is_auto and query.hits is not NO_HITS:
            best_hit_tokens = min(candidates, key=_COST_KEY).option.hit_tokens
            known_costs = {cost.view.replica_id: cost for cost in (*prefillers, *decoders)}
            candidates += placement_options.prefix_fetches(
                decoders, known_costs, best_hit_tokens=best_hit_tokens
            )
        return self._decide(placement_options, query, context, candidates)

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, context: PlacementContext
    ) -> str | None:
        """Choose the decode replica of a prompt that `source` has prefilled, or None."""
        replica_ids = context.fleet.eligible.decode
        if not replica_ids:
            return None
        placement_options = self._placement_options(query, context)
        best = self._best_decode_target(
            placement_options, source, self._costs(placement_options, query, context, replica_ids)
        )
        if best is None and self._shortlist.needs_sampling(replica_ids):
            receivers = can_receive(
                [source], self._shortlist.prefer_untried(query, replica_ids), context
            )
            best = self._best_decode_target(
                placement_options, source, self._costs(placement_options, query, context, receivers)
            )
        return best

    def _best_decode_target(
        self, placement_options: PlacementOptions, source: ReplicaView, costs: Sequence[ReplicaCost]
    ) -> str | None:
        ranked_targets = [
            (cost_s, self._tie_break_key(cost.view.replica_id), cost.view.replica_id)
            for cost in costs
            if (cost_s := placement_options.handoff_cost_s(source, cost)) is not None
        ]
        return min(ranked_targets)[2] if ranked_targets else None

    # -------------------------------------------------------------- candidates

    def _placement_options(
        self, query: PlacementQuery, context: PlacementContext
    ) -> PlacementOptions:
        options, slo = self._options, query.slo or self._slo
        slo_impact = None
        if slo.tpot_s is not None or options.tpot_slo_s is not None:
            slo_impact = SloImpact(slo.tpot_s, slo.ttft_s, options.tpot_slo_s)
        return PlacementOptions(query, context, slo=slo, slo_impact=slo_impact)

    def _costs(
        self,
        placement_options: PlacementOptions,
        query: PlacementQuery,
        context: PlacementContext,
        replica_ids: Sequence[str],
    ) -> list[ReplicaCost]:
        return placement_options.costs(
            self._shortlist.select(query, context.fleet, replica_ids),
            leave_out_worse=self._shortlist.needs_sampling(replica_ids),
        )

    def _handoffs(
        self,
        placement_options: PlacementOptions,
        query: PlacementQuery,
        context: PlacementContext,
        decoders: Sequence[ReplicaCost],
    ) -> tuple[RouteReason | None, list[ReplicaCost], list[PlacementOption]]:
        """The reason against handoffs, if any; the prefill candidates; and the handoffs."""
        forced_reason = self._forced_local_reason(query, context, decoders)
        prefillers = (
            [] if forced_reason else self._prefillers(placement_options, query, context, decoders)
        )
        candidates = [] if forced_reason else placement_options.disaggregated(prefillers, decoders)
        if candidates or forced_reason not in {None, RouteReason.INCOMPATIBLE}:
            return forced_reason, prefillers, candidates
        eligible = context.fleet.eligible
        if self._shortlist.needs_sampling(eligible.prefill) or self._shortlist.needs_sampling(
            eligible.decode
        ):
            other_prefillers, candidates = self._further_handoffs(placement_options, query, context)
            if candidates:
                return None, other_prefillers, candidates
        return forced_reason or RouteReason.NO_LINK, prefillers, []

    def _further_handoffs(
        self, placement_options: PlacementOptions, query: PlacementQuery, context: PlacementContext
    ) -> tuple[list[ReplicaCost], list[PlacementOption]]:
        """The handoffs beyond the shortlist, if the shortlist has none."""
        eligible = context.fleet.eligible
        targets = self._shortlist.prefer_untried(query, eligible.decode)
        untried = (replica_id for replica_id in eligible.prefill if replica_id not in query.avoid)
        senders = can_send(untried, targets, context)
        sources = self._costs(placement_options, query, context, senders) if senders else []
        receivers = can_receive((cost.view for cost in sources), targets, context)
        return sources, placement_options.disaggregated(
            sources, self._costs(placement_options, query, context, receivers)
        )

    def _prefillers(
        self,
        placement_options: PlacementOptions,
        query: PlacementQuery,
        context: PlacementContext,
        decoders: Sequence[ReplicaCost],
    ) -> list[ReplicaCost]:
        """The prefill pool's, and those that do both beside others that only decode.

        One on which the request has failed is not asked again.
        """
        replica_ids: Sequence[str] = context.fleet.eligible.prefill
        if query.avoid:
            replica_ids = [
                replica_id for replica_id in replica_ids if replica_id not in query.avoid
            ]
        costs = self._costs(placement_options, query, context, replica_ids) if replica_ids else []
        return costs + _mixed_prefillers(query, decoders)

    def _local_candidates(
        self,
        placement_options: PlacementOptions,
        decoders: Sequence[ReplicaCost],
        reason: RouteReason,
        *,
        skip_busy: bool,
    ) -> list[PlacementOption]:
        """LOCAL ways; a replica busy with prompts is a candidate only without others."""
        max_prefill_fraction = self._options.prefill_on_decode_fraction
        usable = [
            cost
            for cost in decoders
            if not skip_busy or cost.prefill_time_fraction <= max_prefill_fraction
        ]
        return [placement_options.local(cost, reason) for cost in usable]

    def _overflow_candidates(
        self,
        placement_options: PlacementOptions,
        query: PlacementQuery,
        prefillers: Sequence[ReplicaCost],
        *,
        best: PlacementOption,
    ) -> list[PlacementOption]:
        """A prefill replica decodes, too: where that keeps an objective more, or is no decoding.

        Later prefills there are not known, and would hold the stream up.
        """
        max_streams_fraction = self._options.decode_on_prefill_fraction
        is_prefill_only = query.max_tokens == 1
        if not max_streams_fraction or not (
            best.expected_misses >= _MIN_MISSES_AVOIDED
            or is_prefill_only
            or query.is_decode_saturated
        ):
            return []
        prefill_only = [cost for cost in prefillers if cost.view.facts.role is Role.PREFILL]
        candidates = placement_options.decode_on_prefill(
            prefill_only, streams_fraction=max_streams_fraction
        )
        if query.is_decode_saturated:
            return [way for way in candidates if way.expected_misses < _MIN_MISSES_AVOIDED]
        return [
            way
            for way in candidates
            if is_prefill_only or way.expected_misses <= best.expected_misses - _MIN_MISSES_AVOIDED
        ]

    def _forced_local_reason(
        self, query: PlacementQuery, context: PlacementContext, decoders: Sequence[ReplicaCost]
    ) -> RouteReason | None:
        """Why no prefill replica can, or may, do its part; None when one can."""
        if not context.fleet.eligible.decode:
            return RouteReason.NO_DECODE_REPLICA
        if query.local_only is not None:
            return RouteReason.LOCAL_ONLY
        if self._options.disaggregate is Disaggregate.NEVER:
            return RouteReason.DISAGGREGATION_OFF
        return _no_prefill_reason(query, context, decoders)

    # -------------------------------------------------------------- the choice

    def _decide(
        self,
        placement_options: PlacementOptions,
        query: PlacementQuery,
        context: PlacementContext,
        candidates: Sequence[PlacementOption],
    ) -> PlacementDecision:
        ranked = sorted(candidates, key=_COST_KEY)
        replication, credit = placement_options.choose_replication(ranked)
        best = replication or _session_candidate(query, ranked) or self._break_tie(ranked)
        others = [way for way in ranked if way is not best]
        kept = [best, *others[: _MAX_OPTIONS_KEPT - 1]]
        option = best.option
        route = Route(
            mode=option.mode,
            prefill_replica_id=option.prefill_replica_id,
            decode_replica_id=option.decode_replica_id,
            reason=best.reason,
            prefill_tokens=best.prefill_tokens,
        )
        return PlacementDecision(
            route=route,
            policy=NAME,
            at_s=context.fleet.at_s,
            options=tuple(
                [
                    evolve(way.option, cost_s=way.cost_s, expected_misses=way.expected_misses)
                    for way in kept
                ]
            ),
            options_considered=len(candidates),
            replication_credit=credit,
        )

    def _break_tie(self, ranked: Sequence[PlacementOption]) -> PlacementOption:
        """The best way; among equals it depends on the coordinator, but not on their order."""
        first = ranked[0]
        best_cost = _COST_KEY(first)
        if len(ranked) == 1 or _COST_KEY(ranked[1]) != best_cost:
            return first
        equals = takewhile(lambda way: _COST_KEY(way) == best_cost, ranked)
        return min(equals, key=lambda way: self._tie_break_key(way.option.decode_replica_id))

    def _tie_break_key(self, replica_id: str) -> int:
        """An order of the replicas of this coordinator's own."""
        return crc32(replica_id.encode(), self._seed)


def _session_candidate(
    query: PlacementQuery, ranked: Sequence[PlacementOption]
) -> PlacementOption | None:
    """The way over the session's last replica, when that costs hardly more than the best."""
    session_replica_id = query.session_replica_id
    if session_replica_id is None:
        return None
    best = ranked[0]
    for candidate in ranked:
        if candidate.late_s > best.late_s or candidate.cost_s > best.cost_s * (
            1 + _SESSION_TOLERANCE_FRACTION
        ):
            return None
        if candidate.option.decode_replica_id == session_replica_id:
            return candidate
    return None


def _no_prefill_reason(
    query: PlacementQuery, context: PlacementContext, decoders: Sequence[ReplicaCost]
) -> RouteReason | None:
    """Why no replica could prefill for another; None when a replica could."""
    prefillers, replicas = context.fleet.eligible.prefill, context.fleet.replicas
    if (
        prefillers
        and prefillers[0] not in query.avoid
        and replicas[prefillers[0]].facts.layout == decoders[0].view.facts.layout
    ):
        return None  # as nearly always
    if not prefillers and all(cost.view.facts.role is Role.MIXED for cost in decoders):
        return RouteReason.MIXED_POOL
    if _mixed_prefillers(query, decoders):
        return None
    if all(prefiller in query.avoid for prefiller in prefillers):
        return RouteReason.NO_PREFILL_REPLICA
    layouts = {cost.view.facts.layout for cost in decoders}
    if all(replicas[prefiller].facts.layout not in layouts for prefiller in prefillers):
        return RouteReason.INCOMPATIBLE
    return None


def _mixed_prefillers(query: PlacementQuery, decoders: Sequence[ReplicaCost]) -> list[ReplicaCost]:
    """Mixed replicas beside others that only decode: they may prefill for these, too.

    Where all do both, each keeps what it has prefilled: the next request goes to another anyway.
    """
    mixed = [cost for cost in decoders if cost.view.facts.role is Role.MIXED]
    if not mixed or len(mixed) == len(decoders):
        return []
    return [cost for cost in mixed if cost.view.replica_id not in query.avoid]


class Shortlist:
    """Holders of the prefix, and the idler of each random pair; keeps a generator."""

    def __init__(self, limit: int, *, seed: int) -> None:
        self._limit = limit
        self._max_unsampled = max(_SMALL_POOL_REPLICAS, 2 * limit)
        self._random = random.Random(seed)  # noqa: S311 - spreads load, guards nothing

    def select(
        self, query: PlacementQuery, fleet: FleetView, replica_ids: Sequence[str]
    ) -> Iterable[str]:
        """The shortlisted `replica_ids` of one pool.

        Replicas on which the request has failed are looked at only when there are no others.
        """
        avoid, replica_ids = query.avoid, self.prefer_untried(query, replica_ids)
        if not self.needs_sampling(replica_ids):
            return replica_ids
        idler = self._sample_idle(fleet, replica_ids)
        if query.hits is NO_HITS and query.session_replica_id is None and query.adapter is None:
            return idler
        chosen = dict.fromkeys(idler)
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
        """The replicas on which the request has not failed, or else all."""
        avoid = query.avoid
        return ([id_ for id_ in ids if id_ not in avoid] or ids) if avoid else ids

    def needs_sampling(self, ids: Sequence[str]) -> bool:
        """Whether these are too many to look at each."""
        return len(ids) > self._max_unsampled

    def _with_adapter(self, name: str, fleet: FleetView, ids: Sequence[str]) -> Iterable[str]:
        """The first replicas that have an adapter, from a random one on."""
        start, replicas = self._random.randrange(len(ids)), fleet.replicas
        holders = (
            id_ for id_ in chain(ids[start:], ids[:start]) if replicas[id_].has_adapter(name)
        )
        return islice(holders, self._limit)

    def _sample_idle(self, fleet: FleetView, ids: Sequence[str]) -> list[str]:
        """The idler one of each of some pairs, at even distances from a random one on.

        Idler has less work: tokens to compute, then requests. The first is taken of equals.
        """
        count, pairs = len(ids), self._limit
        start, step = self._random.randrange(count), count // (2 * pairs)
        replicas, half, idler = fleet.replicas, pairs * step, []
        for position in range(start, start + half, step):
            first_id, second_id = ids[position % count], ids[(position + half) % count]
            first, second = replicas[first_id], replicas[second_id]
            load, other = first.load, second.load
            tokens = load.queued_tokens + first.unreported_tokens
            more_tokens = other.queued_tokens + second.unreported_tokens - tokens
            is_first = more_tokens > 0
            if not more_tokens:
                legs = load.running_requests + load.queued_requests + first.unreported_legs
                is_first = (
                    legs <= other.running_requests + other.queued_requests + second.unreported_legs
                )
            idler.append(first_id if is_first else second_id)
        return idler


def can_receive(
    sources: Iterable[ReplicaView], targets: Iterable[str], context: PlacementContext
) -> list[str]:
    """Those of the targets that could pull from at least one of a few sources.

    A shortlist is drawn without regard to layouts and links, which are alike nearly everywhere. To
    check a thousand replicas would cost more than the rest of a placement. Where no drawn replica
    can do it (half of a pool has another layout during a rollout), it is drawn once more, from
    those that can.
    """
    sources, replicas = tuple(sources), context.fleet.replicas
    return [
        target
        for target in targets
        if any(_can_pull(source, replicas[target], context) for source in sources)
    ]


def can_send(
    sources: Iterable[str], targets: Sequence[str], context: PlacementContext
) -> list[str]:
    """Those of the sources from which at least one of the targets could pull."""
    replicas = context.fleet.replicas
    by_layout: dict[str, list[ReplicaView]] = {}
    for target in targets:
        view = replicas[target]
        by_layout.setdefault(view.facts.layout, []).append(view)
    senders, checks = [], 0
    for other in sources:
        source = replicas[other]
        same_layout = by_layout.get(source.facts.layout, ())
        if any(_can_pull(source, target, context) for target in same_layout):
            senders.append(other)
            continue
        checks += len(same_layout)
        if checks > _MAX_PAIR_CHECKS:
            break
    return senders


def _can_pull(source: ReplicaView, target: ReplicaView, context: PlacementContext) -> bool:
    source_facts, target_facts = source.facts, target.facts
    if (
        source_facts.layout != target_facts.layout
        or source_facts.replica_id == target_facts.replica_id
    ):
        return False
    return context.links.transfer_s(source_facts.replica_id, target_facts.replica_id, 0) is not None
