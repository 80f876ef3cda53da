"""What replicas say of legs: outputs, failures, and aborts that are done.

Each is for a leg of a request, for one of a probe, or for one that is closing or was forgotten.
"""

from __future__ import annotations

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.health import ReplicaHealth
from baton.control.fleet.leg_table import ClosingLeg, LegTable
from baton.control.probing.prober import PairProber
from baton.control.request.lifecycle import FAILED_FINISHES, REJECTED_FINISHES, RequestLifecycle
from baton.control.state.request_state import request_id_of
from baton.domain.commands import Deliver, Delivery
from baton.domain.events import LegFailed, StepCompleted
from baton.domain.handoff import LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason, LocalOnlyReason, Phase
from baton.domain.retry_reasons import RetryReason

NON_LINK_FAILURES = frozenset({LegFailure.OVERLOADED, LegFailure.UNREACHABLE, LegFailure.DRAINING})
"""Failures of a decode leg that say nothing of the way its blocks would have taken."""

_REJECTIONS = frozenset({LegFailure.REJECTED, LegFailure.INVALID})

_RETRY_REASONS = {
    LegFailure.KV_LOAD_FAILED: RetryReason.HANDOFF_FAILED,
    LegFailure.OVERLOADED: RetryReason.OVERLOADED,
    LegFailure.UNREACHABLE: RetryReason.REPLICA_LOST,
    LegFailure.DRAINING: RetryReason.DRAINING,
}
"""What others than the engine's own failures mean."""


class LegEventHandler:
    """Takes them to whom they are for."""

    def __init__(
        self,
        *,
        lifecycle: RequestLifecycle,
        legs: LegTable,
        fleet: FleetTable,
        prober: PairProber,
        health: ReplicaHealth,
    ) -> None:
        self.ignored_count = 0
        """Those that belong to nothing known; late frames mostly."""
        self._lifecycle = lifecycle
        self._legs = legs
        self._fleet = fleet
        self._prober = prober
        self._health = health

    def on_step(self, event: StepCompleted, now_s: float) -> None:
        """An engine step produced something for legs."""
        deliveries: list[Delivery] = []
        lifecycle, replica_id, get_leg = self._lifecycle, event.replica_id, self._legs.get_running
        get_request = lifecycle.requests.get
        for output in event.outputs:
            dispatched = get_leg(output.leg_id)
            if dispatched is None or dispatched.replica_id != replica_id:
                self._on_late_output(output, replica_id, now_s)
                continue
            leg = dispatched.leg
            state = get_request(leg.request_id)
            if state is None:  # what runs and is of no request is a probe's
                lifecycle.commands.extend(self._prober.on_output(output, now_s))
            elif output.finish in REJECTED_FINISHES:
                why, is_invalid = (
                    str(output.stop_reason or ""),
                    output.finish is FinishReason.INVALID,
                )
                lifecycle.fail_rejected(state, replica_id, why, now_s, is_invalid=is_invalid)
            elif leg.kind is LegKind.PREFILL:
                delivery = lifecycle.on_prefill_output(state, output, dispatched, now_s)
                if delivery is not None:
                    deliveries.append(delivery)
            elif output.finish in FAILED_FINISHES:
                why, retry_reason = (
                    f"the engine ended it in {output.finish}",
                    RetryReason.ENGINE_ERROR,
                )
                if state.phase is Phase.TRANSFER:
                    state.local_only, retry_reason = (
                        LocalOnlyReason.HANDOFF_FAILED,
                        RetryReason.HANDOFF_FAILED,
                    )
                lifecycle.retries.leg_failed(
                    state, replica_id, why, now_s, retry_reason=retry_reason
                )
            else:
                deliveries.append(lifecycle.on_decode_output(state, output, dispatched, now_s))
        if deliveries:
            # First, so that a client has its last token before its request is recorded as ended.
            lifecycle.commands.insert(0, Deliver(deliveries=tuple(deliveries)))

    def _on_late_output(self, output: LegOutput, replica_id: str, now_s: float) -> None:
        """An output of a leg that is closing, or was forgotten; nobody waits for its blocks."""
        if output.kv_handle is not None:
            request_id = request_id_of(output.leg_id)
            lease = self._lifecycle.new_lease(
                request_id, output.leg_id, replica_id, output.kv_handle, now_s
            )
            self._lifecycle.release_lease(lease, now_s)
        elif output.finish in FAILED_FINISHES or output.finish in REJECTED_FINISHES:
            self._on_late_failure(output.leg_id, now_s)
        elif self._legs.get_closing(output.leg_id) is None:
            self.ignored_count += 1

    def on_failed(self, event: LegFailed, now_s: float) -> None:
        """A leg ended without its engine finishing it."""
        if not event.was_sent:
            self._fleet.on_leg_unsent(event.replica_id, event.leg_id)
        dispatched = self._legs.get_running(event.leg_id)
        if dispatched is None or dispatched.replica_id != event.replica_id:
            self._on_late_failure(event.leg_id, now_s)
            return
        if self._prober.owns(event.leg_id):
            self._lifecycle.commands.extend(self._prober.on_leg_failed(event, now_s))
            return
        state = self._lifecycle.requests[dispatched.leg.request_id]
        if event.failure in _REJECTIONS:
            is_invalid = event.failure is LegFailure.INVALID
            self._lifecycle.fail_rejected(
                state, event.replica_id, event.why, now_s, is_invalid=is_invalid
            )
            return
        if event.failure is LegFailure.KV_LOAD_FAILED:
            state.local_only = LocalOnlyReason.HANDOFF_FAILED
        if event.failure in NON_LINK_FAILURES:
            self._lifecycle.transfers.end(state, now_s)
        why = f"{event.failure} {event.why}".strip()
        retry_reason = _RETRY_REASONS.get(event.failure, RetryReason.ENGINE_ERROR)
        self._lifecycle.retries.leg_failed(
            state, event.replica_id, why, now_s, retry_reason=retry_reason
        )

    def _on_late_failure(self, leg_id: str, now_s: float) -> None:
        # Unlike a confirmed abort, a failure says nothing about the blocks the leg was to pull.
        if (closing := self._legs.confirm_closed(leg_id)) is None:
            self.ignored_count += 1
        else:
            self.release_closing_lease(closing, now_s)

    def on_aborted(self, leg_ids: tuple[str, ...]) -> None:
        """Replicas confirm that these legs are gone."""
        # A confirmed abort of a decode leg has ended its lease too: engines see to that.
        for leg_id in leg_ids:
            if self._legs.confirm_closed(leg_id) is None:
                self.ignored_count += 1

    def on_abort_timeout(self, closing: ClosingLeg, now_s: float) -> None:
        """A replica did not say in time that a leg is gone: that counts against it."""
        dispatched = closing.dispatched
        why = "an abort was not confirmed"
        self._health.on_leg_failed(dispatched.replica_id, dispatched.leg.leg_id, now_s, why)
        self.release_closing_lease(closing, now_s)

    def release_closing_lease(self, closing: ClosingLeg, now_s: float) -> None:
        """A leg is gone that was closing: its lease, if it had one, ends with it."""
        if closing.lease is not None:
            self._lifecycle.release_lease(closing.lease, now_s)
