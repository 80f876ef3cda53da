"""The ways to run a request on given replicas, each with its predicted cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from baton.domain.fleet import ReplicaView
from baton.domain.handoff import HandoffMode, ReplicationCredit, RouteOption, RouteReason
from baton.domain.slo import Slo
from baton.domain.value import Value, evolve
from baton.perf.timing import EngineTiming, added_prefill_s, decode_delay_s
from baton.policy.admission.slo_evaluation import MAX_ITL_VIOLATION_FRACTION
from baton.policy.placement.port import PlacementContext, PlacementQuery
from baton.policy.placement.replica_cost import (
    NO_LOAD,
    ReplicaCost,
    StreamLoad,
    fill_relative_costs,
    has_room,
    holds_nothing,
    idle_cost,
    is_alike,
    is_idle,
    replica_cost,
    stream_load,
)
from baton.policy.placement.slo_impact import SloImpact
from baton.policy.prefix_cache.hits import NO_HITS
from baton.policy.prefix_cache.replication import COPY_PRICE_MULTIPLE

_MAX_PAIRED_REPLICAS = 2
"""Best prefill and best decode replicas that are paired with each other, and holders that a prefix
is fetched from."""
_MAX_DEPTHS = 4
"""At how many depths of caches that share part of the prompt to look: the deepest."""
_MIN_HANDOFF_SAVING_FRACTION = 0.05
"""A handoff must be predicted to save this fraction: it takes two legs, a lease and a transfer, and
the model errs by as much."""


class FirstTokenPlan(NamedTuple):
    """When the first token goes out, and whether the rest then meets its objectives."""

    is_early: bool
    breaks_slo: bool = False
    """Its TPOT or ITL objective is predicted to be missed by that."""


_NO_EARLY_TOKEN = FirstTokenPlan(is_early=False)


class PlacementOption(Value, kw_only=False):
    """An option, what it is compared by, and the route it stands for."""

    late_s: float
    cost_s: float
    option: RouteOption
    reason: RouteReason
    prefill_tokens: int | None = None
    expected_misses: float = 0.0
    prefilled_by: ReplicaCost | None = None
    """The replica that computes the prompt, and so stores it; None for a fetched prompt."""


class PlacementOptions:
    """One request's ways, in the surroundings of one moment."""

    def __init__(
        self,
        query: PlacementQuery,
        context: PlacementContext,
        *,
        slo: Slo,
        slo_impact: SloImpact | None,
    ) -> None:
        self._query = query
        self._context = context
        self._slo = slo
        self._slo_impact = slo_impact
        self._output_tokens = context.timings.expected_output_tokens(query.max_tokens)
        self._decode_delays: list[tuple[EngineTiming, int, float]] = []
        """Timings, prompt tokens, and the delay of streams; a pool has one timing at a time."""

    def costs(
        self, replica_ids: Iterable[str], *, leave_out_worse: bool = False
    ) -> list[ReplicaCost]:
        """The predicted cost of each of some replicas for its part, among which one is chosen.

        With `leave_out_worse`, replicas that are worse than another in all respects are left out,
        where their loads alone show it.
        """
        query, fleet, timings = self._query, self._context.fleet, self._context.timings
        output_tokens = self._output_tokens
        replicas, at_s, peer_load_factor = fleet.replicas, fleet.at_s, fleet.peer_load_factor
        prefills_done_at_s = None if query.slo is None else self._context.prefills_done_at_s
        views = [replicas[replica_id] for replica_id in replica_ids]
        left_out: list[StreamLoad] = []
        if leave_out_worse and len(views) > 1:
            left_out = self._remove_worse(views)
        costs: list[ReplicaCost] = []
        idle: list[ReplicaCost] = []
        for view in views:
            timing, prefills_done_s = timings.of(view), None
            if prefills_done_at_s is not None:
                prefills_done_s = prefills_done_at_s.get(view.facts.replica_id, 0.0) - at_s
            may_copy = (
                is_idle(view)
                and holds_nothing(query, view)
                and not (prefills_done_s and prefills_done_s > 0)
            )
            cost = idle_cost(idle, view, timing) if may_copy else None
            if cost is None:
                cost = replica_cost(
                    query,
                    view,
                    timing,
                    output_tokens=output_tokens,
                    at_s=at_s,
                    peer_load_factor=peer_load_factor,
                    prefills_done_s=prefills_done_s,
                    stream_context=timings.stream_context(view),
                )
                idle += [cost] if may_copy else []
            costs.append(cost)
        if self._slo_impact is not None:
            for cost in costs:
                cost.prefill_time_fraction = timings.prefill_time_fraction(cost.view, at_s)
        fill_relative_costs(
            costs,
            reuses_per_token=query.reuses_per_token,
            cache_capacity=self._context.cache_capacity,
            left_out=left_out,
        )
        return costs

    def _remove_worse(self, views: list[ReplicaView]) -> list[StreamLoad]:
        """Remove replicas that are no better than the least loaded one; returns their loads.

        Another of its kind with no fewer streams, context, prompt tokens and legs is no faster in
        any part, for a prompt that no replica holds a part of. It could only take the second place,
        unless it is where the session was, or TPOT objectives weigh its streams.
        """
        query, context = self._query, self._context
        if query.adapter is not None or self._slo_impact is not None or query.hits.holders(1):
            return []
        timings, peer_load_factor = context.timings, context.fleet.peer_load_factor
        attended_tokens = query.prompt_tokens + int(self._output_tokens / 2)
        loads = [
            NO_LOAD
            if is_idle(view)
            else stream_load(view, attended_tokens, peer_load_factor, timings.stream_context(view))
            for view in views
        ]
        # One may run nothing and yet have no room, for its blocks are leased: that is not idle.
        idle = [number for number, load in enumerate(loads) if load is NO_LOAD]
        position = idle[0] if idle else loads.index(min(loads))
        best, least = views[position], loads[position]
        facts, timing = best.facts, timings.of(best)
        if least is not NO_LOAD:
            done_at_s = context.prefills_done_at_s.get(facts.replica_id, 0.0)
            is_waited_for = least.prompt_tokens or done_at_s > context.fleet.at_s
            if is_waited_for or not has_room(best, least, query.prompt_tokens):
                return []
        left_out: list[StreamLoad] = []
        for number in range(len(views) - 1, -1, -1):
            view, load = views[number], loads[number]
            if (
                view is not best
                and load.context_tokens >= least.context_tokens
                and load.legs >= least.legs
                and is_alike(view.facts, facts)
                and (view.facts.pool == facts.pool or timings.of(view) is timing)
                and view.facts.replica_id != query.session_replica_id
            ):
                left_out.append(load)
                del views[number]
        return left_out

    def local(self, cost: ReplicaCost, reason: RouteReason) -> PlacementOption:
        """One replica runs both phases."""
        uncached_tokens, hit = self._query.prompt_tokens - cost.hit_tokens, cost.hit
        option = RouteOption(
            HandoffMode.LOCAL,
            None,
            cost.view.facts.replica_id,
            cost.hit_tokens,
            hit.source,
            hit.age_s,
            cost.queue_s,
            cost.prefill_s,
            0.0,
            0.0,
            self._interference_s(cost, uncached_tokens),
            adapter_load_s=cost.adapter_load_s,
        )
        return self._candidate(
            option,
            cost,
            reason,
            eviction_cost_s=cost.eviction_cost_s,
            local_prompt_tokens=uncached_tokens,
            prefilled_by=cost,
        )

    def decode_on_prefill(
        self, prefillers: Sequence[ReplicaCost], *, streams_fraction: float
    ) -> list[PlacementOption]:
        """Replicas of the prefill pool that decode what they have prefilled, as far as they may.

        Streams may take `streams_fraction` of a replica's places in the batch. They get a token
        with each step, and most steps there compute prompts, so they are slow where those are many.
        """
        candidates = []
        for cost in prefillers:
            if cost.running_streams < streams_fraction * cost.view.facts.max_running_requests:
                cost.own_decode_s = (
                    cost.output_tokens * cost.step_s / (1.0 - cost.prefill_time_fraction)
                )
                candidates.append(self.local(cost, RouteReason.DECODE_ON_PREFILL))
        return candidates

    def disaggregated(
        self, prefillers: Sequence[ReplicaCost], decoders: Sequence[ReplicaCost]
    ) -> list[PlacementOption]:
        """One replica prefills, another pulls the blocks and decodes."""
        sources = sorted(prefillers, key=_prefill_done_key)
        targets = sorted(decoders, key=_decode_ready_key)
        shortlisted = sources[:_MAX_PAIRED_REPLICAS]
        if len(sources) > _MAX_PAIRED_REPLICAS and self._query.hits is not NO_HITS:
            # It may be worth its while to let the idlest one compute what others hold.
            idlest = min(sources, key=_queue_key)
            shortlisted += [idlest] if idlest not in shortlisted else []
        candidates = self._disaggregated_pairs(shortlisted, targets[:_MAX_PAIRED_REPLICAS])
        # All of the best may be quarantined with each other; the rest is then looked at too.
        return candidates or self._disaggregated_pairs(sources, targets)

    def prefix_fetches(
        self,
        decoders: Sequence[ReplicaCost],
        known_costs: Mapping[str, ReplicaCost],
        *,
        best_hit_tokens: int,
    ) -> list[PlacementOption]:
        """A replica that holds more of the prompt gives its blocks to another, which does the rest.

        None when the best other way makes use of as many cached tokens, `best_hit_tokens`, already.
        """
        candidates: list[PlacementOption] = []
        holders = self._query.hits.holders(_MAX_PAIRED_REPLICAS)
        targets = sorted(decoders, key=_decode_ready_key)[:_MAX_PAIRED_REPLICAS] if holders else []
        for holder_id in holders:
            view = self._context.fleet.replicas.get(holder_id)
            if view is None or not view.is_eligible or holder_id in self._query.avoid:
                continue
            if not view.facts.supports_prefix_fetch:
                continue
            holder = known_costs.get(holder_id) or self.costs([holder_id])[0]
            if holder.hit_tokens <= best_hit_tokens:
                break
            for target in targets:
                if target.hit_tokens < holder.hit_tokens and target.view is not view:
                    candidate = self._prefix_fetch(holder, target)
                    candidates += [candidate] if candidate is not None else []
        return candidates

    def choose_replication(
        self, ranked: Sequence[PlacementOption]
    ) -> tuple[PlacementOption | None, ReplicationCredit | None]:
        """The way that earlier losses have paid for, or None; records the losses otherwise.

        A replica that computes blocks of another holds them from then on, for requests that begin
        alike. Had it held them already, its way would have cost less than the best: that difference
        is the loss if the best is taken (`replication`). One copy would have spared it, so it
        counts for one replica: the nearest to its copy.
        """
        depths = self._query.hits.depths()[:_MAX_DEPTHS]
        best, nearest, nearest_s = ranked[0], None, 0.0
        for candidate in ranked[1:] if depths else ():
            prefiller = candidate.prefilled_by
            if (
                prefiller is None
                or candidate.late_s > best.late_s
                or candidate.expected_misses > best.expected_misses
            ):
                continue
            credit = self._replication_credit(candidate, prefiller, best, depths)
            if credit is None:
                continue
            extra_cost_s = candidate.cost_s - best.cost_s
            earlier_credit_s = self._query.replication_credits.of(credit.replica_id, credit.blocks)
            evicts = prefiller.eviction_cost_s > prefiller.extra_adapter_loads_s
            if earlier_credit_s >= (COPY_PRICE_MULTIPLE if evicts else 1.0) * extra_cost_s:
                return candidate, evolve(credit, seconds=-extra_cost_s)
            if earlier_credit_s + credit.seconds > nearest_s:
                nearest, nearest_s = credit, earlier_credit_s + credit.seconds
        return None, nearest

    def _replication_credit(
        self,
        candidate: PlacementOption,
        prefiller: ReplicaCost,
        best: PlacementOption,
        depths: Sequence[int],
    ) -> ReplicationCredit | None:
        """The loss because the replica of this way does not hold the blocks of another."""
        credit, max_total_s, replica_id = None, 0.0, prefiller.view.replica_id
        for blocks in depths:
            if blocks <= prefiller.hit.blocks:
                break
            duplicated_tokens = (
                blocks * prefiller.view.facts.block_size_tokens - prefiller.hit_tokens
            )
            saved_s = (
                prefiller.eviction_cost_s
                - prefiller.extra_adapter_loads_s
                + added_prefill_s(prefiller.timing, duplicated_tokens)
                * (1 + prefiller.running_streams)
            )
            seconds = best.cost_s - (candidate.cost_s - saved_s)
            # Prompts part ways at some block of their own: the common part counts.
            total_s = seconds + self._query.replication_credits.of(replica_id, blocks)
            if seconds > 0 and total_s > max_total_s:
                credit, max_total_s = ReplicationCredit(replica_id, blocks, seconds), total_s
        return credit

    def handoff_cost_s(self, source: ReplicaView, target: ReplicaCost) -> float | None:
        """The remaining cost, for all, when `target` decodes a prompt that `source` has prefilled.

        None when it cannot.
        """
        transfer_s = self._transfer_s(source, target)
        if transfer_s is None or target.view.replica_id == source.replica_id:
            return None
        interference_s = (
            self._interference_weight(target)
            * target.running_streams
            * (target.stream_slowdown_s + target.adapter_load_s)
        )
        cost_s = (
            transfer_s
            + _first_decode_s(target)
            + target.own_decode_s
            + interference_s
            + target.extra_adapter_loads_s
        )
        if self._slo_impact is not None:
            cost_s += self._slo_impact.miss_penalty_s(target) * self._slo_impact.expected_misses(
                target
            )
        return cost_s

    # -------------------------------------------------------------- pairs

    def _disaggregated_pairs(
        self, prefillers: Sequence[ReplicaCost], decoders: Sequence[ReplicaCost]
    ) -> list[PlacementOption]:
        candidates = []
        for source in prefillers:
            for target in decoders:
                transfer_s = self._transfer_s(source.view, target)
                if transfer_s is not None and source.view is not target.view:
                    candidates.append(self._disaggregated_pair(source, target, transfer_s))
        return candidates

    def _disaggregated_pair(
        self, source: ReplicaCost, target: ReplicaCost, transfer_s: float
    ) -> PlacementOption:
        interference_s = target.running_streams * (target.stream_slowdown_s + target.adapter_load_s)
        if source.running_streams:
            uncached_tokens = self._query.prompt_tokens - source.hit_tokens
            interference_s += source.running_streams * (
                source.adapter_load_s + self._decode_delay_s(source.timing, uncached_tokens)
            )
        hit, decode_s = source.hit, _first_decode_s(target)
        token_timing = self._first_token_plan(source, target, handoff_s=transfer_s + decode_s)
        option = RouteOption(
            HandoffMode.PULL,
            source.view.facts.replica_id,
            target.view.facts.replica_id,
            source.hit_tokens,
            hit.source,
            hit.age_s,
            source.queue_s,
            source.prefill_s,
            transfer_s,
            decode_s,
            interference_s,
            adapter_load_s=source.adapter_load_s,
            is_early_token=token_timing.is_early,
        )
        candidate = self._candidate(
            option,
            target,
            RouteReason.DISAGGREGATED,
            eviction_cost_s=source.eviction_cost_s + target.extra_adapter_loads_s,
            prefilled_by=source,
        )
        if self._slo_impact is None:
            return candidate
        streams_broken = float(token_timing.breaks_slo)
        if source.running_streams:
            # It decodes, too: as a mixed replica, or in its role before a flip.
            uncached_tokens = self._query.prompt_tokens - source.hit_tokens
            streams_broken += self._slo_impact.streams_broken(source, uncached_tokens)
        penalty_s = streams_broken * self._slo_impact.miss_penalty_s(target)
        return evolve(
            candidate,
            cost_s=candidate.cost_s + penalty_s,
            expected_misses=candidate.expected_misses + streams_broken,
        )

    def _first_token_plan(
        self, source: ReplicaCost, decoder: ReplicaCost, *, handoff_s: float
    ) -> FirstTokenPlan:
        if not (self._query.allow_early_token and decoder.view.facts.supports_takeover):
            return _NO_EARLY_TOKEN
        return plan_first_token(
            self._slo,
            waited_s=self._query.waited_s,
            prefill_done_s=source.prefill_done_s,
            handoff_s=handoff_s,
            tpot_s=decoder.step_s / (1.0 - decoder.prefill_time_fraction),
            output_tokens=decoder.output_tokens,
        )

    def _prefix_fetch(self, holder: ReplicaCost, target: ReplicaCost) -> PlacementOption | None:
        tokens = holder.hit_tokens
        transfer_s = self._transfer_s(holder.view, target, tokens=tokens)
        if transfer_s is None:
            return None
        # The holder computes one token, so that its engine hands the blocks out.
        blocks_ready_s = holder.queue_s + holder.timing.prefill_s(1, running=holder.running_streams)
        remaining_queue_s = target.queue_s - blocks_ready_s - holder.adapter_load_s - transfer_s
        uncached_tokens = self._query.prompt_tokens - tokens
        option = RouteOption(
            HandoffMode.PULL,
            holder.view.replica_id,
            target.view.replica_id,
            tokens,
            holder.hit.source,
            holder.hit.age_s,
            blocks_ready_s,
            target.timing.prefill_s(uncached_tokens, running=target.running_streams),
            transfer_s,
            max(0.0, remaining_queue_s) + target.adapter_load_s,  # it has waited meanwhile
            self._interference_s(target, uncached_tokens),
            adapter_load_s=holder.adapter_load_s,
        )
        reason = RouteReason.PREFIX_FETCH
        candidate = self._candidate(
            option,
            target,
            reason,
            eviction_cost_s=target.eviction_cost_s,
            local_prompt_tokens=uncached_tokens,
        )
        return evolve(candidate, prefill_tokens=tokens + 1)

    def _transfer_s(
        self, source: ReplicaView, target: ReplicaCost, *, tokens: int | None = None
    ) -> float | None:
        """To move the blocks that the target does not hold itself; None when it cannot be done."""
        facts = target.view.facts
        if source.facts.layout != facts.layout:
            return None
        tokens = self._query.prompt_tokens if tokens is None else tokens
        blocks = max(0, -(-(tokens - target.hit_tokens) // facts.block_size_tokens))
        moved_bytes = blocks * facts.kv_block_bytes
        source_id = source.facts.replica_id
        return self._context.links.transfer_s(source_id, facts.replica_id, moved_bytes)

    # -------------------------------------------------------------- what they are compared by

    def _candidate(
        self,
        option: RouteOption,
        decoder: ReplicaCost,
        reason: RouteReason,
        *,
        eviction_cost_s: float,
        local_prompt_tokens: int = 0,
        prefilled_by: ReplicaCost | None = None,
    ) -> PlacementOption:
        """`local_prompt_tokens` of the prompt are computed where it is decoded."""
        late_s, slo_impact = 0.0, self._slo_impact
        if (ttft_slo_s := self._slo.ttft_s) is not None:
            late_s = max(0.0, self._query.waited_s + option.ttft_s - ttft_slo_s)
        interference_s = (
            option.interference_s
            if slo_impact is None
            else self._interference_weight(decoder) * option.interference_s
        )
        cost_s = (
            option.first_decode_token_s + decoder.own_decode_s + (interference_s + eviction_cost_s)
        )
        if option.mode is not HandoffMode.LOCAL:
            cost_s *= 1 + _MIN_HANDOFF_SAVING_FRACTION
        if slo_impact is None:
            return PlacementOption(late_s, cost_s, option, reason, prefilled_by=prefilled_by)
        expected_misses = slo_impact.expected_misses(decoder, local_prompt_tokens) + (late_s > 0)
        cost_s += expected_misses * slo_impact.miss_penalty_s(decoder)
        return PlacementOption(
            0.0,
            cost_s,
            option,
            reason,
            expected_misses=expected_misses,
            prefilled_by=prefilled_by,
        )

    def _interference_s(self, cost: ReplicaCost, prompt_tokens: int) -> float:
        """Delay of the streams on a replica by this request, which computes these tokens there."""
        if not cost.running_streams:
            return 0.0
        return cost.running_streams * (
            cost.stream_slowdown_s
            + cost.adapter_load_s
            + self._decode_delay_s(cost.timing, prompt_tokens)
        )

    def _decode_delay_s(self, timing: EngineTiming, tokens: int) -> float:
        """`decode_delay_s`, which is the same for all replicas of a pool that hold as much."""
        for known_timing, known_tokens, delay_s in self._decode_delays:
            if known_timing is timing and known_tokens == tokens:
                return delay_s
        delay_s = decode_delay_s(timing, tokens)
        self._decode_delays.append((timing, tokens, delay_s))
        return delay_s

    def _interference_weight(self, cost: ReplicaCost) -> float:
        """The weight of a second lost by a running stream: less, far from its TPOT objective."""
        slo_impact = self._slo_impact
        return 1.0 if slo_impact is None else min(1.0, cost.step_s / slo_impact.stream_tpot_slo_s)


def _first_decode_s(target: ReplicaCost) -> float:
    """From the blocks' arrival to the first token: the step under way, a wait for room, a step.

    Prompts that queue there are not ahead of it: one token fits into the next step.
    """
    current_step_s = target.step_s / 2 if target.running_streams else 0.0
    return current_step_s + target.capacity_wait_s + target.adapter_load_s + target.step_s


def _prefill_done_key(cost: ReplicaCost) -> tuple[float, str]:
    """Sort key: end of the prefill, soonest first."""
    return cost.prefill_done_s, cost.view.facts.replica_id


def _queue_key(cost: ReplicaCost) -> tuple[float, str]:
    """Sort key: start of the prefill, soonest first."""
    return cost.queue_s, cost.view.facts.replica_id


def _decode_ready_key(cost: ReplicaCost) -> tuple[float, int, str]:
    """Sort key: readiness to take the prompt's blocks, then the fewest streams."""
    return (
        cost.capacity_wait_s + cost.adapter_load_s,
        cost.running_streams,
        cost.view.facts.replica_id,
    )


def plan_first_token(
    slo: Slo,
    *,
    waited_s: float,
    prefill_done_s: float,
    handoff_s: float,
    tpot_s: float,
    output_tokens: float,
) -> FirstTokenPlan:
    """Whether a client gets the first token at once.

    Theory of operation. The prefill replica has a first token before the blocks are moved. Given
    at once, it saves the handoff, which becomes a gap after it. In a stream of n tokens the gap
    adds handoff / (n - 1) to the TPOT, and it counts against the ITL objective. Held back, it adds
    to the TTFT. So it is held back where it would break TPOT or ITL, unless TTFT would then be
    missed: one objective is missed anyway, and a client prefers an early token.

    Args:
        slo: Objectives of the request.
        waited_s: Since it arrived.
        prefill_done_s: From now until the prefill ends, by prediction.
        handoff_s: From then until the decode replica's first token.
        tpot_s: Between two tokens after that.
        output_tokens: How many it is expected to get.
    """
    later_tokens = output_tokens - 1.0
    if later_tokens < 1.0:
        return FirstTokenPlan(is_early=True)  # mostly nothing comes after it
    effective_tpot_s = (handoff_s + (later_tokens - 1.0) * tpot_s) / later_tokens
    breaks_tpot = slo.tpot_s is not None and effective_tpot_s > slo.tpot_s
    is_violation_allowed = MAX_ITL_VIOLATION_FRACTION * later_tokens >= 1.0
    breaks_itl = (
        slo.itl_p99_s is not None and handoff_s > slo.itl_p99_s and not is_violation_allowed
    )
    if not (breaks_tpot or breaks_itl):
        return FirstTokenPlan(is_early=True)
    is_ttft_missed = slo.ttft_s is not None and waited_s + prefill_done_s + handoff_s > slo.ttft_s
    return FirstTokenPlan(is_early=True, breaks_slo=True) if is_ttft_missed else _NO_EARLY_TOKEN
