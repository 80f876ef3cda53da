"""One request from its arrival to its end: it waits, is placed, handed off, streamed, tried again.

*Theory of operation.* A request is a `RequestState`; its phase moves along `TRANSITIONS`. Each
phase is entered in one method, which issues the commands that follow:

    QUEUED     `_queue_for_replica`, `_queue_for_admission`
    PREFILL    `_start_route`: the first leg of a route, be it local or a prefill leg
    TRANSFER   `_hand_off`: the decode leg, which pulls the blocks of a finished prefill leg
    DECODE     `_begin_stream`: the first output of a local or decode leg
    RESUME     `_resume`: placed again, with the tokens that its client has as part of its prompt
    an end     `end`: FINISHED, SHED, EVICTED, FAILED or CANCELLED, once for each request

The coordinator says which request an event is about. Every request that waits or runs has a
deadline, on which `on_deadline` acts. `retries` decides what follows when a leg is over without a
result; `legs` books the beginning and the end of each leg.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from baton.control.accounting.accounts import Accounts
from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.health import ReplicaHealth
from baton.control.fleet.leg_table import DispatchedLeg, LegTable
from baton.control.queue.pending import PendingRequests
from baton.control.queue.tenant_limits import TenantLimits
from baton.control.request.legs import (
    InFlightTransfers,
    LegRecorder,
    release_command,
    transfer_timeout_s,
)
from baton.control.request.retries import (
    Fail,
    Retry,
    RetryCause,
    RetryPolicy,
    is_failure,
    is_replica_at_fault,
    is_unresumable,
)
from baton.control.state.deadlines import Deadlines
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.prompt_use import SharedPrompts
from baton.control.state.request_state import ATTEMPT_SEPARATOR, RUNNING_PHASES, RequestState
from baton.domain.commands import Command, Delivery, FailRequest, StoreRequestRecord
from baton.domain.demand import ColdStart
from baton.domain.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailed,
    Evicted,
    NoCapacity,
    Rejected,
    RequestInvalid,
    SloUnattainable,
)
from baton.domain.handoff import (
    CacheUse,
    HandoffMode,
    KvHandle,
    Lease,
    LegKind,
    LegOutput,
    PlacementDecision,
    RouteReason,
)
from baton.domain.leg_record import LegOutcome
from baton.domain.request import FinishReason, LocalOnlyReason, Phase
from baton.domain.retry_reasons import RetryReason
from baton.domain.value import evolve
from baton.policy.admission.decision import AdmissionDecision, AdmissionReason, Admit, Enqueue, Shed
from baton.policy.placement.port import NoRoute, PlacementQuery, Placer
from baton.policy.placement.replica_cost import usable_tokens
from baton.policy.resilience.hedging import is_better_alternative

FAILED_FINISHES = frozenset({FinishReason.ERROR, FinishReason.ABORT})
REJECTED_FINISHES = frozenset({FinishReason.INVALID, FinishReason.REJECTED})
"""Ends of legs that no engine has failed at: another one would end them the same."""

_DECODE_IS_FULL = frozenset({AdmissionReason.TPOT_UNATTAINABLE, AdmissionReason.PULL_QUEUE})
_STALL_FRACTION = 0.9
"""Of a stall: reports of the last step come a little after it."""


class RequestLifecycle:
    """The requests in flight, their queue and deadlines, and the commands they give rise to."""

    def __init__(
        self,
        *,
        limits: CoordinatorLimits,
        placer: Placer,
        fleet: FleetTable,
        legs: LegTable,
        fleet_model: FleetModel,
        tenant_limits: TenantLimits,
    ) -> None:
        self.requests: dict[str, RequestState] = {}
        self.deadlines = Deadlines()
        self.commands: list[Command] = []
        self._limits = limits
        self._placer = placer
        self._fleet = fleet
        self._legs = legs
        self._fleet_model = fleet_model
        self._tenant_limits = tenant_limits
        self.health = ReplicaHealth(limits.recovery, fleet)
        self.accounts = Accounts(fleet, fleet_model)
        self.pending = PendingRequests(limits, fleet=fleet, fleet_model=fleet_model)
        self.retries = RetryPolicy(limits, self.health)
        self.transfers = InFlightTransfers(fleet, fleet_model.links)
        self.shared_prompts = SharedPrompts()
        self._leg_recorder = LegRecorder(
            legs=legs, fleet_model=fleet_model, accounts=self.accounts, health=self.health
        )

    # -------------------------------------------------------------- placement

    def place(self, state: RequestState, now_s: float, *, delay_if_tried: bool = False) -> None:
        """Begin the first leg of a route, or wait where no replica can take the request.

        With `delay_if_tried`, a route over a replica that has just failed this request waits a
        moment first. A replica that refuses at once would otherwise use up every attempt at once.
        """
        query = self._fleet_model.placement_query(state, now_s)
        decision = self._placer.place(query, self._fleet_model.placement_context(now_s))
        if isinstance(decision, NoRoute):
            self._queue_for_replica(state, now_s, reason=decision.reason)
        elif delay_if_tried and decision.route.decode_replica_id in state.avoid:
            self._queue_for_replica(state, now_s, reason="every replica has just failed it")
            retry_at_s = now_s + self._limits.retry_s
            self.pending.unplaced_retry_at_s = self.pending.unplaced_retry_at_s or retry_at_s
        else:
            decision, admission = self._evaluate_admission(state, query, decision, now_s)
            match admission:
                case Admit():
                    self._start_route(state, query, decision, now_s)
                case Enqueue():
                    self._queue_for_admission(state, admission, now_s)
                case Shed():
                    self._reject(state, admission, now_s)
                case _:
                    assert_never(admission)

    def _evaluate_admission(
        self, state: RequestState, query: PlacementQuery, decision: PlacementDecision, now_s: float
    ) -> tuple[PlacementDecision, AdmissionDecision]:
        """Whether a request is admitted, and where.

        Placement sees only the present streams. Where decode will be too full with those on their
        way, a request may decode where it is prefilled.
        """
        admission = self.pending.admission.evaluate(state, query, decision, now_s)
        if not isinstance(admission, Enqueue) or admission.reason not in _DECODE_IS_FULL:
            return decision, admission
        context = self._fleet_model.placement_context(now_s)
        local = self._placer.place(evolve(query, is_decode_saturated=True), context)
        if isinstance(local, NoRoute) or local.route.reason is not RouteReason.DECODE_ON_PREFILL:
            return decision, admission
        local_admission = self.pending.admission.evaluate(state, query, local, now_s)
        if not isinstance(local_admission, Admit):
            return decision, admission
        return local, local_admission

    def _start_route(
        self, state: RequestState, query: PlacementQuery, decision: PlacementDecision, now_s: float
    ) -> None:
        route = decision.route
        self._fleet_model.on_placed(state, decision, now_s)
        self.pending.on_admitted(state, now_s)
        state.decisions.append(decision)
        state.routes.append(route)
        state.transition_to(Phase.PREFILL)
        if state.placed_at_s is None:
            state.placed_at_s = now_s
        state.first_token_due_at_s = now_s + self._limits.first_token_timeout_s
        hedge_at_s = self.retries.hedge_at_s(state, decision, self._fleet_model.ttft_overruns)
        self._set_deadline(state, min(state.first_token_due_at_s, hedge_at_s))
        if route.mode is HandoffMode.LOCAL:
            replica_id, leg = route.decode_replica_id, state.new_leg(LegKind.LOCAL)
        else:
            assert route.prefill_replica_id is not None, "a PULL route names a prefill replica"
            replica_id = route.prefill_replica_id
            leg = state.new_leg(
                LegKind.PREFILL,
                prefill_tokens=route.prefill_tokens,
                emits_first_token=self._emits_first_token(state, decision),
            )
        prompt_tokens = len(leg.prompt_token_ids)
        uncached_tokens = prompt_tokens - self._reusable_tokens(query, replica_id, prompt_tokens)
        self.commands.append(
            self._leg_recorder.begin(state, leg, replica_id, now_s, tokens=uncached_tokens)
        )

    def _emits_first_token(self, state: RequestState, decision: PlacementDecision) -> bool:
        """Whether the prefill leg of a route gives a client its token.

        Where a policy predicts, it says so; and the expected next phase must be possible.
        """
        route, option = decision.route, decision.chosen
        decoder = self._fleet.get(route.decode_replica_id)
        if (
            route.prefill_tokens is not None
            or decoder is None
            or not decoder.facts.supports_takeover
        ):
            return False
        return state.allow_early_token and (option is None or option.is_early_token)

    def _reusable_tokens(self, query: PlacementQuery, replica_id: str, tokens: int) -> int:
        """How many of these leading tokens a replica need not compute."""
        view = self._fleet.get(replica_id)
        if view is None:
            return 0
        return usable_tokens(query.hits.of(replica_id), tokens, view.facts.block_size_tokens)

    # -------------------------------------------------------------- waiting

    def _queue_for_replica(self, state: RequestState, now_s: float, *, reason: str) -> None:
        """Wait for a replica: briefly before the first token, for long once a stream is open."""
        if state.phase is Phase.QUEUED:
            return
        streaming = bool(state.generated)
        if not streaming and not self._make_room(state, now_s):
            reason = f"the queue is full ({reason})"
            error = self.pending.queue_full_error(state.request_id, reason, now_s)
            self._end_rejected(state, error, now_s)
            return
        state.transition_to(Phase.QUEUED)
        self.pending.add_unplaced(state, now_s)
        if streaming:
            self._set_deadline(state, now_s + self._limits.resume_timeout_s)
        else:
            self._set_deadline(state, now_s + self.pending.queue_timeout_s(now_s))

    def _queue_for_admission(self, state: RequestState, decision: Enqueue, now_s: float) -> None:
        """Wait for its turn."""
        if state.request_id in self.pending.admission.wait_queue:
            self.pending.not_admitted(decision, now_s)
            return
        if not self._make_room(state, now_s):
            reason = f"{len(self.pending)} requests wait already"
            error = self.pending.queue_full_error(state.request_id, reason, now_s)
            self._end_rejected(state, error, now_s)
            return
        if state.phase is not Phase.QUEUED:
            state.transition_to(Phase.QUEUED)
        self.pending.enqueue(state, now_s)
        self._set_deadline(state, now_s + decision.slack_s)

    def _make_room(self, state: RequestState, now_s: float) -> bool:
        """Whether one more may wait; for one of a higher band the newest of the lowest goes."""
        if self.pending.has_room(state.request_id):
            return True
        victim = self.pending.admission.victim(state)
        if victim is None:
            return False
        reason = "the queue is full, and others come before it"
        error = Evicted(victim, self.pending.retry_after_s(now_s), reason)
        self._end_rejected(self.requests[victim], error, now_s)
        return True

    def on_cold_start(self, start: ColdStart, now_s: float) -> None:
        """Requests that wait for a replica wait as long as a cold start is now known to take."""
        self.pending.on_cold_start(start, now_s)
        if self.pending.has_eligible_replica:
            return
        timeout_s = self.pending.queue_timeout_s(now_s)
        for request_id in self.pending.unplaced:
            state = self.requests[request_id]
            if state.waiting_since_s is not None:
                self._set_deadline(state, max(now_s, state.waiting_since_s + timeout_s))

    def retry_unplaced(self, now_s: float) -> None:
        """Try to place all requests that wait for a replica, in order of arrival."""
        self.pending.on_retry_unplaced()
        for request_id in tuple(self.pending.unplaced):
            self.place(self.requests[request_id], now_s)

    def serve_waiting(self, now_s: float) -> None:
        """Place the head of the queue, one after the other, as long as that succeeds."""
        while (request_id := self.pending.pop_due_head(now_s)) is not None:
            self.place(self.requests[request_id], now_s)
            if self.pending.pop_due_head(now_s) == request_id:
                self.pending.placement_failed(now_s)

    def _on_queue_timeout(self, state: RequestState, now_s: float) -> None:
        """It has waited for as long as it can."""
        if state.generated:
            reason = f"no replica came to resume it within {self._limits.resume_timeout_s:g} s"
            self.fail(state, EngineFailed(state.request_id, reason), now_s)
            return
        waited_s = self._limits.queue_timeout_s
        if state.waiting_since_s is not None:
            waited_s = now_s - state.waiting_since_s
        reason = f"no replica took it within {waited_s:.3g} s"
        if state.request_id in self.pending.admission.wait_queue:
            self.pending.admission.wait_queue.record_timeout(state.request_id)
            reason = "its turn did not come in time for its first token"
        error_type = Evicted if len(self._fleet) else NoCapacity
        retry_s = self.pending.retry_after_s(now_s)
        self._end_rejected(state, error_type(state.request_id, retry_s, reason), now_s)

    def _reject(self, state: RequestState, decision: Shed, now_s: float) -> None:
        """It would be late: say so before anything was computed for it."""
        reason = (
            f"its first token is predicted {decision.ttft_s:.2f} s after it arrived,"
            f" which for class {state.slo.name!r} must be at most {decision.ttft_limit_s:.2f} s"
        )
        self.pending.admission.wait_queue.record_timeout(state.request_id)
        retry_s = max(1.0, decision.retry_after_s)
        error_type = SloUnattainable if state.phase is Phase.ARRIVED else Evicted
        self._end_rejected(state, error_type(state.request_id, retry_s, reason), now_s)

    def _end_rejected(self, state: RequestState, error: Rejected, now_s: float) -> None:
        """End a request that got nothing."""
        outcome = Phase.SHED if state.phase is Phase.ARRIVED else Phase.EVICTED
        self.end(state, outcome, now_s, reason=error.reason, error=error)

    # -------------------------------------------------------------- tokens and handoff

    def on_decode_output(
        self,
        state: RequestState,
        output: LegOutput,
        dispatched: DispatchedLeg,
        now_s: float,
        steps: int = 1,
    ) -> Delivery:
        """Journal the tokens of a local or decode leg, from one step or more, and pass them on."""
        _, token_ids, finish, stop_reason, _, cached_tokens, detail, _, cache_use = output
        if cached_tokens is not None:
            self._leg_recorder.record_cached(state, dispatched, cached_tokens, now_s)
            state.update_prompt_use(dispatched.leg, cached_tokens, cache_use)
            cached_tokens = cache_use = None
        if not state.generated:
            cached_tokens, cache_use = self._reported_cache_use(state, dispatched)
        if token_ids:
            self._record_tokens(state, token_ids, dispatched, now_s, steps)
            if state.phase is not Phase.DECODE:
                self._begin_stream(state, output, dispatched, now_s)
        if finish is not None:
            self._leg_recorder.finish(state, dispatched, output, now_s)
            self._fleet_model.on_finished(state, dispatched.replica_id, now_s)
            self.end(state, Phase.FINISHED, now_s, reason=finish)
        return Delivery(
            state.request_id, token_ids, finish, stop_reason, cached_tokens, detail, cache_use
        )

    def _reported_cache_use(
        self, state: RequestState, dispatched: DispatchedLeg
    ) -> tuple[int | None, CacheUse | None]:
        """The report to a client on its prompt, with its first tokens."""
        if (use := state.prompt_use) is None:
            return None, None
        if state.request.fan_out_id is not None:
            view = self._fleet.get(dispatched.replica_id)
            block_size_tokens = 1 if view is None else view.facts.block_size_tokens
            use = self.shared_prompts.client_use(
                state.request, use, block_size_tokens=block_size_tokens
            )
        return use.cached_tokens, use.cache_use

    def _record_tokens(
        self,
        state: RequestState,
        token_ids: tuple[int, ...],
        dispatched: DispatchedLeg,
        now_s: float,
        steps: int = 1,
    ) -> None:
        """Keep tokens that go on to the client."""
        if state.last_token_at_s is None:
            state.first_token_at_s = now_s
            self._fleet_model.on_first_token(state, dispatched.replica_id, now_s)
        elif (gap_s := (now_s - state.last_token_at_s) / steps) > state.itl_threshold_s:
            state.record_itl(gap_s, steps)
        state.last_token_at_s = now_s
        state.generated.extend(token_ids)

    def _begin_stream(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> None:
        """A leg gave its first tokens."""
        state.transition_to(Phase.DECODE)
        self._leg_recorder.first_output(state, dispatched, output, now_s)
        # The pull is over: the engines have ended the lease between themselves.
        state.lease = None
        self.transfers.end(state, now_s, is_complete=True)
        # Tokens to come do not move it; whether any have come is looked at when it has passed.
        self._set_deadline(state, now_s + self._limits.stall_timeout_s)

    def on_prefill_output(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> Delivery | None:
        """Go from a finished prefill leg to the decode leg.

        A leg that gives its token gives it to the client now, and decode goes on after it, as after
        a resume. The token of another is not used: the decode replica computes the last prompt
        position again and samples the first one, so that sampling state lives in one engine only.
        """
        if output.cached_tokens is not None:
            self._leg_recorder.record_cached(state, dispatched, output.cached_tokens, now_s)
            if output.finish not in FAILED_FINISHES:
                state.update_prompt_use(dispatched.leg, output.cached_tokens, output.cache_use)
        if output.finish is None:
            return None
        emitted_ids = output.token_ids if dispatched.leg.emits_first_token else ()
        if output.finish in FAILED_FINISHES or not emitted_ids:
            self._on_prefill_done(state, output, dispatched, now_s)
            return None
        cached_tokens, cache_use = (
            (None, None) if state.generated else self._reported_cache_use(state, dispatched)
        )
        is_last = output.finish is FinishReason.STOP
        is_last = is_last or self._is_complete(dispatched, len(emitted_ids))
        self._record_tokens(state, emitted_ids, dispatched, now_s)
        if is_last:
            self._finish_after_prefill(state, output, dispatched, now_s)
        else:
            self._on_prefill_done(state, output, dispatched, now_s)
        finish, stop_reason = (output.finish, output.stop_reason) if is_last else (None, None)
        detail = output.engine_payload
        return Delivery(
            state.request_id, emitted_ids, finish, stop_reason, cached_tokens, detail, cache_use
        )

    def _is_complete(self, dispatched: DispatchedLeg, tokens: int) -> bool:
        """Whether these tokens are all that a leg's request, or its engine's context, allows."""
        leg, view = dispatched.leg, self._fleet.get(dispatched.replica_id)
        max_len_tokens = float("inf") if view is None else view.facts.max_len_tokens
        return leg.max_tokens <= tokens or len(leg.prompt_token_ids) + tokens >= max_len_tokens

    def _finish_after_prefill(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> None:
        """The first token was also the last: no replica will pull its blocks."""
        self.release_blocks(output, dispatched.replica_id, now_s)
        assert output.finish is not None, "only a finished leg ends a request"
        self._leg_recorder.first_output(state, dispatched, output, now_s)
        self._leg_recorder.finish(state, dispatched, output, now_s)
        self._fleet_model.on_finished(state, dispatched.replica_id, now_s, decoded=False)
        self.end(state, Phase.FINISHED, now_s, reason=output.finish)

    def _on_prefill_done(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> None:
        """Have a decode replica pull the blocks of a finished prefill leg, or try again."""
        replica_id, kv_handle = dispatched.replica_id, output.kv_handle
        is_failed = output.finish in FAILED_FINISHES
        if kv_handle is None or is_failed:
            self.release_blocks(output, replica_id, now_s)
            # Such an engine can not hand this prompt off: one replica shall run both phases.
            state.local_only = LocalOnlyReason.HANDOFF_FAILED
            reason = RetryReason.ENGINE_ERROR if is_failed else RetryReason.HANDOFF_FAILED
            if dispatched.leg.emits_first_token and output.token_ids:
                self._leg_recorder.first_output(state, dispatched, output, now_s)
            cause = RetryCause(replica_id, reason, f"prefill ended in {output.finish}")
            self.on_leg_failed(state, cause, now_s)
            return
        self._leg_recorder.first_output(state, dispatched, output, now_s)
        self._leg_recorder.finish(state, dispatched, output, now_s)
        state.prefill_done_at_s = now_s
        state.handed_off_blocks = kv_handle.blocks
        state.lease = self._new_lease(output, replica_id, kv_handle, now_s)
        self._hand_off(state, replica_id, kv_handle, now_s)

    def _hand_off(
        self, state: RequestState, source_id: str, kv_handle: KvHandle, now_s: float
    ) -> None:
        """Choose the decode replica now, not when prefill began: loads have changed since."""
        query = self._fleet_model.placement_query(state, now_s)
        source = self._fleet.get(source_id)
        context = self._fleet_model.placement_context(now_s)
        target_id = None if source is None else self._placer.place_decode(query, source, context)
        if target_id is None:
            state.local_only = LocalOnlyReason.HANDOFF_FAILED
            self._end_lease(state, now_s)
            reason = "no replica could take the handoff"
            self._resume(state, Retry(RetryReason.HANDOFF_FAILED, reason), now_s)
            return
        state.routes[-1] = evolve(state.routes[-1], decode_replica_id=target_id)
        state.transition_to(Phase.TRANSFER)
        leg = state.new_leg(LegKind.DECODE, kv_handle=kv_handle, source_id=source_id)
        tokens = len(leg.prompt_token_ids)
        available_tokens = max(kv_handle.tokens, self._reusable_tokens(query, target_id, tokens))
        self.transfers.begin(
            state, leg.leg_id, target_id=target_id, kv_handle=kv_handle, now_s=now_s
        )
        self._set_deadline(state, now_s + transfer_timeout_s(state, self._limits))
        uncached_tokens = max(0, tokens - available_tokens)
        is_prefix_fetch = state.routes[-1].prefill_tokens is not None
        state.remaining_prefill_s = (
            self._fleet_model.predict_prefill_s(target_id, uncached_tokens, now_s)
            if is_prefix_fetch
            else 0.0
        )
        self.commands.append(
            self._leg_recorder.begin(state, leg, target_id, now_s, tokens=uncached_tokens)
        )

    # -------------------------------------------------------------- retries

    def on_leg_failed(self, state: RequestState, cause: RetryCause, now_s: float) -> None:
        """The running leg is over without a result; there is nothing left to abort."""
        self._count_failure(state, cause, now_s)
        self.transfers.end(state, now_s, failure=cause.detail)
        self._leg_recorder.failed(state, now_s)
        self._retry_elsewhere(state, cause, now_s)

    def on_failed_output(self, state: RequestState, output: LegOutput, now_s: float) -> None:
        """An engine ended a local or decode leg without a result."""
        reason = RetryReason.ENGINE_ERROR
        if state.phase is Phase.TRANSFER:
            state.local_only, reason = LocalOnlyReason.HANDOFF_FAILED, RetryReason.HANDOFF_FAILED
        detail = f"the engine ended it in {output.finish}"
        self.on_leg_failed(state, RetryCause(state.running_leg.replica_id, reason, detail), now_s)

    def _on_timeout(self, state: RequestState, now_s: float) -> None:
        """Abort the running leg, because its time is over, and go on elsewhere.

        Where its engine has not done a step for about as long, all its legs go, too.
        """
        replica_id, leg_id = state.running_leg.replica_id, state.leg_id
        if self._evacuate_stalled(replica_id, now_s) and state.leg_id != leg_id:
            return
        detail, reason = f"no progress in phase {state.phase}", RetryReason.TOKEN_TIMEOUT
        if state.phase is Phase.TRANSFER:
            state.local_only, reason = LocalOnlyReason.HANDOFF_FAILED, RetryReason.HANDOFF_FAILED
            self.transfers.end(state, now_s, failure=detail)
        elif state.phase is Phase.PREFILL:
            reason = RetryReason.FIRST_TOKEN_TIMEOUT
        cause = RetryCause(replica_id, reason, detail)
        self._count_failure(state, cause, now_s)
        self._abort(state, LegOutcome.TIMED_OUT, now_s)
        self._retry_elsewhere(state, cause, now_s)

    def migrate(self, state: RequestState, now_s: float) -> None:
        """Take a stream off its replica, which drains, and go on elsewhere; nothing has failed."""
        replica_id = self._abort(state, LegOutcome.MIGRATED, now_s)
        self._resume(state, Retry(RetryReason.DRAINING, f"{replica_id}: it drains"), now_s)

    def requests_on(self, replica_id: str) -> list[RequestState]:
        """Requests that run there, those with tokens first, else the oldest; probes are none."""
        running, _ = self._legs.legs_on(replica_id)
        states = (self.requests.get(dispatched.leg.request_id) for dispatched in running)
        return sorted(filter(None, states), key=lambda state: not state.generated)

    def _evacuate(self, cause: RetryCause, now_s: float) -> None:
        """Take everything off a replica that can go on elsewhere; streams first, they pause.

        All at once: each pauses anyway, and waits better in an engine that computes than here.
        """
        for state in self.requests_on(cause.replica_id):
            if is_unresumable(state):
                continue  # it would end; where it is it may go on
            self.transfers.end(state, now_s)
            self._abort(state, LegOutcome.TIMED_OUT, now_s)
            self._retry_elsewhere(state, cause, now_s)

    def evacuate_unresponsive(self, replica_id: str, now_s: float) -> None:
        """A replica has sent nothing for longer than its heartbeat timeout."""
        unresponsive_s = self.health.unresponsive_s(replica_id, now_s)
        reason = f"watchdog: nothing was heard of it for {unresponsive_s:.1f} s"
        self._evacuate(RetryCause(replica_id, RetryReason.UNRESPONSIVE, reason), now_s)

    def _evacuate_stalled(self, replica_id: str, now_s: float) -> bool:
        """Leave a replica whose engine hangs, if there is another; whether that was done."""
        stall_s = self._limits.stall_timeout_s
        if not self.health.is_stalled(replica_id, now_s, for_s=_STALL_FRACTION * stall_s):
            return False
        reason = f"its engine did no step for {stall_s:g} s"
        self.health.trip(replica_id, now_s, reason, with_pause=True)
        if not self.health.is_outlier(replica_id, now_s):
            return False
        cause = RetryCause(replica_id, RetryReason.ENGINE_STALLED, f"watchdog: {reason}")
        self._evacuate(cause, now_s)
        return True

    def _hedge(self, state: RequestState, now_s: float) -> None:
        """Its first token is late: begin again where there is nothing to do, if that is better.

        Once for each request; otherwise it waits on until its deadline.
        """
        state.was_hedged = True
        slow_id, waited_s = state.running_leg.replica_id, now_s - state.running_leg.started_at_s
        query = self._fleet_model.placement_query(state, now_s)
        query = evolve(query, avoid=query.avoid | {slow_id})
        alternative = self._placer.place(query, self._fleet_model.placement_context(now_s))
        options = self._limits.recovery.hedging
        if (
            isinstance(alternative, NoRoute)
            or not is_better_alternative(
                alternative, avoid=query.avoid, waited_s=waited_s, options=options
            )
            or not self.retries.spend(state, now_s)
        ):
            self._set_deadline(state, state.first_token_due_at_s)
            return
        reason = f"hedge: no first token in {waited_s:.1f} s, another replica has nothing to do"
        self.health.on_slow_leg(slow_id, state.running_leg.leg.leg_id, now_s, reason)
        self._abort(state, LegOutcome.TIMED_OUT, now_s)
        self._retry_elsewhere(state, RetryCause(slow_id, RetryReason.HEDGED, reason), now_s)

    def _retry_elsewhere(self, state: RequestState, cause: RetryCause, now_s: float) -> None:
        """Go on without a replica, or give the request up."""
        self._end_lease(state, now_s)
        state.failures += is_failure(state, cause)
        state.avoid |= {cause.replica_id}
        match self.retries.decide(state, cause, now_s):
            case Retry() as retry:
                self._resume(state, retry, now_s)
            case Fail(error):
                self.fail(state, error, now_s)

    def _resume(self, state: RequestState, retry: Retry, now_s: float) -> None:
        """Place again; delivered tokens become part of the prompt."""
        if retry.is_free:
            state.free_retry_at_tokens = len(state.generated)
        self.retries.on_retry(retry)
        state.resumes += 1
        state.resume_reasons.append(retry.detail)
        state.transition_to(Phase.RESUME)
        self.place(state, now_s, delay_if_tried=True)

    def _count_failure(self, state: RequestState, cause: RetryCause, now_s: float) -> None:
        """Have the replica's circuit count a failure, unless the request itself is suspect."""
        if is_replica_at_fault(state, cause):
            leg_id = state.running_leg.leg.leg_id
            self.health.on_leg_failed(cause.replica_id, leg_id, now_s, cause.detail)

    def _abort(self, state: RequestState, outcome: LegOutcome, now_s: float) -> str:
        """Begin to close the running leg. Returns its replica."""
        confirm_by_s = now_s + self._limits.abort_s
        command = self._leg_recorder.abort(state, outcome, now_s, confirm_by_s=confirm_by_s)
        self.commands.append(command)
        return command.replica_id

    # -------------------------------------------------------------- leases

    def _new_lease(
        self, output: LegOutput, replica_id: str, kv_handle: KvHandle, now_s: float
    ) -> Lease:
        """The lease that comes with the KV handle of a finished leg."""
        return Lease(
            leg_id=output.leg_id,
            request_id=output.leg_id.rpartition(ATTEMPT_SEPARATOR)[0],
            replica_id=replica_id,
            kv_handle=kv_handle,
            granted_at_s=now_s,
            expires_at_s=now_s + self._limits.lease_s,
        )

    def release_blocks(self, output: LegOutput, replica_id: str, now_s: float) -> None:
        """Free the blocks that a leg's replica keeps, if any, and that no other will pull."""
        if (kv_handle := output.kv_handle) is not None:
            self.release_lease(self._new_lease(output, replica_id, kv_handle, now_s), now_s)

    def _end_lease(self, state: RequestState, now_s: float) -> None:
        """End the request's lease, if it has one, before its blocks were pulled."""
        if state.lease is not None:
            self.release_lease(state.lease, now_s)
            state.lease = None

    def release_lease(self, lease: Lease, now_s: float) -> None:
        """Free the blocks now; where no replica can, the lease expires by itself."""
        if (command := release_command(lease, self._fleet.view(now_s))) is not None:
            self.commands.append(command)

    # -------------------------------------------------------------- time

    def on_deadline(self, state: RequestState, now_s: float) -> None:
        """Act on the deadline that has just passed."""
        if now_s >= state.total_deadline_at_s:
            if state.leg_id is not None:
                self._abort(state, LegOutcome.TIMED_OUT, now_s)
            reason = f"not finished {self._limits.total_timeout_s:g} s after it arrived"
            self.fail(state, DeadlineExceeded(state.request_id, reason), now_s)
        elif state.phase is Phase.QUEUED:
            self._on_queue_timeout(state, now_s)
        elif state.phase is Phase.PREFILL and now_s < state.first_token_due_at_s:
            self._hedge(state, now_s)
        elif now_s < (deadline_at_s := self._phase_deadline_at_s(state, now_s)):
            self._set_deadline(state, deadline_at_s)
        else:
            assert state.phase in RUNNING_PHASES, f"no deadline is armed in phase {state.phase}"
            self._on_timeout(state, now_s)

    def _phase_deadline_at_s(self, state: RequestState, now_s: float) -> float:
        """When a phase must be over whose deadline has passed; `now_s` when it must be already.

        A stream has until `stall_s` after its last token. A decode leg that waits for a place or
        for its turn to pull does not move blocks yet: its time counts from when its replica last
        had a queue. With `transfer_s` of 2 s and a turn that comes 1.9 s after the handoff, it has
        until 3.9 s; and `remaining_prefill_s` more where only a prefix is fetched. Its blocks are
        kept all the while, and to compute them again elsewhere would cost more than to wait; only
        an engine that does no steps is not waited for.
        """
        if state.phase is Phase.DECODE and state.last_token_at_s is not None:
            return state.last_token_at_s + self._limits.stall_timeout_s
        dispatched = None if state.leg_id is None else self._legs.get_running(state.leg_id)
        if state.phase is not Phase.TRANSFER or dispatched is None:
            return now_s
        if self.health.is_stalled(dispatched.replica_id, now_s, for_s=self._limits.stall_timeout_s):
            return now_s
        queued_at_s = self._fleet.last_queued_at_s(dispatched.replica_id, now_s)
        if queued_at_s is None and not state.remaining_prefill_s:
            return now_s
        return state.transfer_due_at_s(queued_at_s, transfer_timeout_s(state, self._limits))

    def _set_deadline(self, state: RequestState, at_s: float) -> None:
        """Set the deadline of the request's phase; that of the whole request may be sooner."""
        self.deadlines.arm(state.request_id, min(at_s, state.total_deadline_at_s))

    # -------------------------------------------------------------- endings

    def cancel(self, state: RequestState, now_s: float) -> None:
        """End a request whose client went away or has all it wants: `FleetModel.stream_closed`."""
        if state.phase is Phase.DECODE or (state.phase is Phase.TRANSFER and state.generated):
            self._fleet_model.stream_closed(state, state.running_leg.replica_id, now_s)
        if state.leg_id is not None:
            self._abort(state, LegOutcome.CANCELLED, now_s)
        self.end(state, Phase.CANCELLED, now_s, reason="cancelled")

    def fail_rejected(
        self, state: RequestState, replica_id: str, reason: str, now_s: float, *, is_invalid: bool
    ) -> None:
        """End a request whose leg an engine has refused; no replica is to blame.

        With `is_invalid` the request is wrong, and its client gets that error; unless an
        engine has given tokens of it, which finds nothing wrong with it.
        """
        outcome = LegOutcome.REJECTED if is_invalid else LegOutcome.FAILED
        self._leg_recorder.failed(state, now_s, outcome)
        reason = reason or "no reason given"
        if is_invalid and not state.generated:
            error: BatonError = RequestInvalid(state.request_id, f"the engine refuses it: {reason}")
        else:
            error = EngineFailed(state.request_id, f"replica {replica_id} refused it: {reason}")
        self.fail(state, error, now_s)

    def fail(self, state: RequestState, error: BatonError, now_s: float) -> None:
        """End a request in FAILED."""
        self.end(state, Phase.FAILED, now_s, reason=str(error), error=error)

    def end(
        self,
        state: RequestState,
        outcome: Phase,
        now_s: float,
        *,
        reason: str,
        error: BatonError | None = None,
    ) -> None:
        """Take the last edge, tell the client of an error, and store the record."""
        self._end_lease(state, now_s)
        self.transfers.end(state, now_s)
        state.transition_to(outcome)
        del self.requests[state.request_id]
        self.shared_prompts.on_ended(state.request)
        self.pending.remove(state, now_s)
        if state.charge is not None:  # by actual use, in place of the expected use
            used_tokens = 0 if state.placed_at_s is None else state.token_count
            duration_s = now_s - state.accepted_at_s
            self._tenant_limits.settle(state.charge, used_tokens=used_tokens, duration_s=duration_s)
        self.deadlines.disarm(state.request_id)
        if error is not None:
            self.commands.append(FailRequest(request_id=state.request_id, error=error))
        record = self.accounts.on_request_ended(state, outcome, now_s, reason=reason, error=error)
        self.commands.append(StoreRequestRecord(record=record))

    # -------------------------------------------------------------- all requests

    def reconfigure(self, *, limits: CoordinatorLimits | None, placer: Placer | None) -> None:
        """Go on by others; deadlines that are armed stay as they are."""
        self._limits = limits or self._limits
        self._placer = placer or self._placer
        self.pending.reconfigure(self._limits)
        self.retries.reconfigure(self._limits)
        self.health.reconfigure(self._limits.recovery)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        running_ids = frozenset(
            request.leg_id for request in self.requests.values() if request.leg_id is not None
        )
        self.accounts.check_integrity(self.requests, running_ids)
        self._fleet_model.pending_prefills.check_integrity(running_ids)
        self.pending.check_integrity()
        self.retries.check_integrity()
        self.shared_prompts.check_integrity(state.request for state in self.requests.values())
        self._tenant_limits.check_integrity(
            Counter(e.tenant.name for e in self.requests.values() if e.charge is not None)
        )
        for request_id, state in self.requests.items():
            queued = state.phase is Phase.QUEUED
            assert queued == (request_id in self.pending), f"{request_id}: queue and phase differ"
            assert request_id in self.deadlines, f"{request_id} waits without a deadline"
            state.check_integrity()
            if state.leg_id is not None:
                dispatched = self._legs.get_running(state.leg_id)
                assert dispatched is not None, f"{request_id}: leg {state.leg_id} does not run"
                assert dispatched.replica_id in self._fleet, f"{request_id} runs on a lost replica"
        assert self.requests.keys() >= set(self.pending.ids()), "the queue holds ended requests"
        assert len(self.deadlines) == len(self.requests), "there are deadlines of ended requests"
