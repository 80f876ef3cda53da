"""The coordinator of an ingress replica: which request, probe or replica each event is about.

Theory of operation. `handle(event, now_s)` returns the commands that follow, without I/O or a
clock. Requests are in `lifecycle`, probes in `prober`, replicas in `health`. A request has at most
one running leg and one lease. A leg that is given up is *closing* until its replica confirms the
abort. An output that was already under way may still bring a KV handle, and blocks to free.

Every phase has a deadline. After a failed leg or replica, `retries` decides about the next try. A
request ends exactly once: only then is `StoreRequestRecord` issued. `check_integrity` has the
invariants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random
from typing import assert_never

from baton.control.accounting.reporter import CoordinatorReporter
from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import ClosingLeg, LegTable
from baton.control.probing.notices import PairNotice
from baton.control.probing.prober import PairProber, ProbeOptions
from baton.control.queue.admission_controller import SheddingClass
from baton.control.queue.tenant_limits import LimitExceeded, TenantLimits
from baton.control.request.draining import DrainingReplicas
from baton.control.request.lifecycle import FAILED_FINISHES, REJECTED_FINISHES, RequestLifecycle
from baton.control.request.retries import RetryCause
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import RequestState
from baton.control.state.service_rules import ServiceRules
from baton.domain.commands import Command, Deliver, Delivery, SyncCache
from baton.domain.demand import AdmissionCount, CoordinatorReport
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
    QuotasAllocated,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    RequestArrived,
    RequestsCancelled,
    RequestsRejected,
    RoleChanged,
    SideChannelChecked,
    StepCompleted,
    TimerFired,
)
from baton.domain.fleet import FleetView, LossReason, ReplicaFacts, Role
from baton.domain.handoff import LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason, LocalOnlyReason, Phase, Request
from baton.domain.retry_reasons import RetryReason, RetryTotals
from baton.perf.fitting.engine_timings import EngineTimings
from baton.perf.timing import EngineTiming
from baton.policy.admission.slo_classes import ClassNotAllowed
from baton.policy.placement.port import Placer
from baton.policy.prefix_cache.index import IndexOptions, PrefixIndex
from baton.policy.resilience.circuit_breakers import CircuitState

_CRASH_REASONS = frozenset({LossReason.DISCONNECTED, LossReason.ENGINE_DEAD})
"""Losses that a request may have brought about."""
_REJECTIONS = frozenset({LegFailure.REJECTED, LegFailure.INVALID})
_NON_LINK_FAILURES = frozenset({LegFailure.OVERLOADED, LegFailure.UNREACHABLE, LegFailure.DRAINING})
"""Failures of a decode leg that say nothing of the link that its blocks would have taken."""
_CAPACITY_EVENTS = (LoadReported, LegsAborted, ReplicaJoined, RoleChanged)
"""After these a waiting request may have a place, though no leg has ended."""


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

        `priors` say, by pool, how long engines take in theory. Of tenants' limits, this coordinator
        uses an equal share, one of `coordinators`, until it gets another share.
        """
        self._limits = limits
        self._rules = rules or ServiceRules()
        self._fleet = FleetTable()
        self._legs = LegTable(self._fleet)
        self.fleet_model = FleetModel(
            self._fleet, PrefixIndex(index, seed=seed), EngineTimings(priors)
        )
        tenant_limits = TenantLimits(self._rules.tenants, coordinators=coordinators)
        self._lifecycle = RequestLifecycle(
            limits=limits,
            placer=placer,
            fleet=self._fleet,
            legs=self._legs,
            fleet_model=self.fleet_model,
            tenant_limits=tenant_limits,
        )
        self._tenant_limits = tenant_limits
        self._requests = self._lifecycle.requests
        self._health = self._lifecycle.health
        self._accounts = self._lifecycle.accounts
        self._pending = self._lifecycle.pending
        self._pending.admission.configure(self._rules)
        self._draining = DrainingReplicas(limits, self._fleet, self._legs)
        self._reporter = CoordinatorReporter(
            self._fleet, self.fleet_model, self._accounts, max_pulls=limits.max_pulls
        )
        self._is_probing = probing is not None
        self._prober = PairProber(
            limits=limits,
            fleet=self._fleet,
            legs=self._legs,
            links=self.fleet_model.links,
            rng=Random(seed),  # noqa: S311 - makes prompts differ, guards nothing
            options=probing,
        )
        self.ignored_events = 0
        """Outputs, failures and arrivals that belong to nothing known; late frames mostly."""
        self._handled_at_s = 0.0

    # -------------------------------------------------------------- what a body calls

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take in one fact and return what must be done about it, in order."""
        self._handled_at_s = now_s
        ended_before = self._legs.ended_count
        lifecycle = self._lifecycle
        lifecycle.commands = []
        self._apply(event, now_s)
        if self._pending.head_retry_at_s is not None:  # or else no request waits for its turn
            if self._legs.ended_count != ended_before or isinstance(event, _CAPACITY_EVENTS):
                self._pending.on_capacity(now_s)
            lifecycle.serve_waiting(now_s)
        if lifecycle.transfers.suspects:
            for source_id, target_id in lifecycle.transfers.pop_suspects():
                self._add_commands(self._prober.suspect(source_id, target_id, now_s))
        return lifecycle.commands

    def next_deadline_at_s(self) -> float | None:
        """When `TimerFired` should come at the latest; None while nothing waits for time."""
        earliest_s = self._lifecycle.deadlines.next_at_s()
        for at_s in (
            self._legs.next_deadline_at_s(),
            self._pending.next_retry_at_s(),
            self._prober.next_deadline_at_s() if self._is_probing else None,
            self._draining.next_at_s(),
            self._health.next_at_s(),
        ):
            if at_s is not None and (earliest_s is None or at_s < earliest_s):
                earliest_s = at_s
        return earliest_s

    def rejection(
        self, *, requests: int = 1, tenant: str | None = None, now_s: float | None = None
    ) -> Rejected | None:
        """Why `requests` more would be refused right now; None when they would be taken in.

        To be asked before a request is read. With the tenant and the time, it includes that
        tenant's limits, too; other reasons against a request only show when it arrives. Of a batch
        of more than may ever wait, those without a place are then rejected one by one.
        """
        in_flight, pending = len(self._requests), self._pending
        at_s = self._handled_at_s if now_s is None else now_s
        if in_flight + requests > self._limits.max_requests:
            reason = f"{in_flight} requests are in flight"
            return self._pending.queue_full_error("-", reason, at_s)
        # More than could ever wait may come to an empty queue: an idle fleet takes in most at once.
        queueable = min(requests, self._limits.max_queued_requests)
        excess = len(pending) + queueable - self._limits.max_queued_requests
        if (
            excess > 0
            and pending.admission.evictable_count(self._rules.highest_priority(tenant)) < excess
        ):
            reason = f"{len(pending)} requests wait for a replica"
            return self._pending.queue_full_error("-", reason, at_s)
        if tenant is not None and now_s is not None:
            known_tenant = self._rules.tenant(tenant)
            if (limited := self._tenant_limits.check(known_tenant, now_s)) is not None:
                return RateLimited("-", limited.retry_after_s, limited.reason)
        return None

    def can_serve(self) -> bool:
        """Whether a request that comes now can be served.

        By a replica that takes work, or by a replica that is started because the request waits for
        it. A fleet that starts for the first time cannot, until its first replica is there.
        """
        return self._pending.can_serve()

    def shedding_classes(self, now_s: float) -> list[SheddingClass]:
        """The tenants and classes of late of which one more would be refused by prediction now.

        For a gate that knows only the sender of a request; it asks for the `rejection`, too.
        """
        admission, slos = self._pending.admission, self._rules.slos
        expected_tokens = round(self._accounts.recent.prompt_tokens)
        shedding = []
        for name, slo_class in admission.recent_classes(now_s):
            tenant, slo = self._rules.tenant(name), slos.classes.get(slo_class)
            shed = None if slo is None else admission.would_shed(tenant, slo, now_s)
            if shed is not None:
                default_slo = slos.resolve(None, tenant, expected_tokens)
                shedding.append(
                    SheddingClass(
                        tenant=name,
                        slo_class=slo_class,
                        is_default=default_slo == slo,
                        retry_after_s=shed.retry_after_s,
                    )
                )
        return shedding

    def reconfigure(
        self,
        *,
        limits: CoordinatorLimits | None = None,
        placer: Placer | None = None,
        rules: ServiceRules | None = None,
    ) -> None:
        """Go on by other rules, while requests are under way; None: as before.

        A request keeps the objectives of its arrival. `TimerFired` should follow at once, since a
        waiting request may have a place by the new rules.
        """
        self._limits = limits or self._limits
        self._rules = rules or self._rules
        self._lifecycle.reconfigure(limits=limits, placer=placer)
        if rules is not None:
            self._pending.admission.configure(rules)
            self._tenant_limits.reconfigure(rules.tenants)
        self._pending.retry_now()
        if limits is not None:
            self._prober.reconfigure(limits)
            self._draining.reconfigure(limits)

    def report(self, coordinator_id: str, now_s: float) -> CoordinatorReport:
        """The report for the controller: demand, results of requests, every pool."""
        requests, queued_ids = self._requests, self._pending.ids()
        requested_rates = self._tenant_limits.requested_rates(now_s)
        return self._reporter.report(
            coordinator_id,
            now_s,
            requests=requests,
            queued_ids=queued_ids,
            requested_rates=requested_rates,
            drain_s=self._pending.admission.drain_s(),
        )

    def admissions(self) -> tuple[AdmissionCount, ...]:
        """Results of admission, as totals since the start."""
        return self._accounts.admission_counts.rows()

    def fleet(self, now_s: float) -> FleetView:
        """The fleet as placement sees it."""
        return self._fleet.view(now_s)

    def phases(self) -> dict[str, Phase]:
        """The phase of every request in flight, by request id."""
        return {request_id: state.phase for request_id, state in self._requests.items()}

    def adapters_in_flight(self) -> Mapping[str, int]:
        """How many requests under way, or waiting, need each adapter."""
        requests = self._requests.values()
        adapters = (state.request.adapter for state in requests)
        return Counter(name for name in adapters if name is not None)

    def lease_counts(self) -> dict[str, int]:
        """How many of our handoffs each replica keeps blocks for, by replica."""
        return dict(Counter(e.lease.replica_id for e in self._requests.values() if e.lease))

    def unconfirmed_aborts(self) -> int:
        """Legs that were given up and whose replicas have not confirmed the end."""
        return self._legs.closing_count()

    def retry_totals(self) -> RetryTotals:
        """How often requests were tried again, and why, since the start."""
        return self._lifecycle.retries.totals()

    def circuits(self, now_s: float) -> dict[str, CircuitState]:
        """How far each replica is trusted."""
        return {id_: self._health.circuit(id_, now_s) for id_ in self._fleet.ids}

    def failed_agents(self) -> Mapping[str, str]:
        """Replicas that can pull from no source though their sources serve others, and why."""
        return self._prober.failed_agents()

    def pop_notices(self) -> tuple[PairNotice, ...]:
        """News of pairs of replicas for operators, since this was last called."""
        return self._prober.pop_notices()

    def check_integrity(self) -> None:
        """Raise AssertionError when the machine's own books disagree."""
        self._draining.check_integrity()
        self._health.check_integrity()
        self._prober.check_integrity()
        self._legs.check_integrity()
        self._lifecycle.check_integrity()
        # A transfer outlives its source until its leg ends.
        transfers = sum(state.transfer is not None for state in self._requests.values())
        self.fleet_model.check_integrity(transfers)

    def _apply(self, event: Event, now_s: float) -> None:
        match event:
            case StepCompleted():
                self._health.on_heartbeat(event.replica_id, now_s)
                self._health.on_step(event.replica_id, now_s)
                self._on_step(event, now_s)
            case RequestArrived() | RequestsRejected() | RequestsCancelled():
                self._on_client_event(event, now_s)
            case LoadReported() | CacheChanged() | LinksReported() | SideChannelChecked():
                self._on_report(event, now_s)
            case LegFailed():
                self._on_leg_failed(event, now_s)
            case LegsAborted():
                self._health.on_heartbeat(event.replica_id, now_s)
                self._on_aborted(event.leg_ids)
            case TimerFired():
                self._on_time(now_s)
            case QuotasAllocated():
                self._tenant_limits.apply_shares(event.shares, now_s)
            case ColdStartReported():
                self._lifecycle.on_cold_start(event.cold_start, now_s)
            case ReplicaJoined() | ReplicaLost() | ReplicaDraining() | RoleChanged():
                self._on_membership(event, now_s)
            case _:
                assert_never(event)

    # -------------------------------------------------------------- requests

    def _on_client_event(
        self, event: RequestArrived | RequestsRejected | RequestsCancelled, now_s: float
    ) -> None:
        match event:
            case RequestArrived():
                self._on_arrival(event.request, now_s)
            case RequestsRejected():
                self._on_rejected(event, now_s)
            case RequestsCancelled():
                self._on_cancel(event.request_ids, now_s)
            case _:
                assert_never(event)

    def _on_arrival(self, request: Request, now_s: float) -> None:
        requests = self._requests
        if request.request_id in requests:
            # The seam gives unique ids; a duplicate must not disturb the stream that has the id.
            self.ignored_events += 1
            return
        tokens = len(request.prompt_token_ids)
        tenant = self._rules.tenant(request.tenant)
        slo = self._rules.slos.resolve(request.slo_class, tenant, tokens)
        allow_early_token = self._limits.early_first_token and request.resumable
        state = RequestState(
            request=request,
            tenant=tenant,
            local_only=request.local_only,
            allow_early_token=allow_early_token,
        )
        state.accepted_at_s = now_s
        state.total_deadline_at_s = now_s + self._limits.total_timeout_s
        requests[request.request_id] = state
        self._lifecycle.shared_prompts.on_arrived(request)
        if isinstance(slo, ClassNotAllowed):
            self._lifecycle.fail(state, NotAllowed(request.request_id, slo.reason), now_s)
            return
        state.slo = slo
        error = self._rejection_of(request, tokens, now_s) or self._charge(state, now_s)
        if error is not None:
            self._lifecycle.end(state, Phase.SHED, now_s, reason=error.reason, error=error)
        else:
            self._lifecycle.retries.on_arrival(now_s)
            self._lifecycle.place(state, now_s)

    def _charge(self, state: RequestState, now_s: float) -> RateLimited | None:
        """Charge the tenant for a request; why not, when it has used up what it may use."""
        max_tokens = state.request.max_tokens
        expected_tokens = self.fleet_model.timings.expected_output_tokens(max_tokens)
        tokens = state.prompt_tokens + expected_tokens
        charge = self._tenant_limits.acquire(state.tenant, tokens, now_s)
        if isinstance(charge, LimitExceeded):
            return RateLimited(state.request_id, charge.retry_after_s, charge.reason)
        state.charge = charge
        return None

    def _rejection_of(
        self, request: Request, tokens: int, now_s: float
    ) -> QueueFull | PromptTooLong | None:
        limits = self._limits
        if len(self._requests) > limits.max_requests:
            reason = f"{limits.max_requests} requests are in flight"
            return self._pending.queue_full_error(request.request_id, reason, now_s)
        if limits.max_prompt_tokens is not None and tokens > limits.max_prompt_tokens:
            reason = f"the prompt has {tokens} tokens, expected at most {limits.max_prompt_tokens}"
            return PromptTooLong(request.request_id, reason)
        return None

    def _on_rejected(self, event: RequestsRejected, now_s: float) -> None:
        """Count them by the answer to their client, like any that were read.

        The lengths of their prompts are not known: they are taken to be those of other recent
        prompts. A request for a class that it may not have is counted in its own class.
        """
        accounts, tenant = self._accounts, self._rules.tenant(event.tenant)
        expected_tokens = round(accounts.recent.prompt_tokens)
        slo = self._rules.slos.resolve(event.slo_class, tenant, expected_tokens)
        if isinstance(slo, ClassNotAllowed):
            slo = self._rules.slos.resolve(None, tenant, expected_tokens)
        assert not isinstance(slo, ClassNotAllowed), (
            "a request without a class is served in its tenant's class"
        )
        accounts.on_rejected(
            event.error, slo, tenant=tenant.name, requests=event.requests, now_s=now_s
        )

    def _on_cancel(self, request_ids: tuple[str, ...], now_s: float) -> None:
        for request_id in request_ids:
            if (state := self._requests.get(request_id)) is not None:
                self._lifecycle.cancel(state, now_s)

    # -------------------------------------------------------------- legs

    def _on_step(self, event: StepCompleted, now_s: float) -> None:
        """Pass on the outputs of one engine step: for legs of requests, for probes, or late."""
        deliveries: list[Delivery] = []
        lifecycle, replica_id, get_leg = self._lifecycle, event.replica_id, self._legs.get_running
        get_request, steps = self._requests.get, event.steps
        for output in event.outputs:
            dispatched = get_leg(output.leg_id)
            if dispatched is None or dispatched.replica_id != replica_id:
                self._on_late_output(output, replica_id, now_s)
                continue
            leg = dispatched.leg
            state = get_request(leg.request_id)
            if state is None:  # a running leg without a request is a probe's
                self._add_commands(self._prober.on_output(output, now_s))
            elif output.finish in REJECTED_FINISHES:
                reason, is_invalid = (
                    str(output.stop_reason or ""),
                    output.finish is FinishReason.INVALID,
                )
                lifecycle.fail_rejected(state, replica_id, reason, now_s, is_invalid=is_invalid)
            elif leg.kind is LegKind.PREFILL:
                delivery = lifecycle.on_prefill_output(state, output, dispatched, now_s)
                if delivery is not None:
                    deliveries.append(delivery)
            elif output.finish in FAILED_FINISHES:
                lifecycle.on_failed_output(state, output, now_s)
            else:
                deliveries.append(
                    lifecycle.on_decode_output(state, output, dispatched, now_s, steps)
                )
        if deliveries:
            # First, so that a client has its last token before its request is recorded as ended.
            lifecycle.commands.insert(0, Deliver(deliveries=tuple(deliveries)))

    def _on_late_output(self, output: LegOutput, replica_id: str, now_s: float) -> None:
        """An output of a leg that is closing, or was forgotten; no replica will pull its blocks."""
        if output.kv_handle is not None:
            self._lifecycle.release_blocks(output, replica_id, now_s)
        elif output.finish in FAILED_FINISHES or output.finish in REJECTED_FINISHES:
            self._on_late_failure(output.leg_id, now_s)
        elif self._legs.get_closing(output.leg_id) is None:
            self.ignored_events += 1

    def _on_leg_failed(self, event: LegFailed, now_s: float) -> None:
        """A leg ended without its engine finishing it."""
        if not event.was_sent:
            self._fleet.on_leg_unsent(event.replica_id, event.leg_id)
        dispatched = self._legs.get_running(event.leg_id)
        if dispatched is None or dispatched.replica_id != event.replica_id:
            self._on_late_failure(event.leg_id, now_s)
            return
        if self._prober.owns(event.leg_id):
            self._add_commands(self._prober.on_leg_failed(event, now_s))
            return
        state = self._requests[dispatched.leg.request_id]
        if event.failure in _REJECTIONS:
            is_invalid = event.failure is LegFailure.INVALID
            self._lifecycle.fail_rejected(
                state, event.replica_id, event.reason, now_s, is_invalid=is_invalid
            )
            return
        if event.failure is LegFailure.KV_LOAD_FAILED:
            state.local_only = LocalOnlyReason.HANDOFF_FAILED
        if event.failure in _NON_LINK_FAILURES:
            self._lifecycle.transfers.end(state, now_s)
        self._lifecycle.on_leg_failed(state, RetryCause.of_failed_leg(event), now_s)

    def _on_late_failure(self, leg_id: str, now_s: float) -> None:
        # Unlike a confirmed abort, a failure says nothing about the blocks the leg was to pull.
        if (closing := self._legs.confirm_closed(leg_id)) is None:
            self.ignored_events += 1
        else:
            self._release_closing_lease(closing, now_s)

    def _on_aborted(self, leg_ids: tuple[str, ...]) -> None:
        """A replica confirms that legs are gone."""
        # A confirmed abort of a decode leg has ended its lease too: engines see to that.
        for leg_id in leg_ids:
            if self._legs.confirm_closed(leg_id) is None:
                self.ignored_events += 1

    def _on_abort_timeout(self, closing: ClosingLeg, now_s: float) -> None:
        """A replica did not confirm an abort in time: that counts against it."""
        dispatched = closing.dispatched
        reason = "an abort was not confirmed"
        self._health.on_leg_failed(dispatched.replica_id, dispatched.leg.leg_id, now_s, reason)
        self._release_closing_lease(closing, now_s)

    def _release_closing_lease(self, closing: ClosingLeg, now_s: float) -> None:
        """A closing leg is gone: its lease, if it had one, ends with it."""
        if closing.lease is not None:
            self._lifecycle.release_lease(closing.lease, now_s)

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
                self._fleet.mark_draining(event.replica_id)
                self._draining.begin(event.replica_id, now_s)
                self._add_commands(self._prober.on_replica_removed(event.replica_id, now_s))
            case RoleChanged():
                self._on_role_changed(event.replica_id, event.role, now_s)
            case _:
                assert_never(event)

    def _on_report(
        self,
        event: LoadReported | CacheChanged | LinksReported | SideChannelChecked,
        now_s: float,
    ) -> None:
        replica_id, needs_resync = event.replica_id, False
        self._health.on_heartbeat(replica_id, now_s)
        match event:
            case LoadReported():
                self._health.on_load_report(replica_id, event.load, now_s)
                received_legs = event.received_legs
                self._fleet.on_load_report(
                    replica_id, event.load, now_s, received_legs=received_legs
                )
                needs_resync = self.fleet_model.on_load_report(replica_id, event.load, now_s)
            case CacheChanged():
                needs_resync = self.fleet_model.on_cache_update(replica_id, event.update, now_s)
            case LinksReported():
                self.fleet_model.on_link_report(replica_id, event.links, now_s)
            case SideChannelChecked():
                self._add_commands(self._prober.on_side_channel_checked(event, now_s))
        if needs_resync:
            self._lifecycle.commands.append(SyncCache(replica_id=replica_id))

    def _on_joined(self, facts: ReplicaFacts, now_s: float) -> None:
        if facts.replica_id in self._fleet:
            lost = ReplicaLost(replica_id=facts.replica_id, reason=LossReason.OUT_OF_SYNC)
            self._on_lost(lost, now_s)
        self._reporter.on_replica_removed(facts.replica_id)
        self._fleet.add(facts, now_s)
        self._health.on_replica_joined(facts.replica_id, now_s)
        self.fleet_model.on_replica_joined(facts)
        if self._is_probing:
            self._add_commands(self._prober.on_replica_joined(facts, now_s))
        self._lifecycle.retry_unplaced(now_s)

    def _on_role_changed(self, replica_id: str, role: Role, now_s: float) -> None:
        """Other pairs are of interest from now on, and a waiting request may have a place."""
        view = self._fleet.change_role(replica_id, role)
        if view is not None and not view.draining:
            if self._is_probing:
                self._add_commands(self._prober.on_replica_removed(replica_id, now_s))
                self._add_commands(self._prober.on_replica_joined(view.facts, now_s))
            self._lifecycle.retry_unplaced(now_s)

    def _on_lost(self, event: ReplicaLost, now_s: float) -> None:
        self._draining.remove(event.replica_id)
        self._reporter.on_replica_removed(event.replica_id)
        self._fleet.remove(event.replica_id)
        self._health.on_replica_lost(event.replica_id, event.reason, now_s)
        self.fleet_model.on_replica_lost(event.replica_id)
        self._add_commands(self._prober.on_replica_removed(event.replica_id, now_s))
        _, closing = self._legs.legs_on(event.replica_id)
        for closing_leg in closing:
            self._legs.confirm_closed(closing_leg.dispatched.leg.leg_id)
            self._release_closing_lease(closing_leg, now_s)
        reason = f"the replica was lost ({event.reason})"
        cause = RetryCause(event.replica_id, RetryReason.REPLICA_LOST, reason)
        for state in self._lifecycle.requests_on(event.replica_id):
            if event.reason in _CRASH_REASONS:
                state.on_replica_crashed()
            self._lifecycle.on_leg_failed(state, cause, now_s)

    def _add_commands(self, commands: Iterable[Command]) -> None:
        self._lifecycle.commands.extend(commands)

    def _on_time(self, now_s: float) -> None:
        self._add_commands(self._prober.on_time(now_s))
        for replica_id in self._health.on_time(now_s):
            self._lifecycle.evacuate_unresponsive(replica_id, now_s)
        for closing in self._legs.pop_overdue(now_s):
            self._on_abort_timeout(closing, now_s)
        for request_id in self._lifecycle.deadlines.pop_due(now_s):
            self._lifecycle.on_deadline(self._requests[request_id], now_s)
        for state in self._draining.start_due_migrations(self._requests, now_s):
            self._lifecycle.migrate(state, now_s)
        retry_at_s = self._pending.unplaced_retry_at_s
        if retry_at_s is not None and retry_at_s <= now_s:
            self._lifecycle.retry_unplaced(now_s)
