"""KV blocks of handoffs: the leases that keep them, and the transfers that pull them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import KvTransfer, RequestState, request_id_of
from baton.domain.commands import ReleaseLease
from baton.domain.fleet import FleetView
from baton.domain.handoff import KvHandle, Lease
from baton.policy.links.estimates import LinkTable
from baton.policy.placement.port import choose_releaser

RENEWALS_PER_LEASE = 6
"""How often a lease is renewed in its time while a leg waits for its blocks."""
_TRANSFER_TIMEOUT_FACTOR = 2.0
"""So many times the predicted seconds of a transfer."""


def renewed_expiry_s(now_s: float, duration_s: float) -> float:
    """Until when a lease is good that is renewed now.

    Source: vLLM 0.32, kv_connector/v1/nixl/base_worker.py `_handle_heartbeat`: two thirds of it.
    """
    return now_s + duration_s * 2 / 3


def new_lease(
    leg_id: str, replica_id: str, kv_handle: KvHandle, now_s: float, *, duration_s: float
) -> Lease:
    """The lease that comes with the KV handle of a finished leg."""
    return Lease(
        leg_id=leg_id,
        request_id=request_id_of(leg_id),
        replica_id=replica_id,
        kv_handle=kv_handle,
        granted_at_s=now_s,
        expires_at_s=now_s + duration_s,
    )


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

    Of 32,000 tokens of a 405B model 16.9 GB are moved, for 1.7 s at 10 GB/s. The prediction may be
    half of what it takes, and is no reason to wait longer than for a prefill.
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
        # Before the transfer itself counts as one that is under way.
        predicted_s = self._links.transfer_s(source_id, target_id, moved_bytes) or 0.0
        state.transfer = KvTransfer(leg_id, source_id, target_id, predicted_s)
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
