"""A coordinator's knowledge of its fleet beyond the loads: caches, timings, links, sessions.

It gets facts, and answers the questions of placement. Everything in it is an estimate or a hint:
when events are late, lost or off, answers get worse and nothing breaks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.request_state import BlockFamily, RequestState
from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts
from baton.domain.handoff import HitSource, Leg, PlacementDecision
from baton.domain.slo import NO_SLO
from baton.perf.fitting.engine_timings import EngineTimings
from baton.perf.fitting.lateness import LatenessHistogram
from baton.perf.timing import EngineTiming, added_prefill_s
from baton.policy.links.estimates import LinkTable
from baton.policy.placement.port import PlacementContext, PlacementQuery
from baton.policy.placement.replica_cost import adapter_load_s
from baton.policy.prefix_cache.hits import NO_HIT, NO_HITS, Hit, Hits
from baton.policy.prefix_cache.index import IndexMode, PrefixIndex
from baton.policy.prefix_cache.replication import (
    NO_CREDITS,
    PrefixCredits,
    PromptCredits,
    ReplicationCredits,
)

MAX_SESSIONS = 65_536
"""Of all tenants together."""
_MEMORY_TOKENS = 1_000_000.0
"""Prompts this many tokens ago weigh a third of the newest."""
_MAX_REUSES_PER_TOKEN = 4.0
"""Reached at h = 0.8. Beyond it the estimate says more of its own noise than of the caches; and
evicted blocks are the least recently used, worth less than the average."""


class PendingPrefills:
    """Prompts that were sent, and when each replica will have computed its prompts.

    A replica's report of its queue is old when it arrives, and may leave out the step under way.
    This table knows the prompts of this coordinator that have not come back; placement uses the
    later of the two times. Prompts count as computed one after the other. When one is done, the
    others take no longer than the sum of their times.
    """

    def __init__(self) -> None:
        self._pending: dict[str, tuple[str, float]] = {}
        """By leg: its replica, and how long it keeps others there waiting."""
        self._by_replica: dict[str, dict[str, float]] = {}
        self._due_at_s: dict[str, float] = {}
        self.due_at_s: Mapping[str, float] = MappingProxyType(self._due_at_s)
        """By replica; those that have none are not there."""

    def add(
        self,
        leg_id: str,
        replica_id: str,
        *,
        tokens: int,
        timing: EngineTiming,
        now_s: float,
        load_s: float = 0.0,
    ) -> None:
        """A prompt with these tokens to compute went to a replica.

        Its adapter is loaded before that, for `load_s`, in which nothing else is computed there.
        """
        if tokens <= 1 and not load_s:
            return
        durations_s = self._by_replica.setdefault(replica_id, {})
        duration_s = load_s
        if tokens > 1:
            duration_s += (
                added_prefill_s(timing, tokens) if durations_s else timing.prefill_s(tokens)
            )
        durations_s[leg_id] = duration_s
        self._pending[leg_id] = (replica_id, duration_s)
        self._due_at_s[replica_id] = max(now_s, self._due_at_s.get(replica_id, 0.0)) + duration_s

    def remove(self, leg_id: str, now_s: float) -> None:
        """A prompt is computed, or will not be; prompts that are not out are ignored."""
        pending = self._pending.pop(leg_id, None)
        if pending is None:
            return
        replica_id = pending[0]
        durations_s = self._by_replica[replica_id]
        del durations_s[leg_id]
        if durations_s:
            latest_at_s = now_s + sum(durations_s.values())
            self._due_at_s[replica_id] = min(self._due_at_s[replica_id], latest_at_s)
        else:
            del self._by_replica[replica_id], self._due_at_s[replica_id]

    def check_integrity(self, running: frozenset[str]) -> None:
        """Raise AssertionError when a prompt is out whose leg does not run."""
        assert self._pending.keys() <= running, (
            f"prompts out: {sorted(self._pending.keys() - running)}"
        )
        assert self._by_replica.keys() == self._due_at_s.keys(), "replicas with none, or no time"


class Sessions:
    """The replica on which the last request of each session was decoded.

    Each tenant has its own table, the longest idle session first. When all tables together are
    full, the largest of them loses its longest idle session. So a tenant that sends a new session
    with every request forgets its own, and steers no request of another tenant.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._by_tenant: dict[str, OrderedDict[str, str]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def last_replica(self, tenant: str, session_id: str | None) -> str | None:
        """The replica of a session's last request; None: the session is not known."""
        if session_id is None:
            return None
        sessions = self._by_tenant.get(tenant)
        return None if sessions is None else sessions.get(session_id)

    def record(self, tenant: str, session_id: str, replica_id: str) -> None:
        """A request of a session was decoded on a replica."""
        sessions = self._by_tenant.setdefault(tenant, OrderedDict())
        self._count += session_id not in sessions
        sessions[session_id] = replica_id
        sessions.move_to_end(session_id)
        if self._count > self._max_sessions:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        tenant, largest = max(self._by_tenant.items(), key=lambda item: len(item[1]))
        largest.popitem(last=False)
        self._count -= 1
        if not largest:
            del self._by_tenant[tenant]

    def check_integrity(self) -> None:
        """Raise AssertionError when the count is wrong, or there are too many."""
        assert self._count <= self._max_sessions, (
            f"{self._count} sessions, at most {self._max_sessions} are kept"
        )
        assert all(self._by_tenant.values()), "a tenant without a session has a table"
        counted = sum(map(len, self._by_tenant.values()))
        assert self._count == counted, f"{counted} sessions, counted as {self._count}"


class FleetModel:
    """One coordinator's picture of the fleet."""

    def __init__(
        self, fleet: FleetTable, index: PrefixIndex, timings: EngineTimings | None = None
    ) -> None:
        self.index = index
        self.timings = timings or EngineTimings()
        self.links = LinkTable()
        self.reuse = PrefixReuse()
        self.prefix_credits = PrefixCredits()
        self.pending_prefills = PendingPrefills()
        self.ttft_overruns = LatenessHistogram()
        """How much later than predicted first tokens come."""
        self._fleet = fleet
        self._families: dict[str, BlockFamily] = {}
        self._family_sizes: Counter[BlockFamily] = Counter()
        """How many replicas each family has."""
        self._sessions = Sessions()

    # -------------------------------------------------------------- facts

    def on_replica_joined(self, facts: ReplicaFacts) -> None:
        """A replica is new, or new again: the record of its cache is not true any more."""
        self.index.add_replica(
            facts.replica_id, capacity_blocks=facts.kv_blocks, lookahead_blocks=_peek_blocks(facts)
        )
        self.links.remove_replica(facts.replica_id)
        self.links.add_replica(facts.replica_id)
        self._forget_family(facts.replica_id)
        family = (facts.model, facts.block_size_tokens)
        self._families[facts.replica_id] = family
        self._family_sizes[family] += 1

    def on_replica_lost(self, replica_id: str) -> None:
        """A replica is gone."""
        self.index.remove_replica(replica_id)
        self.links.remove_replica(replica_id)
        self.timings.remove_replica(replica_id)
        self._forget_family(replica_id)

    def on_load_report(self, replica_id: str, load: Load, now_s: float) -> bool:
        """Take in a load report; True when it shows that cache updates are missing."""
        view = self._fleet.get(replica_id)
        if view is None:
            return False
        self.timings.observe(view.facts, load, now_s)
        return view.facts.cache_events and self.index.on_heartbeat(
            replica_id, load.cache_sequence, now_s
        )

    def on_cache_update(self, replica_id: str, update: CacheUpdate, now_s: float) -> bool:
        """Take in a replica's cache update; True when updates are missing before it."""
        return self.index.apply_update(replica_id, update, now_s)

    def on_link_report(self, replica_id: str, links: Sequence[LinkTotals], now_s: float) -> None:
        """Take in a replica's pulls from others."""
        for link in links:
            self.links.observe(replica_id, link, now_s)

    # -------------------------------------------------------------- answers

    def placement_context(self, now_s: float) -> PlacementContext:
        """The inputs of placement."""
        return PlacementContext(
            fleet=self._fleet.view(now_s),
            timings=self.timings,
            links=self.links,
            cache_capacity=self.index,
            prefills_done_at_s=self.pending_prefills.due_at_s,
        )

    def placement_query(self, state: RequestState, now_s: float) -> PlacementQuery:
        """The inputs for placing (or placing again) this request."""
        request = state.request
        session_replica_id = self._sessions.last_replica(request.tenant, request.session_id)
        return PlacementQuery(
            prompt_tokens=state.token_count,
            max_tokens=max(1, request.max_tokens - len(state.generated)),
            local_only=state.local_only,
            avoid=state.avoid,
            adapter=request.adapter,
            hits=self._hits(state, now_s),
            session_replica_id=session_replica_id
            if session_replica_id and session_replica_id in self._fleet
            else None,
            reuses_per_token=self.reuse.reuses_per_token,
            replication_credits=self._prompt_credits(state, now_s),
            allow_early_token=state.allow_early_token,
            waited_s=max(0.0, now_s - request.arrived_at_s - state.total_replica_wait_s(now_s)),
            slo=None if state.slo is NO_SLO else state.slo,
        )

    def _hits(self, state: RequestState, now_s: float) -> Hits:
        if self.index.is_empty or not self._family_sizes or not state.prompt_tokens:
            return NO_HITS
        hits_by_family = {
            family_size: self.index.look_up(
                state.block_hashes(family_size),
                now_s,
                max_blocks=_max_hit_blocks(state, family_size),
            )
            for family_size in self._family_sizes
        }
        return (
            next(iter(hits_by_family.values()))
            if len(hits_by_family) == 1
            else _MultiFamilyHits(hits_by_family)
        )

    def _prompt_credits(self, state: RequestState, now_s: float) -> ReplicationCredits:
        """The losses for its prefixes; not known where their blocks have several names."""
        if len(self._family_sizes) != 1 or not len(self.prefix_credits):
            return NO_CREDITS
        return PromptCredits(
            self.prefix_credits, state.block_hashes(next(iter(self._family_sizes))), now_s
        )

    def on_placed(self, state: RequestState, decision: PlacementDecision, now_s: float) -> None:
        """A request goes where it was decided."""
        if decision.replication_credit is not None and len(self._family_sizes) == 1:
            hashes = state.block_hashes(next(iter(self._family_sizes)))
            self.prefix_credits.record(hashes, decision.replication_credit, now_s)

    def predict_prefill_s(self, replica_id: str, tokens: int, now_s: float) -> float:
        """Until a replica has computed these prompt tokens, after those sent there before."""
        view = self._fleet.get(replica_id)
        if view is None or not tokens:
            return 0.0
        ahead_s = max(0.0, self.pending_prefills.due_at_s.get(replica_id, 0.0) - now_s)
        return ahead_s + self.timings.of(view).prefill_s(tokens, running=view.load.running_requests)

    def cache_states(self, now_s: float) -> dict[str, dict[str, object]]:
        """The known state of each replica's prefix cache, in plain values, for operators."""
        states = {
            family: self.index.replica_state(family, now_s) for family in sorted(self._families)
        }
        return {part: asdict(state) for part, state in states.items() if state is not None}

    def check_integrity(self, transfers: int) -> None:
        """Raise AssertionError when the books disagree; `transfers` transfers are under way.

        The index can check itself; that takes as long as it is large.
        """
        counted = self.links.active_transfers
        assert counted == transfers, f"links count {counted} flows, requests {transfers}"
        self._sessions.check_integrity()
        assert self._families.keys() == self._fleet.ids, "families of replicas that are not there"
        assert Counter(self._families.values()) == self._family_sizes, "members are miscounted"

    # -------------------------------------------------------------- what came of it

    def on_prefill_sent(self, leg: Leg, replica_id: str, tokens: int, now_s: float) -> None:
        """A leg is about to go to a replica that must compute these tokens of its prompt."""
        view = self._fleet.get(replica_id)
        if view is None:
            return
        load_s = 0.0
        if leg.adapter is not None and not view.has_adapter(leg.adapter):
            load_s = adapter_load_s(view)
        if tokens > 1 or load_s:
            self.pending_prefills.add(
                leg.leg_id,
                replica_id,
                tokens=tokens,
                timing=self.timings.of(view),
                now_s=now_s,
                load_s=load_s,
            )

    def predict_cached(
        self, state: RequestState, replica_id: str, tokens: int, now_s: float
    ) -> None:
        """The first `tokens` of a request's prompt will soon be cached on a replica."""
        family = self._families.get(replica_id)
        if family is not None and self.index.options.mode is not IndexMode.EVENTS:
            blocks = tokens // family[1]
            max_blocks = _max_hit_blocks(state, family)
            self.index.predict(
                replica_id, state.block_hashes(family)[:blocks], now_s, max_blocks=max_blocks
            )

    def on_cached_tokens(
        self, state: RequestState, replica_id: str, cached_tokens: int, now_s: float
    ) -> None:
        """A replica began with a prompt and reported how much of it was cached there."""
        family = self._families.get(replica_id)
        if family is not None:
            self.reuse.observe(cached_tokens, state.token_count)
            if self.index.options.mode is IndexMode.EVENTS:
                return
            blocks = cached_tokens // family[1]
            self.index.check_prediction(replica_id, state.block_hashes(family), blocks, now_s)

    def on_first_token(self, state: RequestState, replica_id: str, now_s: float) -> None:
        """A request got its first token: compare with the prediction."""
        decision = state.decisions[-1] if state.decisions else None
        view = self._fleet.get(replica_id)
        if view is not None and decision is not None and decision.options:
            predicted_s = decision.options[0].ttft_s
            actual_s = now_s - decision.at_s
            pool = view.facts.pool
            self.timings.observe_ttft(pool, predicted_s=predicted_s, actual_s=actual_s)
            self.ttft_overruns.observe(actual_s - predicted_s)

    def on_finished(
        self, state: RequestState, replica_id: str, now_s: float, *, decoded: bool = True
    ) -> None:
        """A request ended well: its replica holds prompt and answer, for later requests.

        Its session is looked for where it was `decoded`.
        """
        request = state.request
        self.timings.observe_output(len(state.generated), request.max_tokens)
        if decoded and request.session_id is not None:
            self._sessions.record(request.tenant, request.session_id, replica_id)
        view = self._fleet.get(replica_id)
        if view is None:
            return
        reports = view.facts.cache_events and self.index.options.mode is not IndexMode.PREDICTED
        if not reports:
            # The last token was sampled, never computed.
            self.predict_cached(state, replica_id, state.token_count - 1, now_s)

    def stream_closed(self, state: RequestState, replica_id: str, now_s: float) -> None:
        """A client had enough of its stream, which was not at its end; teaches as much as an end.

        Mostly that is an end: engines whose frontend looks for stop strings cancel a stopped leg.
        Of a client that really went away, the output is less than the answer would have been, and
        the two cannot be distinguished here. The output was computed, though, and expectations (of
        room, of replicas, of a tenant's quota) need just that, for as long as clients behave as
        before. Otherwise, workloads whose answers all end on stop strings would stay at half of
        their limits.
        """
        self.on_finished(state, replica_id, now_s)

    def _forget_family(self, replica_id: str) -> None:
        family = self._families.pop(replica_id, None)
        if family is not None:
            self._family_sizes[family] -= 1
            if not self._family_sizes[family]:
                del self._family_sizes[family]


def _peek_blocks(facts: ReplicaFacts) -> int | None:
    shape = facts.cache_shape
    return None if shape is None else shape.lookahead_tokens // facts.block_size_tokens


def _max_hit_blocks(state: RequestState, family: BlockFamily) -> int:
    """Blocks of a prompt that can be found cached: its last token is always computed."""
    return max(0, state.token_count - 1) // family[1]


class _MultiFamilyHits:
    """Hits of a fleet in which replicas name blocks in different ways."""

    def __init__(self, hits_by_family: Mapping[BlockFamily, Hits]) -> None:
        self._hits_by_family = hits_by_family

    def of(self, replica_id: str) -> Hit:
        hits = (part.of(replica_id) for part in self._hits_by_family.values())
        return next((hit for hit in hits if hit.source is not HitSource.NONE), NO_HIT)

    def holders(self, limit: int) -> Sequence[str]:
        tokens = {
            holder: part.of(holder).blocks * block_size_tokens
            for (_, block_size_tokens), part in self._hits_by_family.items()
            for holder in part.holders(limit)
        }
        return sorted(tokens, key=tokens.__getitem__, reverse=True)[:limit]

    def depths(self) -> Sequence[int]:
        """None: blocks of different families cannot be counted together."""
        return ()


class PrefixReuse:
    """The fraction of prompt tokens that were cached; recent prompts weigh more.

    In balance, as many tokens leave the caches as enter them. If a fraction h of all prompt tokens
    is found cached, then for each token that is computed, and so enters a cache, h / (1 - h) are
    found.
    """

    __slots__ = ("_cached_tokens", "_prompt_tokens")

    def __init__(self) -> None:
        self._cached_tokens = 0.0
        self._prompt_tokens = 0.0

    def observe(self, cached_tokens: int, prompt_tokens: int) -> None:
        """Add a prompt, with its tokens that were cached where it was prefilled."""
        if not 0 <= cached_tokens <= prompt_tokens:
            return
        decay = max(0.0, 1 - prompt_tokens / _MEMORY_TOKENS)
        self._cached_tokens = decay * self._cached_tokens + cached_tokens
        self._prompt_tokens = decay * self._prompt_tokens + prompt_tokens

    @property
    def hit_fraction(self) -> float:
        """Cached tokens of all prompt tokens; 0 before the first prompt."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def reuses_per_token(self) -> float:
        """Tokens found cached for each that was computed, at most 4."""
        computed = self._prompt_tokens - self._cached_tokens
        return min(_MAX_REUSES_PER_TOKEN, self._cached_tokens / computed) if computed > 0 else 0.0
