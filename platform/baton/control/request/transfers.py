"""The transfers that our handoffs have under way, as the link book is told of them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.request_state import KvTransfer, RequestState
from baton.domain.handoff import KvHandle
from baton.policy.links.estimates import LinkTable


class InFlightTransfers:
    """Begins and ends a request's transfer, and remembers on which pairs one has failed."""

    def __init__(self, fleet: FleetTable, links: LinkTable) -> None:
        self._fleet = fleet
        self._links = links
        self.suspects: list[tuple[str, str]] = []
        """Pairs of source and target on which handoffs have failed since they were taken."""

    def begin(
        self, state: RequestState, leg_id: str, *, target_id: str, kv_handle: KvHandle, now_s: float
    ) -> None:
        """The decode leg `leg_id` is about to pull the blocks that the entry's lease keeps."""
        assert state.lease is not None, "blocks are only pulled under a lease"
        source_id, view = state.lease.replica_id, self._fleet.get(target_id)
        block_bytes = 0 if view is None else view.facts.kv_block_bytes
        moved_bytes = kv_handle.blocks * block_bytes
        # Before it is one of those under way itself.
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
        """The transfer is over, if there was one; with `failure`, the link pays for it."""
        transfer, state.transfer = state.transfer, None
        if transfer is None:
            return
        self._links.end_transfer(transfer.leg_id, now_s, is_complete=is_complete)
        both_present = transfer.source_id in self._fleet and transfer.target_id in self._fleet
        if failure is not None and both_present:
            self._links.record_failure(transfer.source_id, transfer.target_id, now_s, failure)
            self.suspects.append((transfer.source_id, transfer.target_id))

    def pop_suspects(self) -> Sequence[tuple[str, str]]:
        """The `suspects`; there are none then."""
        suspects, self.suspects = self.suspects, []
        return suspects
