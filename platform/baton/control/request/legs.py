"""Legs and transfers of requests, recorded wherever they matter.

The request's state, the leg table, the fleet model, the accounts and the replica's health record
each leg, once when it begins and once when it ends. Each needs other facts, and the order matters,
hence plain calls. A transfer is the pull of a decode leg, under the lease of a prefill leg.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.control.accounting.accounts import Accounts
from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.health import ReplicaHealth
from baton.control.fleet.leg_table import DispatchedLeg, LegTable
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import KvTransfer, RequestState
from baton.domain.commands import AbortLegs, ReleaseLease, SubmitLeg
from baton.domain.fleet import FleetView
from baton.domain.handoff import KvHandle, Lease, Leg, LegKind, LegOutput
from baton.domain.leg_record import LegOutcome
from baton.domain.value import evolve
from baton.policy.links.estimates import LinkTable
from baton.policy.placement.port import choose_releaser

_TRANSFER_TIMEOUT_FACTOR = 2.0
"""Multiple of the predicted seconds of a transfer."""


class LegRecorder:
    """Begins legs and takes in how they go and end."""

    def __init__(
        self, *, legs: LegTable, fleet_model: FleetModel, accounts: Accounts, health: ReplicaHealth
    ) -> None:
        self._legs = legs
        self._fleet_model = fleet_model
        self._accounts = accounts
        self._health = health

    def begin(
        self, state: RequestState, leg: Leg, replica_id: str, now_s: float, *, tokens: int
    ) -> SubmitLeg:
        """Send a leg to a replica, which must compute `tokens` of its prompt."""
        leg = evolve(leg, uncached_tokens=tokens)
        state.on_leg_started(leg, replica_id, now_s)
        # First, for the table says of an adapter that is sent for that it is there.
        self._fleet_model.on_prefill_sent(leg, replica_id, tokens, now_s)
        self._legs.begin(leg, replica_id, tokens)
        self._health.on_leg_started(replica_id, leg.leg_id, now_s)
        self._accounts.on_leg_started(state, leg, replica_id)
        self._fleet_model.predict_cached(state, replica_id, len(leg.prompt_token_ids), now_s)
        return SubmitLeg(replica_id=replica_id, leg=leg)

    def record_cached(
        self, state: RequestState, dispatched: DispatchedLeg, tokens: int, now_s: float
    ) -> None:
        """Its engine has `tokens` of its prompt cached."""
        self._accounts.on_cached_tokens(dispatched.leg.leg_id, tokens)
        state.running_leg.cached_tokens = tokens
        if dispatched.leg.kind is not LegKind.DECODE:  # there, fetched blocks count as cached too
            self._fleet_model.on_cached_tokens(state, dispatched.replica_id, tokens, now_s)

    def first_output(
        self, state: RequestState, dispatched: DispatchedLeg, output: LegOutput, now_s: float
    ) -> None:
        """It gave its first output: its prompt is computed."""
        self._fleet_model.pending_prefills.remove(output.leg_id, now_s)
        running_leg = state.running_leg
        running_leg.first_output_at_s = now_s
        running_leg.note_times(output.times)
        self._health.on_first_output(dispatched.replica_id, output.leg_id, now_s)

    def finish(
        self, state: RequestState, dispatched: DispatchedLeg, output: LegOutput, now_s: float
    ) -> None:
        """It has done what it was for."""
        state.running_leg.note_times(output.times)
        self._legs.end(output.leg_id)
        self._on_ended(
            state, dispatched, LegOutcome.COMPLETED, now_s, has_output=output.kv_handle is not None
        )

    def failed(
        self, state: RequestState, now_s: float, outcome: LegOutcome = LegOutcome.FAILED
    ) -> None:
        """It is over without a result; its replica holds nothing for it any more."""
        assert state.leg_id is not None, "only an entry that runs a leg can drop it"
        dispatched = self._legs.end(state.leg_id)
        assert dispatched is not None, f"leg {state.leg_id} is not in the book"
        self._on_ended(state, dispatched, outcome, now_s)

    def abort(
        self, state: RequestState, outcome: LegOutcome, now_s: float, *, confirm_by_s: float
    ) -> AbortLegs:
        """Begin to close it, its lease with it; the abort should be confirmed until then."""
        assert state.leg_id is not None, "only a running leg is aborted"
        leg_id, lease = state.leg_id, state.lease
        state.lease = None
        dispatched = self._legs.begin_close(leg_id, lease=lease, confirm_by_s=confirm_by_s)
        assert dispatched is not None, f"leg {leg_id} is not in the book"
        self._on_ended(state, dispatched, outcome, now_s)
        return AbortLegs(replica_id=dispatched.replica_id, leg_ids=(leg_id,))

    def _on_ended(
        self,
        state: RequestState,
        dispatched: DispatchedLeg,
        outcome: LegOutcome,
        now_s: float,
        *,
        has_output: bool | None = None,
    ) -> None:
        self._fleet_model.pending_prefills.remove(dispatched.leg.leg_id, now_s)
        self._accounts.on_leg_ended(state, dispatched, has_output=has_output)
        self._health.on_leg_ended(
            dispatched.replica_id,
            dispatched.leg.leg_id,
            now_s,
            done=outcome is LegOutcome.COMPLETED,
        )
        state.on_leg_ended(outcome, now_s)


def release_command(lease: Lease, fleet: FleetView) -> ReleaseLease | None:
    """Free the blocks now; None where no replica can, or need: the lease expires by itself."""
    source = fleet.replicas.get(lease.replica_id)
    if source is None or fleet.at_s >= lease.expires_at_s:
        return None
    via_replica_id = choose_releaser(source, fleet)
    return (
        None if via_replica_id is None else ReleaseLease(lease=lease, via_replica_id=via_replica_id)
    )


def transfer_timeout_s(state: RequestState, limits: CoordinatorLimits) -> float:
    """How long a request's blocks may be on their way; longer where many bytes are moved.

    Of 32,000 tokens of a 405B model 16.9 GB are moved, for 1.7 s at 10 GB/s. A transfer may take
    twice its prediction, and never has more time than a prefill.
    """
    predicted_s = 0.0 if state.transfer is None else state.transfer.predicted_s
    timeout_s = min(_TRANSFER_TIMEOUT_FACTOR * predicted_s, limits.first_token_timeout_s)
    return max(limits.transfer_deadline_s, timeout_s)


class InFlightTransfers:
    """Begins and ends a request's transfer, and remembers the pairs on which one has failed."""

    def __init__(self, fleet: FleetTable, links: LinkTable) -> None:
        self._fleet = fleet
        self._links = links
        self.suspects: list[tuple[str, str]] = []
        """Pairs of source and target on which handoffs have failed since the last look."""

    def begin(
        self, state: RequestState, leg_id: str, *, target_id: str, kv_handle: KvHandle, now_s: float
    ) -> None:
        """The decode leg `leg_id` is about to pull the blocks that the request's lease keeps."""
        assert state.lease is not None, "blocks are only pulled under a lease"
        source_id, view = state.lease.replica_id, self._fleet.get(target_id)
        block_bytes = 0 if view is None else view.facts.kv_block_bytes
        moved_bytes = kv_handle.blocks * block_bytes
        # Before the transfer itself counts as under way.
        predicted_s = self._links.transfer_s(source_id, target_id, moved_bytes) or 0.0
        state.transfer = KvTransfer(
            leg_id=leg_id, source_id=source_id, target_id=target_id, predicted_s=predicted_s
        )
        self._links.begin_transfer(
            leg_id,
            source_id=source_id,
            target_id=target_id,
            moved_bytes=moved_bytes,
            now_s=now_s,
        )

    def end(
        self,
        state: RequestState,
        now_s: float,
        *,
        is_complete: bool = False,
        failure: str | None = None,
    ) -> None:
        """The transfer is over, if there was one; a `failure` is recorded for its link."""
        transfer, state.transfer = state.transfer, None
        if transfer is None:
            return
        self._links.end_transfer(transfer.leg_id, now_s, is_complete=is_complete)
        both_present = transfer.source_id in self._fleet and transfer.target_id in self._fleet
        if failure is not None and both_present:
            self._links.record_failure(transfer.source_id, transfer.target_id, now_s, failure)
            self.suspects.append((transfer.source_id, transfer.target_id))

    def pop_suspects(self) -> Sequence[tuple[str, str]]:
        """Return the `suspects`, and forget them."""
        suspects, self.suspects = self.suspects, []
        return suspects
