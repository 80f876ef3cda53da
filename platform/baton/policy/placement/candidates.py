"""The ways to run a request on given replicas, each with what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from baton.domain.fleet import ReplicaView
from baton.domain.handoff import Forgone, HandoffMode, Option, RouteReason
from baton.domain.slo import Slo
from baton.domain.value import Value, evolve
from baton.perf.timing import added_s, delay_s
from baton.policy.placement.first_tokens import LATE, FirstToken, first_token
from baton.policy.placement.port import PlacementQuery, Surroundings
from baton.policy.placement.replica_cost import ReplicaCost, compare, replica_cost
from baton.policy.placement.slo_impact import Promises
from baton.policy.prefix_cache.hits import NO_HITS
from baton.policy.prefix_cache.replication import PRICE

_PAIRS = 2
"""Best prefill and best decode replicas that are paired with each other, and holders that a prefix
is fetched from."""
_DEPTHS = 4
"""At which replicas' caches part ways from a prompt that are looked at: the deepest ones."""
_WORTH = 0.05
"""A handoff must be predicted to save this fraction: it takes two legs, a lease and a transfer, and
the model errs by as much."""


class Way(Value, kw_only=False):
    """An option, what it is compared by, and the route it stands for."""

    late_s: float
    cost_s: float
    option: Option
    reason: RouteReason
    prefill_tokens: int | None = None
    missed: float = 0.0
    computed_by: ReplicaCost | None = None
    """Who computes the prompt, and so stores it; None where that is fetched."""


class Ways:
    """One request's ways, in the surroundings of one moment."""

    def __init__(
        self,
        query: PlacementQuery,
        around: Surroundings,
        *,
        slo: Slo,
        promises: Promises | None,
    ) -> None:
        self._query = query
        self._around = around
        self._slo = slo
        self._promises = promises

    def costs(self, replica_ids: Iterable[str]) -> list[ReplicaCost]:
        """What each of some replicas, among which one is chosen, would take for its part."""
        query, fleet, timings = self._query, self._around.fleet, self._around.timings
        output_tokens = timings.expected_output_tokens(query.max_tokens)
        replicas, at_s, crowd = fleet.replicas, fleet.at_s, fleet.crowd
        views = [replicas[replica_id] for replica_id in replica_ids]
        due_at_s = None if query.slo is None else self._around.due_at_s
        costs = [
            replica_cost(
                query,
                view,
                timings.of(view),
                output_tokens=output_tokens,
                at_s=at_s,
                crowd=crowd,
                due_s=None if due_at_s is None else due_at_s.get(view.replica_id, 0.0) - at_s,
                stream_context=timings.stream_context(view),
            )
            for view in views
        ]
        if self._promises is not None:
            for cost in costs:
                cost.prompt_share = timings.prompt_share(cost.view, at_s)
        compare(costs, reuses=query.reuses, room=self._around.room)
        return costs

    def local(self, cost: ReplicaCost, reason: RouteReason) -> Way:
        """One replica runs both phases."""
        here, hit = self._query.prompt_tokens - cost.hit_tokens, cost.hit
        option = Option(
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
            _harm_s(cost, here),
            load_s=cost.adapter_s,
        )
        way = self._way(option, cost, reason, displaced_s=cost.displaced_s, here_tokens=here)
        return evolve(way, computed_by=cost)

    def deflected(self, prefillers: Sequence[ReplicaCost], *, streams_fraction: float) -> list[Way]:
        """Replicas of the prefill pool that decode what they have prefilled, as far as they may.

        Streams may take `streams_fraction` of a replica's places in the batch. They get a token
        with each step, and most steps there compute prompts, so they are slow where those are many.
        """
        ways = []
        for cost in prefillers:
            if cost.running < streams_fraction * cost.view.facts.max_running_requests:
                cost.own_s = cost.output_tokens * cost.step_s / (1.0 - cost.prompt_share)
                ways.append(self.local(cost, RouteReason.DEFLECTED))
        return ways

    def remotes(
        self, prefillers: Sequence[ReplicaCost], decoders: Sequence[ReplicaCost]
    ) -> list[Way]:
        """One replica prefills, another pulls the blocks and decodes."""
        sources = sorted(prefillers, key=_quickness)
        targets = sorted(decoders, key=_readiness)
        looked_at = sources[:_PAIRS]
        if len(sources) > _PAIRS and self._query.hits is not NO_HITS:
            # It may be worth its while to let the idlest one compute what others hold.
            idlest = min(sources, key=_idleness)
            looked_at += [idlest] if idlest not in looked_at else []
        near = self._pairs(looked_at, targets[:_PAIRS])
        # All of the best may be quarantined with each other; the rest is then looked at too.
        return near or self._pairs(sources, targets)

    def fetches(
        self,
        decoders: Sequence[ReplicaCost],
        known: Mapping[str, ReplicaCost],
        *,
        used_tokens: int,
    ) -> list[Way]:
        """A replica that holds more of the prompt gives its blocks to another, which does the rest.

        None when the best other way makes use of as many cached tokens, `used_tokens`, already.
        """
        ways: list[Way] = []
        holders = self._query.hits.holders(_PAIRS)
        targets = sorted(decoders, key=_readiness)[:_PAIRS] if holders else []
        for holder_id in holders:
            view = self._around.fleet.replicas.get(holder_id)
            if view is None or not view.is_counted_on or holder_id in self._query.avoid:
                continue
            if not view.facts.prefix_fetch:
                continue
            holder = known.get(holder_id) or self.costs([holder_id])[0]
            if holder.hit_tokens <= used_tokens:
                break
            for target in targets:
                if target.hit_tokens < holder.hit_tokens and target.view is not view:
                    way = self._fetch(holder, target)
                    ways += [way] if way is not None else []
        return ways

    def spread(self, ranked: Sequence[Way]) -> tuple[Way | None, Forgone | None]:
        """The way that others have paid for though it costs more than the best; what is forgone.

        Who computes what another replica holds has it from then on, for requests that begin alike.
        Had it been there already, its way would have been better than the best by what is forgone
        if the best is taken. See `prefix_regrets` for when it is not. One copy would have spared
        it, so it counts for one replica: the one that is nearest to its copy.
        """
        depths = self._query.hits.depths()[:_DEPTHS]
        best, nearest, nearest_s = ranked[0], None, 0.0
        for way in ranked[1:] if depths else ():
            by = way.computed_by
            if by is None or way.late_s > best.late_s or way.missed > best.missed:
                continue
            forgone = self._forgone(way, by, best, depths)
            if forgone is None:
                continue
            dearer_s = way.cost_s - best.cost_s
            before_s = self._query.regrets.of(forgone.replica_id, forgone.blocks)
            if before_s >= PRICE * dearer_s:
                return way, evolve(forgone, seconds=-dearer_s)
            if before_s + forgone.seconds > nearest_s:
                nearest, nearest_s = forgone, before_s + forgone.seconds
        return None, nearest

    def _forgone(
        self, way: Way, by: ReplicaCost, best: Way, depths: Sequence[int]
    ) -> Forgone | None:
        """What is forgone because the replica of this way does not hold what another does."""
        found, most_s, replica_id = None, 0.0, by.view.replica_id
        for blocks in depths:
            if blocks <= by.hit.blocks:
                break
            twice = blocks * by.view.facts.block_size_tokens - by.hit_tokens
            spared_s = (
                by.displaced_s - by.extra_loads_s + added_s(by.timing, twice) * (1 + by.running)
            )
            seconds = best.cost_s - (way.cost_s - spared_s)
            # Prompts part ways where some block is their own: what others had in common counts.
            counts_s = seconds + self._query.regrets.of(replica_id, blocks)
            if seconds > 0 and counts_s > most_s:
                found, most_s = Forgone(replica_id, blocks, seconds), counts_s
        return found

    def handoff_s(self, source: ReplicaView, target: ReplicaCost) -> float | None:
        """What is left to pay, by all, when `target` decodes a prompt that `source` has prefilled.

        None when it cannot.
        """
        transfer_s = self._transfer_s(source, target)
        if transfer_s is None or target.view.replica_id == source.replica_id:
            return None
        harm_s = self._weight(target) * target.running * (target.join_s + target.adapter_s)
        left_s = transfer_s + _decode_s(target) + target.own_s + harm_s + target.extra_loads_s
        if self._promises is not None:
            left_s += self._promises.worth_s(target) * self._promises.missed(target)
        return left_s

    # -------------------------------------------------------------- pairs

    def _pairs(
        self, prefillers: Sequence[ReplicaCost], decoders: Sequence[ReplicaCost]
    ) -> list[Way]:
        ways = []
        for source in prefillers:
            for target in decoders:
                transfer_s = self._transfer_s(source.view, target)
                if transfer_s is not None and source.view is not target.view:
                    ways.append(self._remote(source, target, transfer_s))
        return ways

    def _remote(self, source: ReplicaCost, target: ReplicaCost, transfer_s: float) -> Way:
        harm_s = target.running * (target.join_s + target.adapter_s)
        if source.running:
            uncached = self._query.prompt_tokens - source.hit_tokens
            harm_s += source.running * (source.adapter_s + delay_s(source.timing, uncached))
        hit = source.hit
        option = Option(
            HandoffMode.PULL,
            source.view.facts.replica_id,
            target.view.facts.replica_id,
            source.hit_tokens,
            hit.source,
            hit.age_s,
            source.queue_s,
            source.prefill_s,
            transfer_s,
            _decode_s(target),
            harm_s,
            load_s=source.adapter_s,
        )
        first = self._first_token(option, target)
        option = evolve(option, early=first.early)
        reason = RouteReason.DISAGGREGATED
        displaced_s = source.displaced_s + target.extra_loads_s
        way = self._way(option, target, reason, displaced_s=displaced_s)
        way = evolve(way, computed_by=source)
        if self._promises is None:
            return way
        broken = float(first.breaks)
        if source.running:
            # It decodes, too: as a mixed replica, or for what it was meant before it was flipped.
            uncached = self._query.prompt_tokens - source.hit_tokens
            broken += self._promises.broken(source, uncached)
        worth_s = broken * self._promises.worth_s(target)
        return evolve(way, cost_s=way.cost_s + worth_s, missed=way.missed + broken)

    def _first_token(self, option: Option, decoder: ReplicaCost) -> FirstToken:
        if not (self._query.early and decoder.view.facts.goes_on):
            return LATE
        return first_token(
            self._slo,
            waited_s=self._query.waited_s,
            prefilled_s=option.queue_s + option.load_s + option.prefill_s,
            handoff_s=option.transfer_s + option.decode_s,
            pace_s=decoder.step_s / (1.0 - decoder.prompt_share),
            output_tokens=decoder.output_tokens,
        )

    def _fetch(self, holder: ReplicaCost, target: ReplicaCost) -> Way | None:
        tokens = holder.hit_tokens
        transfer_s = self._transfer_s(holder.view, target, tokens=tokens)
        if transfer_s is None:
            return None
        # The holder computes one token, so that its engine hands the blocks out.
        handed_out_s = holder.queue_s + holder.timing.prefill_s(1, running=holder.running)
        waits_s = target.queue_s - handed_out_s - holder.adapter_s - transfer_s
        rest = self._query.prompt_tokens - tokens
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
            max(0.0, waits_s) + target.adapter_s,  # it has waited meanwhile
            _harm_s(target, rest),
            load_s=holder.adapter_s,
        )
        reason = RouteReason.PREFIX_FETCH
        way = self._way(option, target, reason, displaced_s=target.displaced_s, here_tokens=rest)
        return evolve(way, prefill_tokens=tokens + 1)

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
        return self._around.links.transfer_s(source_id, facts.replica_id, moved_bytes)

    # -------------------------------------------------------------- what they are compared by

    def _way(
        self,
        option: Option,
        decoder: ReplicaCost,
        reason: RouteReason,
        *,
        displaced_s: float,
        here_tokens: int = 0,
    ) -> Way:
        """`here_tokens` of the prompt are computed where it is decoded."""
        late_s, promises = 0.0, self._promises
        if (latest_s := self._slo.ttft_s) is not None:
            late_s = max(0.0, self._query.waited_s + option.ttft_s - latest_s)
        harm_s = option.harm_s if promises is None else self._weight(decoder) * option.harm_s
        cost_s = option.streams_after_s + decoder.own_s + (harm_s + displaced_s)
        if option.mode is not HandoffMode.LOCAL:
            cost_s *= 1 + _WORTH
        if promises is None:
            return Way(late_s, cost_s, option, reason)
        missed = promises.missed(decoder, here_tokens) + (late_s > 0)
        cost_s += missed * promises.worth_s(decoder)
        return Way(0.0, cost_s, option, reason, missed=missed)

    def _weight(self, cost: ReplicaCost) -> float:
        """What a second lost by a running stream counts: less, far from its TPOT objective."""
        promises = self._promises
        return 1.0 if promises is None else min(1.0, cost.step_s / promises.pace_s)


def _decode_s(target: ReplicaCost) -> float:
    """From the blocks' arrival to the first token: the step under way, a wait for room, a step.

    Prompts that queue there are not ahead of it: one token fits into the next step.
    """
    under_way_s = target.step_s / 2 if target.running else 0.0
    return under_way_s + target.room_wait_s + target.adapter_s + target.step_s


def _harm_s(cost: ReplicaCost, prompt_tokens: int) -> float:
    """What the streams on a replica lose by one that computes so much of its prompt there."""
    if not cost.running:
        return 0.0
    return cost.running * (cost.join_s + cost.adapter_s + delay_s(cost.timing, prompt_tokens))


def _quickness(cost: ReplicaCost) -> tuple[float, str]:
    """Who would be done with the prompt soonest."""
    return cost.prefilled_s, cost.view.facts.replica_id


def _idleness(cost: ReplicaCost) -> tuple[float, str]:
    """Who could begin with the prompt soonest."""
    return cost.queue_s, cost.view.facts.replica_id


def _readiness(cost: ReplicaCost) -> tuple[float, int, str]:
    """Who can take a prompt's blocks soonest, beside the fewest streams."""
    return cost.room_wait_s + cost.adapter_s, cost.running, cost.view.facts.replica_id
