"""What can happen to one request: placed, handed off, streamed, ended.

Each method takes an `RequestState` along one edge of the transition table, or several, and appends
the commands that follow. Which request an event is about is the coordinator's business, and what is
done when a leg fails that of `recovery`.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from baton.control.accounting.accounts import Accounts
from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.health import ReplicaHealth
from baton.control.fleet.leg_table import DispatchedLeg, LegTable
from baton.control.queue.admission_controller import AdmissionController
from baton.control.queue.pending import PendingRequests
from baton.control.queue.tenant_limits import TenantLimits
from baton.control.request.dispatch import Dispatcher
from baton.control.request.leases import new_lease, release_command
from baton.control.request.leg_recorder import LegRecorder
from baton.control.request.retries import RequestRetries
from baton.control.request.transfers import InFlightTransfers
from baton.control.state.deadlines import Deadlines
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.prompt_use import SharedPrompts
from baton.control.state.request_state import RUNNING_PHASES, RequestState
from baton.domain.commands import Command, Delivery, FailRequest, StoreRequestRecord
from baton.domain.errors import BatonError, DeadlineExceeded, EngineFailed, RequestInvalid
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

FAILED_FINISHES = frozenset({FinishReason.ERROR, FinishReason.ABORT})
REJECTED_FINISHES = frozenset({FinishReason.INVALID, FinishReason.REJECTED})
"""Ends of legs that no engine has failed at: another one would end them the same."""

_TRANSFER_TIMEOUT_FACTOR = 2.0
"""So many times what a transfer is predicted to take."""


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
        self.limits = limits
        self.requests: dict[str, RequestState] = {}
        self.deadlines = Deadlines()
        self.commands: list[Command] = []
        self.placer = placer
        self._fleet = fleet
        self._legs = legs
        self.transfers = InFlightTransfers(fleet, fleet_model.links)
        self._fleet_model = fleet_model
        self.accounts = Accounts(fleet, fleet_model)
        self.health = ReplicaHealth(limits.recovery, fleet)
        self.leg_recorder = LegRecorder(
            legs=legs, fleet_model=fleet_model, accounts=self.accounts, health=self.health
        )
        self.retries = RequestRetries(self, health=self.health, legs=legs, fleet_model=fleet_model)
        self.pending = PendingRequests(
            AdmissionController(
                fleet=fleet, fleet_model=fleet_model, first_token_timeout_s=limits.first_token_s
            )
        )
        self.dispatcher = Dispatcher(self, fleet=fleet, pending=self.pending)
        self.tenant_limits = tenant_limits
        self.shared_prompts = SharedPrompts()

    # -------------------------------------------------------------- placement

    def place(self, state: RequestState, now_s: float, *, delay_if_tried: bool = False) -> None:
        """Begin the first leg of a route, or wait when nobody can take the request.

        With `delay_if_tried`, a route over a replica that has just failed this request waits a
        moment first: a replica that refuses at once would otherwise use up every attempt at once.
        """
        query = self._fleet_model.placement_query(state, now_s)
        decision = self.placer.place(query, self._fleet_model.placement_context(now_s))
        if isinstance(decision, NoRoute):
            self.dispatcher.queue_for_replica(state, now_s, why=decision.reason)
        elif delay_if_tried and decision.route.decode_replica_id in state.avoid:
            self.dispatcher.queue_for_replica(state, now_s, why="every replica has just failed it")
            self.pending.unplaced_retry_at_s = (
                self.pending.unplaced_retry_at_s or now_s + self.limits.retry_s
            )
        else:
            admission = self.pending.admission.evaluate(state, query, decision, now_s)
            if (
                isinstance(admission, Enqueue)
                and admission.reason is AdmissionReason.TPOT_UNATTAINABLE
            ):
                decision, admission = self._try_prefill_replica(
                    state, query, (decision, admission), now_s
                )
            match admission:
                case Admit():
                    self._start_route(state, query, decision, now_s)
                case Enqueue():
                    self.dispatcher.queue_for_admission(state, admission, now_s)
                case Shed():
                    self.dispatcher.reject(state, admission, now_s)
                case _:
                    assert_never(admission)

    def _try_prefill_replica(
        self,
        state: RequestState,
        query: PlacementQuery,
        fallback: tuple[PlacementDecision, Enqueue],
        now_s: float,
    ) -> tuple[PlacementDecision, AdmissionDecision]:
        """Where decode will be too full for it, see whether it can stay where it is prefilled.

        Placement goes by the streams of now, and does not see those that are on their way.
        """
        context = self._fleet_model.placement_context(now_s)
        decision = self.placer.place(evolve(query, is_decode_saturated=True), context)
        if (
            isinstance(decision, NoRoute)
            or decision.route.reason is not RouteReason.DECODE_ON_PREFILL
        ):
            return fallback
        admission = self.pending.admission.evaluate(state, query, decision, now_s)
        return (decision, admission) if isinstance(admission, Admit) else fallback

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
        state.first_token_due_at_s = now_s + self.limits.first_token_s
        hedge_at_s = self.retries.hedge_at_s(state, decision)
        self.set_deadline(state, min(state.first_token_due_at_s, hedge_at_s))
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
            self.leg_recorder.begin(
                state, leg, replica_id=replica_id, tokens=uncached_tokens, now_s=now_s
            )
        )
        self._fleet_model.predict_cached(state, replica_id, prompt_tokens, now_s)

    def _emits_first_token(self, state: RequestState, decision: PlacementDecision) -> bool:
        """Whether the prefill leg of a route gives a client its token.

        Where a policy predicts, it says so; and what is expected to go on after it must be able to.
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
        """How many of so many leading tokens a replica need not compute."""
        view = self._fleet.get(replica_id)
        if view is None:
            return 0
        return usable_tokens(query.hits.of(replica_id), tokens, view.facts.block_size_tokens)

    # -------------------------------------------------------------- tokens and handoff

    def on_decode_output(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> Delivery:
        """Journal the tokens of a local or decode leg and pass them on."""
        _, token_ids, finish, stop_reason, _, cached_tokens, detail, _, cache_use = output
        if cached_tokens is not None:
            self.leg_recorder.record_cached(state, dispatched, cached_tokens, now_s)
            state.update_prompt_use(dispatched.leg, cached_tokens, cache_use)
            cached_tokens = cache_use = None
        if not state.generated:
            cached_tokens, cache_use = self._reported_cache_use(state, dispatched)
        if token_ids:
            self._record_tokens(state, token_ids, dispatched, now_s)
            if state.phase is not Phase.DECODE:
                self._begin_stream(state, output, dispatched, now_s)
        if finish is not None:
            self.leg_recorder.finish(state, dispatched, output, now_s)
            self._fleet_model.on_finished(state, dispatched.replica_id, now_s)
            self.end(state, Phase.FINISHED, now_s, reason=finish)
        request_id = state.request.request_id
        return Delivery(
            request_id, token_ids, finish, stop_reason, cached_tokens, detail, cache_use
        )

    def _reported_cache_use(
        self, state: RequestState, dispatched: DispatchedLeg
    ) -> tuple[int | None, CacheUse | None]:
        """What to tell a client of its prompt with its first tokens."""
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
    ) -> None:
        """Keep tokens that go on to the client."""
        if state.last_token_at_s is None:
            state.first_token_at_s = now_s
            self._fleet_model.on_first_token(state, dispatched.replica_id, now_s)
        elif (gap_s := now_s - state.last_token_at_s) > state.itl_threshold_s:
            state.record_itl(gap_s)
        state.last_token_at_s = now_s
        state.generated.extend(token_ids)

    def _begin_stream(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> None:
        """A leg gave its first tokens."""
        state.transition_to(Phase.DECODE)
        self.leg_recorder.first_output(state, dispatched, output, now_s)
        self._fleet_model.pending_prefills.remove(output.leg_id, now_s)
        # The pull is over: the engines have ended the lease between themselves.
        state.lease = None
        self.transfers.end(state, now_s, is_complete=True)
        # Tokens to come do not move it; whether any have come is looked at when it has passed.
        self.set_deadline(state, now_s + self.limits.stall_s)

    def on_prefill_output(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> Delivery | None:
        """Go from a finished prefill leg to the decode leg.

        A leg that gives its token gives it to the client now, and decode goes on after it, as after
        a resume. The token of another is not used: the decode replica computes the last prompt
        position again and samples the first one, so that sampling state lives in one engine only.
        """
        if output.cached_tokens is not None:
            self.leg_recorder.record_cached(state, dispatched, output.cached_tokens, now_s)
            if output.finish not in FAILED_FINISHES:
                state.update_prompt_use(dispatched.leg, output.cached_tokens, output.cache_use)
        if output.finish is None:
            return None
        emitted_ids = output.token_ids if dispatched.leg.emits_first_token else ()
        if output.finish in FAILED_FINISHES or not emitted_ids:
            self._on_prefill_done(state, output, dispatched, now_s)
            return None
        request_id = state.request.request_id
        cached_tokens, cache_use = (
            (None, None) if state.generated else self._reported_cache_use(state, dispatched)
        )
        is_last = output.finish is FinishReason.STOP or self._is_complete(
            dispatched, len(emitted_ids)
        )
        self._record_tokens(state, emitted_ids, dispatched, now_s)
        if is_last:
            self._finish_after_prefill(state, output, dispatched, now_s)
        else:
            self._on_prefill_done(state, output, dispatched, now_s)
        finish = output.finish if is_last else None
        stop_reason = output.stop_reason if is_last else None
        detail = output.engine_payload
        return Delivery(
            request_id, emitted_ids, finish, stop_reason, cached_tokens, detail, cache_use
        )

    def _is_complete(self, dispatched: DispatchedLeg, tokens: int) -> bool:
        """Whether so many tokens are all that a leg's request, or its engine's context, allows."""
        leg, view = dispatched.leg, self._fleet.get(dispatched.replica_id)
        max_len_tokens = float("inf") if view is None else view.facts.max_len_tokens
        return leg.max_tokens <= tokens or len(leg.prompt_token_ids) + tokens >= max_len_tokens

    def _finish_after_prefill(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> None:
        """The first token was also the last: nobody will pull its blocks."""
        if (kv_handle := output.kv_handle) is not None:
            lease = self.new_lease(
                state.request_id, output.leg_id, dispatched.replica_id, kv_handle, now_s
            )
            self.release_lease(lease, now_s)
        assert output.finish is not None, "only a finished leg ends a request"
        self.leg_recorder.first_output(state, dispatched, output, now_s)
        self.leg_recorder.finish(state, dispatched, output, now_s)
        self._fleet_model.on_finished(state, dispatched.replica_id, now_s, decoded=False)
        self.end(state, Phase.FINISHED, now_s, reason=output.finish)

    def _on_prefill_done(
        self, state: RequestState, output: LegOutput, dispatched: DispatchedLeg, now_s: float
    ) -> None:
        """Have the blocks of a finished prefill leg pulled by whoever will decode."""
        replica_id = dispatched.replica_id
        if output.kv_handle is None or output.finish in FAILED_FINISHES:
            if (kv_handle := output.kv_handle) is not None:  # it keeps blocks all the same
                lease = self.new_lease(
                    state.request_id, output.leg_id, replica_id, kv_handle, now_s
                )
                self.release_lease(lease, now_s)
            # Such an engine can not hand this prompt off: one replica shall run both phases.
            state.local_only = LocalOnlyReason.HANDOFF_FAILED
            why = f"prefill ended in {output.finish}"
            retry_reason = (
                RetryReason.ENGINE_ERROR
                if output.finish in FAILED_FINISHES
                else RetryReason.HANDOFF_FAILED
            )
            if dispatched.leg.emits_first_token and output.token_ids:
                self.leg_recorder.first_output(state, dispatched, output, now_s)
            self.retries.leg_failed(state, replica_id, why, now_s, retry_reason=retry_reason)
            return
        self.leg_recorder.first_output(state, dispatched, output, now_s)
        self.leg_recorder.finish(state, dispatched, output, now_s)
        state.prefill_done_at_s = now_s
        state.handed_off_blocks = output.kv_handle.blocks
        state.lease = self.new_lease(
            state.request_id, output.leg_id, replica_id, output.kv_handle, now_s
        )
        self._hand_off(state, replica_id, output.kv_handle, now_s)

    def _hand_off(
        self, state: RequestState, source_id: str, kv_handle: KvHandle, now_s: float
    ) -> None:
        """Choose the decode replica now, not when prefill began: loads have changed since."""
        query = self._fleet_model.placement_query(state, now_s)
        source = self._fleet.get(source_id)
        context = self._fleet_model.placement_context(now_s)
        target_id = None if source is None else self.placer.place_decode(query, source, context)
        if target_id is None:
            state.local_only = LocalOnlyReason.HANDOFF_FAILED
            self.end_lease(state, now_s)
            why = "no replica could take the handoff"
            self.retries.resume(state, why, now_s, retry_reason=RetryReason.HANDOFF_FAILED)
            return
        state.routes[-1] = evolve(state.routes[-1], decode_replica_id=target_id)
        state.transition_to(Phase.TRANSFER)
        leg = state.new_leg(LegKind.DECODE, kv_handle=kv_handle, source_id=source_id)
        tokens = len(leg.prompt_token_ids)
        available_tokens = max(kv_handle.tokens, self._reusable_tokens(query, target_id, tokens))
        self.transfers.begin(
            state, leg.leg_id, target_id=target_id, kv_handle=kv_handle, now_s=now_s
        )
        self.set_deadline(state, now_s + self._transfer_timeout_s(state))
        uncached_tokens = max(0, tokens - available_tokens)
        is_prefix_fetch = state.routes[-1].prefill_tokens is not None
        state.remaining_prefill_s = (
            self._fleet_model.predict_prefill_s(target_id, uncached_tokens, now_s)
            if is_prefix_fetch
            else 0.0
        )
        self.commands.append(
            self.leg_recorder.begin(
                state, leg, replica_id=target_id, tokens=uncached_tokens, now_s=now_s
            )
        )
        self._fleet_model.predict_cached(state, target_id, tokens, now_s)

    # -------------------------------------------------------------- gone clients

    def cancel(self, state: RequestState, now_s: float) -> None:
        """End a request whose client went away or has all it wants: `FleetModel.stream_closed`."""
        if state.phase is Phase.DECODE or (state.phase is Phase.TRANSFER and state.generated):
            self._fleet_model.stream_closed(state, state.running_leg.replica_id, now_s)
        if state.leg_id is not None:
            self.retries.abort(state, LegOutcome.CANCELLED, now_s)
        self.end(state, Phase.CANCELLED, now_s, reason="cancelled")

    # -------------------------------------------------------------- leases

    def new_lease(
        self, request_id: str, leg_id: str, replica_id: str, kv_handle: KvHandle, now_s: float
    ) -> Lease:
        """The lease that comes with a ticket."""
        duration_s = self.limits.lease_s
        return new_lease(
            request_id,
            leg_id,
            replica_id=replica_id,
            kv_handle=kv_handle,
            now_s=now_s,
            duration_s=duration_s,
        )

    def end_lease(self, state: RequestState, now_s: float) -> None:
        """End the entry's lease, if it has one, before its blocks were pulled."""
        if state.lease is not None:
            self.release_lease(state.lease, now_s)
            state.lease = None

    def release_lease(self, lease: Lease, now_s: float) -> None:
        """Have the blocks freed now; where nobody can, the lease runs out by itself."""
        if (command := release_command(lease, self._fleet.view(now_s))) is not None:
            self.commands.append(command)

    def lease_counts(self) -> dict[str, int]:
        """Leases that are held, by the replica that keeps the blocks."""
        return dict(Counter(e.lease.replica_id for e in self.requests.values() if e.lease))

    def transfer_count(self) -> int:
        """Transfers that are under way; one outlives its source until its leg ends."""
        return sum(state.transfer is not None for state in self.requests.values())

    # -------------------------------------------------------------- time and endings

    def on_deadline(self, state: RequestState, now_s: float) -> None:
        """Act on the deadline that has just passed."""
        if now_s >= state.total_deadline_at_s:
            if state.leg_id is not None:
                self.retries.abort(state, LegOutcome.TIMED_OUT, now_s)
            why = f"not finished {self.limits.total_s:g} s after it arrived"
            self.fail(state, DeadlineExceeded(state.request_id, why), now_s)
        elif state.phase is Phase.QUEUED:
            self.dispatcher.on_queue_timeout(state, now_s)
        elif state.phase is Phase.PREFILL and now_s < state.first_token_due_at_s:
            self.retries.hedge(state, now_s)
        elif now_s < (deadline_at_s := self._phase_deadline_at_s(state, now_s)):
            self.set_deadline(state, deadline_at_s)
        else:
            assert state.phase in RUNNING_PHASES, f"no deadline is armed in phase {state.phase}"
            self.retries.timed_out(state, now_s)

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
            return state.last_token_at_s + self.limits.stall_s
        dispatched = None if state.leg_id is None else self._legs.get_running(state.leg_id)
        if state.phase is not Phase.TRANSFER or dispatched is None:
            return now_s
        if self.health.is_stalled(dispatched.replica_id, now_s, for_s=self.limits.stall_s):
            return now_s
        queued_at_s = self._fleet.last_queued_at_s(dispatched.replica_id, now_s)
        if queued_at_s is None and not state.remaining_prefill_s:
            return now_s
        return state.transfer_due_at_s(queued_at_s, self._transfer_timeout_s(state))

    def _transfer_timeout_s(self, state: RequestState) -> float:
        """How long its blocks may be on their way: many bytes over a slow link are not given up.

        Of 32,000 tokens of a 405B model 16.9 GB are moved, for 1.7 s at 10 GB/s; what is predicted
        for them may be half of what it takes, and is no reason to wait longer than for a prefill.
        """
        predicted_s = 0.0 if state.transfer is None else state.transfer.predicted_s
        timeout_s = min(_TRANSFER_TIMEOUT_FACTOR * predicted_s, self.limits.first_token_s)
        return max(self.limits.transfer_s, timeout_s)

    def set_deadline(self, state: RequestState, at_s: float) -> None:
        """Set the deadline of the phase that the entry is in; its own comes first, if sooner."""
        self.deadlines.arm(state.request.request_id, min(at_s, state.total_deadline_at_s))

    def fail_rejected(
        self, state: RequestState, replica_id: str, why: str, now_s: float, *, is_invalid: bool
    ) -> None:
        """End a request whose leg an engine has refused: once, and to nobody's blame.

        With `is_invalid` it is the request that is wrong, which its client is told; unless an
        engine has given tokens of it, which finds nothing wrong with it.
        """
        self.leg_recorder.failed(
            state, now_s, LegOutcome.REJECTED if is_invalid else LegOutcome.FAILED
        )
        why = why or "no reason given"
        if is_invalid and not state.generated:
            error: BatonError = RequestInvalid(state.request_id, f"the engine refuses it: {why}")
        else:
            error = EngineFailed(state.request_id, f"replica {replica_id} refused it: {why}")
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
        """Take the last edge, tell the client if it went wrong, and keep the story."""
        self.end_lease(state, now_s)
        self.transfers.end(state, now_s)
        state.transition_to(outcome)
        del self.requests[state.request_id]
        self.shared_prompts.on_ended(state.request)
        self.pending.remove(state, now_s)
        self._settle_charge(state, now_s)
        self.deadlines.disarm(state.request_id)
        if error is not None:
            self.commands.append(FailRequest(request_id=state.request_id, error=error))
        record = self.accounts.on_request_ended(state, outcome, now_s, reason=reason, error=error)
        self.commands.append(StoreRequestRecord(record=record))

    def _settle_charge(self, state: RequestState, now_s: float) -> None:
        """Charge its tenant for what it used, rather than for what was expected."""
        if state.charge is not None:
            used_tokens = 0
            if state.placed_at_s is not None:
                used_tokens = len(state.request.prompt_token_ids) + len(state.generated)
            self.tenant_limits.settle(
                state.charge, used_tokens=used_tokens, duration_s=now_s - state.accepted_at_s
            )

    def reconfigure(self, *, limits: CoordinatorLimits | None, placer: Placer | None) -> None:
        """Go on by others; deadlines that are armed stay as they are."""
        self.limits = limits or self.limits
        self.placer = placer or self.placer
        self.pending.admission.first_token_timeout_s = self.limits.first_token_s
        self.dispatcher.cold_start_wait.max_wait_s = self.limits.cold_start_wait_s
        self.retries.budget.reconfigure(self.limits.recovery.retries)
        self.health.reconfigure(self.limits.recovery)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        running_ids = frozenset(
            request.leg_id for request in self.requests.values() if request.leg_id is not None
        )
        self.accounts.check_integrity(self.requests, running_ids)
        self._fleet_model.pending_prefills.check_integrity(running_ids)
        self.pending.check_integrity()
        self.retries.budget.check_integrity()
        self.shared_prompts.check_integrity(state.request for state in self.requests.values())
        self.tenant_limits.check_integrity(
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
