"""What a coordinator knows of its fleet besides the loads: caches, timings, links, sessions.

It is told facts, and answers what placement asks. Everything in it is an estimate or a hint: when
events are late, lost or off, answers get worse and nothing breaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.pending_prefills import Prompts
from baton.control.fleet.sessions import Sessions
from baton.control.state.request_state import Entry, Family
from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts
from baton.domain.handoff import Decision, HitSource, Leg
from baton.domain.slo import NO_SLO
from baton.perf.fitting.engine_timings import TimingBook
from baton.perf.fitting.lateness import Overruns
from baton.policy.links.estimates import LinkBook
from baton.policy.placement.port import PlacementQuery, Surroundings
from baton.policy.placement.prefix_reuse import Reuse
from baton.policy.placement.replica_cost import adapter_load_s
from baton.policy.prefix_cache.hits import NO_HIT, NO_HITS, Hit, Hits
from baton.policy.prefix_cache.index import IndexMode, PrefixIndex
from baton.policy.prefix_cache.replication import NO_REGRETS, PrefixRegrets, PromptRegrets, Regrets


class Knowledge:
    """One coordinator's picture of the fleet."""

    def __init__(
        self, fleet: FleetTable, index: PrefixIndex, timings: TimingBook | None = None
    ) -> None:
        self.index = index
        self.timings = timings or TimingBook()
        self.links = LinkBook()
        self.reuse = Reuse()
        self.regrets = PrefixRegrets()
        self.prompts = Prompts()
        self.overruns = Overruns()
        """How much later than predicted first tokens come."""
        self._fleet = fleet
        self._families: dict[str, Family] = {}
        self._members: Counter[Family] = Counter()
        """How many replicas each family has."""
        self._sessions = Sessions()

    # -------------------------------------------------------------- facts

    def joined(self, facts: ReplicaFacts) -> None:
        """A replica is new, or new again: what was known of its cache is not true any more."""
        self.index.join(
            facts.replica_id, capacity_blocks=facts.kv_blocks, peek_blocks=_peek_blocks(facts)
        )
        self.links.leave(facts.replica_id)
        self.links.join(facts.replica_id)
        self._forget_family(facts.replica_id)
        family = (facts.model, facts.block_size_tokens)
        self._families[facts.replica_id] = family
        self._members[family] += 1

    def lost(self, replica_id: str) -> None:
        """A replica is gone."""
        self.index.leave(replica_id)
        self.links.leave(replica_id)
        self.timings.leave(replica_id)
        self._forget_family(replica_id)

    def reported(self, replica_id: str, load: Load, now_s: float) -> bool:
        """Take in a load report; True when it shows that cache updates are missing."""
        view = self._fleet.get(replica_id)
        if view is None:
            return False
        self.timings.observe(view.facts, load, now_s)
        return view.facts.cache_events and self.index.heard(replica_id, load.cache_sequence, now_s)

    def cache_changed(self, replica_id: str, update: CacheUpdate, now_s: float) -> bool:
        """Take in what a replica says of its cache; True when updates are missing before it."""
        return self.index.apply(replica_id, update, now_s)

    def links_reported(self, replica_id: str, links: Sequence[LinkTotals], now_s: float) -> None:
        """Take in what a replica has pulled from others."""
        for link in links:
            self.links.observe(replica_id, link, now_s)

    # -------------------------------------------------------------- answers

    def around(self, now_s: float) -> Surroundings:
        """What placement may look at."""
        return Surroundings(
            fleet=self._fleet.view(now_s),
            timings=self.timings,
            links=self.links,
            room=self.index,
            due_at_s=self.prompts.due_at_s,
        )

    def query(self, entry: Entry, now_s: float) -> PlacementQuery:
        """What placement must know to place (or place again) this request."""
        request = entry.request
        session = self._sessions.last(request.tenant, request.session_id)
        return PlacementQuery(
            prompt_tokens=len(request.prompt_token_ids) + len(entry.generated),
            max_tokens=max(1, request.max_tokens - len(entry.generated)),
            local_only=entry.local_only,
            avoid=entry.avoid,
            adapter=request.adapter,
            hits=self._hits(entry, now_s),
            session_replica_id=session if session and session in self._fleet else None,
            reuses=self.reuse.reuses,
            regrets=self._regrets(entry, now_s),
            early=entry.early,
            waited_s=max(0.0, now_s - request.arrived_at_s - entry.no_replica_s(now_s)),
            slo=None if entry.slo is NO_SLO else entry.slo,
        )

    def _hits(self, entry: Entry, now_s: float) -> Hits:
        if self.index.is_empty or not self._members or not entry.request.prompt_token_ids:
            return NO_HITS
        found = {
            one: self.index.look_up(entry.hashes(one), now_s, most_blocks=_most_blocks(entry, one))
            for one in self._members
        }
        return next(iter(found.values())) if len(found) == 1 else _AnyFamily(found)

    def _regrets(self, entry: Entry, now_s: float) -> Regrets:
        """What was forgone for its prefixes; not known where their blocks have several names."""
        if len(self._members) != 1 or not len(self.regrets):
            return NO_REGRETS
        return PromptRegrets(self.regrets, entry.hashes(next(iter(self._members))), now_s)

    def placed(self, entry: Entry, decision: Decision, now_s: float) -> None:
        """A request goes where it was decided."""
        if decision.forgone is not None and len(self._members) == 1:
            hashes = entry.hashes(next(iter(self._members)))
            self.regrets.note(hashes, decision.forgone, now_s)

    def prefill_s(self, replica_id: str, tokens: int, now_s: float) -> float:
        """Until a replica has computed so many prompt tokens, after those sent there before."""
        view = self._fleet.get(replica_id)
        if view is None or not tokens:
            return 0.0
        ahead_s = max(0.0, self.prompts.due_at_s.get(replica_id, 0.0) - now_s)
        return ahead_s + self.timings.of(view).prefill_s(tokens, running=view.load.running_requests)

    def caches(self, now_s: float) -> dict[str, dict[str, object]]:
        """What is known of each replica's prefix cache, in plain values, for operators."""
        states = {one: self.index.state(one, now_s) for one in sorted(self._families)}
        return {one: asdict(state) for one, state in states.items() if state is not None}

    def check_integrity(self, flows: int) -> None:
        """Raise AssertionError when the books disagree; `flows` transfers are under way.

        The index can check itself; that takes as long as it is large.
        """
        counted = self.links.flows
        assert counted == flows, f"links count {counted} flows, requests {flows}"
        self._sessions.check_integrity()
        assert self._families.keys() == self._fleet.ids, "families of replicas that are not there"
        assert Counter(self._families.values()) == self._members, "members are miscounted"

    # -------------------------------------------------------------- what came of it

    def prompt_sent(self, leg: Leg, replica_id: str, tokens: int, now_s: float) -> None:
        """A leg is about to go to a replica that must compute so much of its prompt."""
        view = self._fleet.get(replica_id)
        if view is None:
            return
        load_s = 0.0
        if leg.adapter is not None and not view.has_adapter(leg.adapter):
            load_s = adapter_load_s(view)
        if tokens > 1 or load_s:
            self.prompts.sent(
                leg.leg_id,
                replica_id,
                tokens=tokens,
                timing=self.timings.of(view),
                now_s=now_s,
                load_s=load_s,
            )

    def sent(self, entry: Entry, replica_id: str, tokens: int, now_s: float) -> None:
        """The first `tokens` of a request's prompt will soon be cached on a replica."""
        family = self._families.get(replica_id)
        if family is not None and self._index_predicts:
            blocks = tokens // family[1]
            most = _most_blocks(entry, family)
            self.index.predict(replica_id, entry.hashes(family)[:blocks], now_s, most_blocks=most)

    def computed(self, entry: Entry, replica_id: str, cached_tokens: int, now_s: float) -> None:
        """A replica began with a prompt and said how much of it was cached there."""
        family = self._families.get(replica_id)
        if family is not None:
            self.reuse.observe(cached_tokens, len(entry.tokens()))
            if not self._index_predicts:
                return
            blocks = cached_tokens // family[1]
            self.index.correct(replica_id, entry.hashes(family), blocks, now_s)

    def first_token(self, entry: Entry, replica_id: str, now_s: float) -> None:
        """A request got its first token: compare with what was predicted."""
        decision = entry.decisions[-1] if entry.decisions else None
        view = self._fleet.get(replica_id)
        if view is not None and decision is not None and decision.options:
            predicted_s = decision.options[0].ttft_s
            actual_s = now_s - decision.at_s
            pool = view.facts.pool
            self.timings.observe_ttft(pool, predicted_s=predicted_s, actual_s=actual_s)
            self.overruns.observe(actual_s - predicted_s)

    def finished(
        self, entry: Entry, replica_id: str, now_s: float, *, decoded: bool = True
    ) -> None:
        """A request ended well: its replica holds prompt and answer, for what comes next.

        Its session is looked for where it was `decoded`.
        """
        request = entry.request
        self.timings.observe_output(len(entry.generated), request.max_tokens)
        if decoded and request.session_id is not None:
            self._sessions.ended(request.tenant, request.session_id, replica_id)
        view = self._fleet.get(replica_id)
        if view is not None and not (view.facts.cache_events and self._events_count):
            # The last token was sampled, never computed.
            tokens = len(request.prompt_token_ids) + len(entry.generated) - 1
            self.sent(entry, replica_id, tokens, now_s)

    def left(self, entry: Entry, replica_id: str, now_s: float) -> None:
        """A client had enough of its stream, which was not at its end; teaches as much as an end.

        Mostly that is an end: engines whose frontend looks for stop strings cancel what has come to
        one. Of who really went away, what it got is less than the answer would have been, and the
        two cannot be told apart here. What it got is what was computed for it, though; and who asks
        what to expect (of room, of replicas, of a tenant's quota) wants to know just that, for as
        long as clients are as patient as they were. Not to learn of these would leave whole
        workloads, all of whose answers end on stop strings, at half of what they allow for.
        """
        self.finished(entry, replica_id, now_s)

    def _forget_family(self, replica_id: str) -> None:
        family = self._families.pop(replica_id, None)
        if family is not None:
            self._members[family] -= 1
            if not self._members[family]:
                del self._members[family]

    @property
    def _index_predicts(self) -> bool:
        return self.index.mode is not IndexMode.EVENTS

    @property
    def _events_count(self) -> bool:
        return self.index.mode is not IndexMode.PREDICTED


def _peek_blocks(facts: ReplicaFacts) -> int | None:
    shape = facts.cache_shape
    return None if shape is None else shape.peek_tokens // facts.block_size_tokens


def _most_blocks(entry: Entry, family: Family) -> int:
    """Blocks of a prompt that can be found cached: its last token is always computed."""
    return max(0, entry.token_count - 1) // family[1]


class _AnyFamily:
    """Hits of a fleet in which replicas name blocks in different ways."""

    def __init__(self, parts: Mapping[Family, Hits]) -> None:
        self._parts = parts

    def of(self, replica_id: str) -> Hit:
        hits = (part.of(replica_id) for part in self._parts.values())
        return next((hit for hit in hits if hit.source is not HitSource.NONE), NO_HIT)

    def holders(self, limit: int) -> Sequence[str]:
        tokens = {
            one: part.of(one).blocks * block_size_tokens
            for (_, block_size_tokens), part in self._parts.items()
            for one in part.holders(limit)
        }
        return sorted(tokens, key=tokens.__getitem__, reverse=True)[:limit]

    def depths(self) -> Sequence[int]:
        """None: blocks of different families cannot be counted together."""
        return ()
