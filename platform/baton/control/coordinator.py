"""The request machine: admit, place, hand off, stream, recover.

Theory of operation. `handle(event, now_s)` returns the commands that follow; the machine does no
I/O and reads no clock. Each request is an `Entry` that walks the table in `transitions`; it has at
most one running leg at a time (a prefill leg, then a decode leg; or one local leg) and at most one
lease. Legs of probes (`pairs`) are booked with those of requests and told apart by their ids. A leg
that is given up is *closing* until its replica confirms the abort, because an output that was
already under way may still bring a ticket, and with it blocks to free.

What may fail: a leg (`LegFailed`, or an output that ends in ERROR or ABORT), a replica (whatever
ran there is placed again, with the tokens already delivered as part of the prompt), and time
(every phase has a deadline). What is done then is in `recovery`, and who is counted on in `health`.
A request ends exactly once: `RecordRequest` is issued then and only then. The invariants are in
`check_integrity`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random
from typing import assert_never

from baton.control.accounting.reporter import Reporter
from baton.control.fleet.fleet_model import Knowledge
from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import LegBook
from baton.control.probing.notices import PairNotice
from baton.control.probing.prober import PairProber, ProbeOptions
from baton.control.queue.recent_estimates import Shedding
from baton.control.queue.tenant_limits import Limited, Tenancy
from baton.control.request.draining import Drains
from baton.control.request.leg_events import LegEvents
from baton.control.request.lifecycle import Journeys
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import Entry
from baton.control.state.service_rules import ServiceRules
from baton.domain.commands import Command, SyncCache
from baton.domain.demand import Admission, CoordinatorReport
from baton.domain.errors import (
    NotAllowed,
    PromptTooLong,
    QueueFull,
    RateLimited,
    Rejected,
)
from baton.domain.events import (
    CacheChanged,
    ColdStartReported,
    Event,
    LegFailed,
    LegsAborted,
    LinksReported,
    LoadReported,
    QuotasShared,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    RequestArrived,
    RequestsCancelled,
    RequestsRefused,
    RoleChanged,
    SideChannelChecked,
    StepProduced,
    TimePassed,
)
from baton.domain.fleet import FleetView, LossReason, ReplicaFacts, Role
from baton.domain.request import Phase, Request
from baton.domain.retry_reasons import Recoveries, Trouble
from baton.perf.fitting.engine_timings import TimingBook
from baton.perf.timing import EngineTiming
from baton.policy.admission.slo_classes import NoSuchClass
from baton.policy.placement.port import Placer
from baton.policy.prefix_cache.index import IndexOptions, PrefixIndex
from baton.policy.resilience.circuit_breakers import Circuit

_DEATHS = frozenset({LossReason.DISCONNECTED, LossReason.ENGINE_DEAD})
"""Losses that a request may have brought about."""
_MAY_FREE = (LoadReported, LegsAborted, ReplicaJoined, RoleChanged)
"""After these somebody who waits may have a place, though no leg has ended."""


class Coordinator:
    """The brain of one ingress replica. `handle` is never called re-entrantly."""

    def __init__(  # noqa: PLR0913 - each is a part of it, and has a default but two
        self,
        *,
        limits: CoordinatorLimits,
        placer: Placer,
        rules: ServiceRules | None = None,
        coordinators: int = 1,
        index: IndexOptions | None = None,
        probing: ProbeOptions | None = None,
        priors: Mapping[str, EngineTiming] | None = None,
        seed: int = 0,
    ) -> None:
        """Begin with an empty fleet.

        `priors` say, by pool, how long engines take in theory; of what tenants may use, this one of
        so many `coordinators` lets in an equal share until it is told another.
        """
        self._limits = limits
        self._rules = rules or ServiceRules()
        self._fleet = FleetTable()
        self._legs = LegBook(self._fleet)
        self.knowledge = Knowledge(self._fleet, PrefixIndex(index, seed=seed), TimingBook(priors))
        self._journeys = Journeys(
            limits=limits,
            placer=placer,
            fleet=self._fleet,
            legs=self._legs,
            knowledge=self.knowledge,
            tenancy=Tenancy(self._rules.tenants, coordinators=coordinators),
        )
        self._health = self._journeys.health
        self._journeys.waiters.admittance.govern(self._rules)
        self._drains = Drains(limits, self._fleet, self._legs)
        self._reporter = Reporter(self._fleet, self.knowledge, self._journeys.accounts)
        self._probes_pairs = probing is not None
        self._prober = PairProber(
            limits=limits,
            fleet=self._fleet,
            legs=self._legs,
            links=self.knowledge.links,
            rng=Random(seed),  # noqa: S311 - makes prompts differ, guards nothing
            options=probing,
        )
        self._leg_events = LegEvents(
            journeys=self._journeys,
            legs=self._legs,
            fleet=self._fleet,
            prober=self._prober,
            health=self._health,
        )
        self._ignored_arrivals = 0
        self._handled_at_s = 0.0

    # -------------------------------------------------------------- what a body calls

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take in one fact and return what must be done about it, in order."""
        self._handled_at_s = now_s
        ended = self._legs.ended
        journeys = self._journeys
        journeys.commands = []
        self._take(event, now_s)
        if journeys.waiters.try_at_s is not None:  # or else nobody waits for its turn
            if self._legs.ended != ended or isinstance(event, _MAY_FREE):
                journeys.waiters.came_free(now_s)
            journeys.turns.serve_held(now_s)
        if journeys.flows.doubts:
            for source_id, target_id in journeys.flows.take_doubts():
                self._do(self._prober.doubt(source_id, target_id, now_s))
        return journeys.commands

    def next_deadline_at_s(self) -> float | None:
        """When `TimePassed` should come at the latest; None while nothing waits for time."""
        first_s = self._journeys.deadlines.next_at_s()
        for at_s in (
            self._legs.next_deadline_at_s(),
            self._journeys.waiters.next_at_s(),
            self._prober.next_deadline_at_s() if self._probes_pairs else None,
            self._drains.next_at_s(),
            self._health.next_at_s(),
        ):
            if at_s is not None and (first_s is None or at_s < first_s):
                first_s = at_s
        return first_s

    def refusal(
        self, *, requests: int = 1, tenant: str | None = None, now_s: float | None = None
    ) -> Rejected | None:
        """Why `requests` more would be refused right now; None when they would be taken in.

        To be asked before a request is read. Whoever knows who asks, and when it is, hears of that
        tenant's limits, too; what else there is against a request only shows when it arrives. Of a
        batch of more than may ever wait, those without a place are then turned away one by one.
        """
        in_flight, waiters = len(self._journeys.entries), self._journeys.waiters
        at_s = self._handled_at_s if now_s is None else now_s
        if in_flight + requests > self._limits.max_requests:
            why = f"{in_flight} requests are in flight"
            return self._journeys.turns.queue_full("-", why, at_s)
        # More than could ever wait may come when nobody does: an idle fleet takes in most at once.
        could_wait = min(requests, self._limits.max_queued)
        over = len(waiters) + could_wait - self._limits.max_queued
        if over > 0 and waiters.admittance.could_go(self._rules.highest_priority(tenant)) < over:
            why = f"{len(waiters)} requests wait for a replica"
            return self._journeys.turns.queue_full("-", why, at_s)
        if tenant is not None and now_s is not None:
            known = self._rules.tenant(tenant)
            if (limited := self._journeys.tenancy.would_limit(known, now_s)) is not None:
                return RateLimited("-", limited.retry_after_s, limited.why)
        return None

    def can_serve(self) -> bool:
        """Whether a request that comes now can be served.

        By a replica that takes work, or by one that is started because the request waits for it.
        A fleet that starts for the first time cannot, until its first replica is there.
        """
        turns = self._journeys.turns
        return turns.has_replica or (turns.cold.wakes and turns.cold.was_up)

    def shedding(self, now_s: float) -> list[Shedding]:
        """The tenants and classes of late of which one more would be refused by prediction now.

        For a gate that knows no more of a request than who asks; it asks for the `refusal`, too.
        """
        admittance, slos = self._journeys.waiters.admittance, self._rules.slos
        likely_tokens = round(self._journeys.accounts.recent.prompt_tokens)
        found = []
        for name, slo_class in admittance.asked_lately(now_s):
            tenant, slo = self._rules.tenant(name), slos.classes.get(slo_class)
            shed = None if slo is None else admittance.would_shed(tenant, slo, now_s)
            if shed is not None:
                own = slos.resolve(None, tenant, likely_tokens)
                found.append(Shedding(name, slo_class, own == slo, shed.retry_after_s))
        return found

    def reconfigure(
        self,
        *,
        limits: CoordinatorLimits | None = None,
        placer: Placer | None = None,
        rules: ServiceRules | None = None,
    ) -> None:
        """Go on by other rules, while requests are under way; None: as before.

        What a request was promised when it arrived still counts for it. `TimePassed` should follow
        at once, since somebody who waits may have a place by the new rules.
        """
        self._limits = limits or self._limits
        self._rules = rules or self._rules
        self._journeys.reconfigure(limits=limits, placer=placer)
        if rules is not None:
            self._journeys.waiters.admittance.govern(rules)
            self._journeys.tenancy.reconfigure(rules.tenants)
        self._journeys.waiters.try_anew()
        if limits is not None:
            self._prober.reconfigure(limits)
            self._drains.reconfigure(limits)

    def report(self, coordinator_id: str, now_s: float) -> CoordinatorReport:
        """What the controller should know: what was asked, what requests got, every pool."""
        entries, held = self._journeys.entries, self._journeys.waiters.ids()
        asked = self._journeys.tenancy.asked(now_s)
        return self._reporter.report(
            coordinator_id,
            now_s,
            entries=entries,
            held=held,
            wanted_rates=asked,
            drained_s=self._journeys.waiters.admittance.drained_s(),
        )

    def admissions(self) -> tuple[Admission, ...]:
        """What became of requests at the door, as totals since the start."""
        return self._journeys.accounts.door.rows()

    def fleet(self, now_s: float) -> FleetView:
        """The fleet as placement sees it."""
        return self._fleet.view(now_s)

    def phases(self) -> dict[str, Phase]:
        """The phase of every request in flight, by request id."""
        return {request_id: entry.phase for request_id, entry in self._journeys.entries.items()}

    def adapters_in_flight(self) -> Mapping[str, int]:
        """How many requests under way, or waiting, need each adapter."""
        entries = self._journeys.entries.values()
        needed = (entry.request.adapter for entry in entries)
        return Counter(name for name in needed if name is not None)

    def leases(self) -> dict[str, int]:
        """How many of our handoffs each replica keeps blocks for, by replica."""
        return self._journeys.leases()

    @property
    def ignored_events(self) -> int:
        """Outputs, failures and arrivals that belong to nothing known; late frames mostly."""
        return self._leg_events.ignored + self._ignored_arrivals

    def unconfirmed_aborts(self) -> int:
        """Legs that were given up and whose replicas have not said yet that they are gone."""
        return self._legs.closing_count()

    def recoveries(self) -> Recoveries:
        """How often requests were tried again, and why, since the start."""
        return self._journeys.recovery.totals()

    def circuits(self, now_s: float) -> dict[str, Circuit]:
        """How far each replica is trusted."""
        return {one: self._health.circuit(one, now_s) for one in self._fleet.ids}

    def broken_agents(self) -> Mapping[str, str]:
        """Replicas that can pull from nobody though their sources serve others, and why."""
        return self._prober.broken_agents()

    def take_notices(self) -> tuple[PairNotice, ...]:
        """What an operator should hear of pairs of replicas, since this was last called."""
        return self._prober.take_notices()

    def check_integrity(self) -> None:
        """Raise AssertionError when the machine's own books disagree."""
        self._drains.check_integrity()
        self._health.check_integrity()
        self._prober.check_integrity()
        self._legs.check_integrity()
        self._journeys.check_integrity()
        self.knowledge.check_integrity(self._journeys.transfers())

    def _take(self, event: Event, now_s: float) -> None:
        match event:
            case StepProduced():
                self._health.heard(event.replica_id, now_s)
                self._health.stepped(event.replica_id, now_s)
                self._leg_events.step(event, now_s)
            case RequestArrived() | RequestsRefused() | RequestsCancelled():
                self._on_client(event, now_s)
            case LoadReported() | CacheChanged() | LinksReported() | SideChannelChecked():
                self._on_report(event, now_s)
            case LegFailed():
                self._leg_events.failed(event, now_s)
            case LegsAborted():
                self._health.heard(event.replica_id, now_s)
                self._leg_events.aborted(event.leg_ids)
            case TimePassed():
                self._on_time(now_s)
            case QuotasShared():
                self._journeys.tenancy.share(event.shares, now_s)
            case ColdStartReported():
                self._journeys.turns.cold_start_told(event.start, now_s)
            case ReplicaJoined() | ReplicaLost() | ReplicaDraining() | RoleChanged():
                self._on_membership(event, now_s)
            case _:
                assert_never(event)

    # -------------------------------------------------------------- requests

    def _on_client(
        self, event: RequestArrived | RequestsRefused | RequestsCancelled, now_s: float
    ) -> None:
        match event:
            case RequestArrived():
                self._on_arrival(event.request, now_s)
            case RequestsRefused():
                self._on_refused(event, now_s)
            case RequestsCancelled():
                self._on_cancel(event.request_ids, now_s)
            case _:
                assert_never(event)

    def _on_arrival(self, request: Request, now_s: float) -> None:
        entries = self._journeys.entries
        if request.request_id in entries:
            # The seam gives unique ids; a duplicate must not disturb the stream that has the id.
            self._ignored_arrivals += 1
            return
        tokens = len(request.prompt_token_ids)
        tenant = self._rules.tenant(request.tenant)
        slo = self._rules.slos.resolve(request.slo_class, tenant, tokens)
        early = self._limits.early_first_token and request.resumable
        entry = Entry(request=request, tenant=tenant, local_only=request.local_only, early=early)
        entry.taken_in_at_s = now_s
        entry.total_deadline_at_s = now_s + self._limits.total_s
        entries[request.request_id] = entry
        self._journeys.shared.began(request)
        if isinstance(slo, NoSuchClass):
            self._journeys.fail(entry, NotAllowed(request.request_id, slo.why), now_s)
            return
        entry.slo = slo
        error = self._refusal_of(request, now_s) or self._charge(entry, now_s)
        if error is not None:
            self._journeys.end(entry, Phase.SHED, now_s, reason=error.why, error=error)
        else:
            self._journeys.recovery.budget.arrived(now_s)
            self._journeys.place(entry, now_s)

    def _charge(self, entry: Entry, now_s: float) -> RateLimited | None:
        """Charge the tenant for a request; why not, when it has used up what it may use."""
        request = entry.request
        answer = self.knowledge.timings.expected_output_tokens(request.max_tokens)
        tokens = len(request.prompt_token_ids) + answer
        told = self._journeys.tenancy.ask(entry.tenant, tokens, now_s)
        if isinstance(told, Limited):
            return RateLimited(entry.request_id, told.retry_after_s, told.why)
        entry.charge = told
        return None

    def _refusal_of(self, request: Request, now_s: float) -> QueueFull | PromptTooLong | None:
        limits = self._limits
        if len(self._journeys.entries) > limits.max_requests:
            why = f"{limits.max_requests} requests are in flight"
            return self._journeys.turns.queue_full(request.request_id, why, now_s)
        tokens = len(request.prompt_token_ids)
        if limits.max_prompt_tokens is not None and tokens > limits.max_prompt_tokens:
            why = f"the prompt has {tokens} tokens, at most {limits.max_prompt_tokens} are let in"
            return PromptTooLong(request.request_id, why)
        return None

    def _on_refused(self, event: RequestsRefused, now_s: float) -> None:
        """Count them as what their client was told, like any that were read.

        How long their prompts are nobody knows: they are taken to be as long as others' lately.
        Whoever asks for a class that it may not have is counted in its own.
        """
        accounts, tenant = self._journeys.accounts, self._rules.tenant(event.tenant)
        likely_tokens = round(accounts.recent.prompt_tokens)
        slo = self._rules.slos.resolve(event.slo_class, tenant, likely_tokens)
        if isinstance(slo, NoSuchClass):
            slo = self._rules.slos.resolve(None, tenant, likely_tokens)
        assert not isinstance(slo, NoSuchClass), "whoever asks for no class is served in its own"
        accounts.refused(event.error, slo, tenant=tenant.name, requests=event.requests, now_s=now_s)

    def _on_cancel(self, request_ids: tuple[str, ...], now_s: float) -> None:
        for request_id in request_ids:
            if (entry := self._journeys.entries.get(request_id)) is not None:
                self._journeys.cancel(entry, now_s)

    # -------------------------------------------------------------- replicas and time

    def _on_membership(
        self, event: ReplicaJoined | ReplicaLost | ReplicaDraining | RoleChanged, now_s: float
    ) -> None:
        match event:
            case ReplicaJoined():
                self._on_joined(event.facts, now_s)
            case ReplicaLost():
                self._on_lost(event, now_s)
            case ReplicaDraining():
                self._fleet.drain(event.replica_id)
                self._drains.begin(event.replica_id, now_s)
                self._do(self._prober.gone(event.replica_id, now_s))
            case RoleChanged():
                self._on_role(event.replica_id, event.role, now_s)
            case _:
                assert_never(event)

    def _on_report(
        self,
        event: LoadReported | CacheChanged | LinksReported | SideChannelChecked,
        now_s: float,
    ) -> None:
        replica_id, missing = event.replica_id, False
        self._health.heard(replica_id, now_s)
        match event:
            case LoadReported():
                self._health.reported(replica_id, event.load, now_s)
                received = event.received_legs
                self._fleet.report(replica_id, event.load, now_s, received_legs=received)
                missing = self.knowledge.reported(replica_id, event.load, now_s)
            case CacheChanged():
                missing = self.knowledge.cache_changed(replica_id, event.update, now_s)
            case LinksReported():
                self.knowledge.links_reported(replica_id, event.links, now_s)
            case SideChannelChecked():
                self._do(self._prober.checked(event, now_s))
        if missing:
            self._journeys.commands.append(SyncCache(replica_id=replica_id))

    def _on_joined(self, facts: ReplicaFacts, now_s: float) -> None:
        if facts.replica_id in self._fleet:
            lost = ReplicaLost(replica_id=facts.replica_id, reason=LossReason.OUT_OF_STEP)
            self._on_lost(lost, now_s)
        self._reporter.left(facts.replica_id)
        self._fleet.join(facts, now_s)
        self._health.joined(facts.replica_id, now_s)
        self.knowledge.joined(facts)
        if self._probes_pairs:
            self._do(self._prober.joined(facts, now_s))
        self._journeys.turns.serve_queue(now_s)

    def _on_role(self, replica_id: str, role: Role, now_s: float) -> None:
        """Other pairs are of interest from now on, and somebody who waits may have a place."""
        view = self._fleet.change_role(replica_id, role)
        if view is not None and not view.draining:
            if self._probes_pairs:
                self._do(self._prober.gone(replica_id, now_s))
                self._do(self._prober.joined(view.facts, now_s))
            self._journeys.turns.serve_queue(now_s)

    def _on_lost(self, event: ReplicaLost, now_s: float) -> None:
        self._drains.over(event.replica_id)
        self._reporter.left(event.replica_id)
        self._fleet.lose(event.replica_id)
        self._health.lost(event.replica_id, event.reason, now_s)
        self.knowledge.lost(event.replica_id)
        self._do(self._prober.gone(event.replica_id, now_s))
        _, closing = self._legs.on_replica(event.replica_id)
        for gone in closing:
            self._legs.confirm(gone.placed.leg.leg_id)
            self._leg_events.release_orphan(gone, now_s)
        recovery, why = self._journeys.recovery, f"the replica was lost ({event.reason})"
        for entry in recovery.on_replica(event.replica_id):
            if event.reason in _DEATHS:
                entry.crashed()
            recovery.broken(entry, event.replica_id, why, now_s, trouble=Trouble.LOST)

    def _do(self, commands: Iterable[Command]) -> None:
        self._journeys.commands.extend(commands)

    def _on_time(self, now_s: float) -> None:
        self._do(self._prober.time_passed(now_s))
        for replica_id in self._health.time_passed(now_s):
            self._journeys.recovery.leave_silent(replica_id, now_s)
        for closing in self._legs.take_overdue(now_s):
            self._leg_events.unconfirmed(closing, now_s)
        for request_id in self._journeys.deadlines.take_due(now_s):
            self._journeys.on_deadline(self._journeys.entries[request_id], now_s)
        for entry in self._drains.due(self._journeys.entries, now_s):
            self._journeys.recovery.move(entry, now_s)
        retry_at_s = self._journeys.waiters.retry_at_s
        if retry_at_s is not None and retry_at_s <= now_s:
            self._journeys.turns.serve_queue(now_s)
