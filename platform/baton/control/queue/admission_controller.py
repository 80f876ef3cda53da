"""Who is let in: what is predicted for a request and known of its rivals, put before `decide`.

*Theory of operation.* `ask` turns a placement into a verdict and changes nothing that matters;
`let_in`, `hold` and `leave` keep the books. Only requests without a first placement are asked
about: what was let in once goes on, whatever became of its replica, and before all who wait.
Nothing is asked where no class promises anything, or where placement predicts nothing.
"""

from __future__ import annotations

from collections import Counter

from baton.control.fleet.fleet_model import Knowledge
from baton.control.fleet.fleet_table import FleetTable
from baton.control.queue.recent_estimates import Lately, Needed
from baton.control.queue.wait_queue import Band, Holding
from baton.control.state.request_state import Entry
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import ReplicaView, Role
from baton.domain.handoff import Decision, Option
from baton.domain.slo import Slo
from baton.domain.tenant import Tenant
from baton.policy.admission.decision import (
    AdmissionOptions,
    AdmissionRule,
    Admit,
    Limit,
    Prospect,
    Reason,
    Shed,
    Verdict,
    decide,
    decide_unpromised,
    limit,
)
from baton.policy.admission.decode_forecast import Newcomer, Outlook, outlook, pace_s
from baton.policy.admission.fair_queue import Waiting
from baton.policy.placement.device_seconds import decode_work_s, prefill_work_s
from baton.policy.placement.port import PlacementQuery

_LOOK_S = 1e-4
"""How long a look at the whole fleet lasts, for each replica: at half a microsecond for one, that
is half a percent of the time at most."""
_CROWDED = 0.25
"""Of the streams that a replica may run, those that a stream is priced beside, at least: where
tenants have to share the fleet it is full, and what a stream takes of an idle one says nothing."""
_ALL_BUT_FEW = 0.99
"""Of the first tokens that came, those that came no later than what is kept free."""
_NOT_JUDGED = Admit(Reason.NOT_JUDGED)


class Admittance:
    """The door of one coordinator."""

    def __init__(self, *, fleet: FleetTable, knowledge: Knowledge, patience_s: float) -> None:
        self.holding = Holding()
        self.patience_s = patience_s
        """How long one waits to whom no first token in time is promised, or can be."""
        self._fleet = fleet
        self._knowledge = knowledge
        self._options = AdmissionOptions()
        self._governs = self._predicts = False
        self._lately = Lately()
        self._under_way: Counter[int] = Counter()
        """Requests that were let in and have not ended, by priority."""
        self._seen = Outlook()
        self._seen_until_s = float("-inf")

    def govern(self, rules: ServiceRules) -> None:
        """Go by these rules from now on."""
        self._options = rules.admission
        promised = any(slo.promises_anything for slo in rules.slos.classes.values())
        self._predicts = rules.admission.rule is AdmissionRule.PREDICTED
        self._governs = promised and self._predicts

    def ask(self, entry: Entry, query: PlacementQuery, decision: Decision, now_s: float) -> Verdict:
        """Whether a request that would be placed so is let in."""
        if not self._predicts or not decision.options or entry.placed_at_s is not None:
            return _NOT_JUDGED
        option = decision.options[0]
        if not self._governs:
            needed = Needed(now_s, option.ttft_s - option.queue_s, option.queue_s, 0.0)
            self._lately.note(entry.tenant.name, entry.slo.name, needed)
            return self._unpromised(needed)
        decoder = self._fleet.get(option.decode_replica_id)
        if decoder is None:
            return _NOT_JUDGED
        alone_s = option.ttft_s - option.queue_s
        if entry.waiting is None:
            self._find_place(entry, query, option, now_s)
        held = entry.request_id in self.holding
        turn_s = None if held else self._take_turn(entry, now_s)
        seen = Prospect(
            waited_s=query.waited_s,
            alone_s=alone_s,
            queue_s=option.queue_s,
            turn_s=turn_s,
            held=held,
            doubt=self.holding.doubt(entry.band),
        )
        if turn_s is None:
            seen = self._look_closer(entry, query, decision, decoder, seen)
        latest = self._limit_of(entry, alone_s, now_s)
        return decide(entry.slo, seen, latest, options=self._options)

    def _unpromised(self, needed: Needed) -> Verdict:
        """Nobody is promised anything; but nobody is to be given up in an engine's queue, either.

        What is kept free for errors is half of the time at most: nearer ones need no closer look.
        """
        ttft_s = needed.alone_s + needed.queue_s
        if ttft_s <= self.patience_s / 2:
            return _NOT_JUDGED
        latest = self._limit(Slo(ttft_s=self.patience_s), needed.alone_s)
        return decide_unpromised(ttft_s, queue_s=needed.queue_s, latest_s=latest.after_s)

    def asked_lately(self, now_s: float) -> list[tuple[str, str]]:
        """Names of tenants and classes of which something has come of late."""
        return self._lately.kinds(now_s) if self._predicts else []

    def would_shed(self, tenant: Tenant, slo: Slo, now_s: float) -> Shed | None:
        """What one more of a class would be told, as light as the lightest of late; None: come in.

        Counts nothing, for nothing has arrived.
        """
        needed = self._lately.lightest(tenant.name, slo.name, now_s)
        if needed is None or not self._predicts:
            return None
        if not self._governs:
            told = self._unpromised(needed)
            return told if isinstance(told, Shed) else None
        latest = self._limit(slo, needed.alone_s)
        band = Band(slo.priority + tenant.priority, latest.can_be_met)
        one = Waiting(
            "-",
            tenant.name,
            tenant.weight,
            needed.work,
            now_s + latest.after_s - needed.alone_s,
        )
        turn = self.holding.turn(band, one, replicas=self._replicas, now_s=now_s)
        seen = Prospect(
            waited_s=0.0,
            alone_s=needed.alone_s,
            queue_s=needed.queue_s,
            turn_s=None if turn is None else turn.after_s,
            doubt=self.holding.doubt(band),
        )
        verdict = decide(slo, seen, latest, options=self._options)
        return verdict if isinstance(verdict, Shed) else None

    def let_in(self, entry: Entry, now_s: float) -> None:
        """It is about to be placed; for the first time, or again."""
        if entry.placed_at_s is None:
            self._under_way[entry.priority] += 1
            if now_s < self._seen_until_s:  # or else nobody asks for it any more
                self._seen = self._seen._replace(computing=self._seen.computing + self._fleet.crowd)
            if entry.waiting is not None:
                self.holding.let_in(entry.band, entry.waiting, replicas=self._replicas, now_s=now_s)

    def hold(self, entry: Entry, now_s: float) -> None:
        """It waits for its turn."""
        assert entry.waiting is not None, "nobody is held who was not asked about"
        self.holding.add(entry.band, entry.waiting, now_s)

    def leave(self, entry: Entry, now_s: float) -> None:
        """It has ended."""
        self.holding.withdraw(entry.request_id, now_s)
        if entry.placed_at_s is not None:
            self._under_way[entry.priority] -= 1
            if not self._under_way[entry.priority]:
                del self._under_way[entry.priority]

    def victim(self, entry: Entry) -> str | None:
        """Who must go so that this one may wait; None when it comes before nobody."""
        return self.holding.victim(Band(entry.priority, entry.band.can_be_met))

    def could_go(self, priority: int) -> int:
        """How many of those who wait would make room for one of this priority."""
        return self.holding.below(Band(priority, can_be_met=True))

    def drained_s(self) -> float:
        """How long until all who wait now have had their turns; 0 when nobody waits."""
        return self.holding.drained_s(replicas=self._replicas)

    # -------------------------------------------------------------- what is put before it

    def _find_place(
        self, entry: Entry, query: PlacementQuery, option: Option, now_s: float
    ) -> None:
        """Say where in the line a request belongs; it keeps its place from then on."""
        alone_s = option.ttft_s - option.queue_s
        latest = self._limit_of(entry, alone_s, now_s)
        entry.band = Band(entry.priority, latest.can_be_met)
        work = self._work_s(query, option)
        begin_by_s = now_s - query.waited_s + latest.after_s - alone_s
        if (no_replica_s := entry.no_replica_s(now_s)) > 0:
            begin_by_s = now_s - query.waited_s - no_replica_s  # before those that came since
        entry.waiting = Waiting(
            entry.request_id, entry.tenant.name, entry.tenant.weight, work, begin_by_s
        )
        needed = Needed(now_s, alone_s, option.queue_s, work)
        self._lately.note(entry.tenant.name, entry.slo.name, needed)

    def _limit_of(self, entry: Entry, alone_s: float, now_s: float) -> Limit:
        """When its first token must come, not counting its wait for a replica.

        What it was promised has passed by then: from when there is a replica it waits for its turn
        as long as one to whom no first token in time is promised.
        """
        latest = self._limit(entry.slo, alone_s)
        if entry.no_replica_s(now_s) <= 0:
            return latest
        after_s = max(latest.held_s, self.patience_s + alone_s)
        return Limit(after_s, can_be_met=True, held_s=after_s)

    def _limit(self, slo: Slo, alone_s: float) -> Limit:
        return limit(
            slo,
            alone_s,
            overrun_s=self._knowledge.overruns.quantile_s(_ALL_BUT_FEW),
            options=self._options,
            patience_s=self.patience_s,
        )

    def _take_turn(self, entry: Entry, now_s: float) -> float | None:
        """Its place among those who wait, and how long until its turn; None: it comes first."""
        assert entry.waiting is not None, "its place is found before its turn"
        turn = self.holding.turn(entry.band, entry.waiting, replicas=self._replicas, now_s=now_s)
        if turn is None:
            return None
        entry.waiting = turn.place
        return turn.after_s

    def _work_s(self, query: PlacementQuery, option: Option) -> float:
        """Device-seconds of a request: of its prompt where that is computed, of its stream."""
        timings, fleet = self._knowledge.timings, self._fleet
        decoder = fleet.get(option.decode_replica_id)
        prefiller = decoder
        if option.prefill_replica_id is not None:
            prefiller = fleet.get(option.prefill_replica_id)
        work = 0.0
        if prefiller is not None:
            work = prefill_work_s(
                timings.of(prefiller),
                query.prompt_tokens - option.hit_tokens,
                devices=prefiller.facts.devices,
            )
        if decoder is not None:
            output = timings.expected_output_tokens(query.max_tokens)
            most = decoder.facts.max_running_requests
            running = max(decoder.load.running_requests + 1, round(most * _CROWDED))
            work += decode_work_s(
                timings.of(decoder),
                output,
                running=running,
                context_tokens=running * (query.prompt_tokens + output / 2),
                devices=decoder.facts.devices,
            )
        return work

    def _look_closer(
        self,
        entry: Entry,
        query: PlacementQuery,
        decision: Decision,
        decoder: ReplicaView,
        seen: Prospect,
    ) -> Prospect:
        """What only matters to one who is first in line."""
        option, timing = decision.options[0], self._knowledge.timings.of(decoder)
        if option.queue_s > self._options.engine_queue_s:
            running = decoder.load.running_requests if option.prefill_replica_id is None else 0
            seen = seen._replace(
                step_s=timing.step_s(running=running + 1) / 2,
                idle_elsewhere=any(
                    one.queue_s <= self._options.engine_queue_s for one in decision.options
                ),
            )
        if (tpot_s := entry.slo.tpot_s) is not None:
            now_s = decision.at_s
            newcomer = Newcomer(
                horizon_s=option.ttft_s,
                prompt_tokens=query.prompt_tokens,
                output_tokens=self._knowledge.timings.expected_output_tokens(query.max_tokens),
                prompt_share=self._knowledge.timings.prompt_share(decoder, now_s),
            )
            load = self._outlook(now_s)
            if decoder.facts.role is Role.PREFILL and self._fleet.view(now_s).roster.decode:
                # It stays where its prompt is computed: the decode pool does not matter to it.
                load = Outlook(decoders=1, streams=decoder.inflight_streams * self._fleet.crowd)
            seen = seen._replace(pace_s=pace_s(load, newcomer, timing))
            if seen.pace_s > tpot_s * (1 - self._options.margin_fraction):
                alone_s = timing.step_s(running=1, context_tokens=query.prompt_tokens)
                seen = seen._replace(alone_pace_s=alone_s)
        if option.missed:
            seen = seen._replace(breaks=self._breaks(entry, option, seen))
        return seen

    def _breaks(self, entry: Entry, option: Option, seen: Prospect) -> float:
        """Of the misses that its placement predicts, those of others that it must not cause."""
        slo, missed = entry.slo, option.missed
        if slo.ttft_s is not None and seen.waited_s + option.ttft_s > slo.ttft_s:
            missed -= 1  # its own first token
        if slo.tpot_s is not None and missed >= 1 and seen.pace_s > slo.tpot_s:
            missed -= 1  # its own pace
        peers = sum(n for priority, n in self._under_way.items() if priority >= entry.priority)
        return max(0.0, missed) * peers / max(1, self._under_way.total())

    def _outlook(self, now_s: float) -> Outlook:
        """A look at the whole fleet, or the last one, and what was let in since."""
        if now_s >= self._seen_until_s:
            self._seen = outlook(self._fleet.view(now_s))
            self._seen_until_s = now_s + _LOOK_S * len(self._fleet)
        return self._seen

    @property
    def _replicas(self) -> int:
        """How many replicas take prompts."""
        roster = self._fleet.view(0.0).roster
        return len(roster.prefill or roster.decode)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        self.holding.check_integrity()
        assert all(count > 0 for count in self._under_way.values()), "more have ended than came"
