"""The transfers that our handoffs have under way, as the link book is told of them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.request_state import Entry, Flow
from baton.domain.handoff import Ticket
from baton.policy.links.estimates import LinkBook


class Flows:
    """Begins and ends a request's transfer, and remembers on which pairs one has failed."""

    def __init__(self, fleet: FleetTable, links: LinkBook) -> None:
        self._fleet = fleet
        self._links = links
        self.doubts: list[tuple[str, str]] = []
        """Pairs of source and target on which handoffs have failed since they were taken."""

    def begin(
        self, entry: Entry, leg_id: str, *, target_id: str, ticket: Ticket, now_s: float
    ) -> None:
        """The decode leg `leg_id` is about to pull the blocks that the entry's lease keeps."""
        assert entry.lease is not None, "blocks are only pulled under a lease"
        source_id, view = entry.lease.replica_id, self._fleet.get(target_id)
        block_bytes = 0 if view is None else view.facts.kv_block_bytes
        moved_bytes = ticket.blocks * block_bytes
        # Before it is one of those under way itself.
        moves_s = self._links.transfer_s(source_id, target_id, moved_bytes) or 0.0
        entry.flow = Flow(leg_id, source_id, target_id, moves_s)
        self._links.begin(
            leg_id,
            source_id=source_id,
            target_id=target_id,
            moved_bytes=moved_bytes,
            now_s=now_s,
        )

    def end(
        self, entry: Entry, now_s: float, *, landed: bool = False, failed: str | None = None
    ) -> None:
        """The transfer is over, if there was one; with `failed`, the link pays for it."""
        flow, entry.flow = entry.flow, None
        if flow is None:
            return
        self._links.end(flow.leg_id, now_s, landed=landed)
        alive = flow.source_id in self._fleet and flow.target_id in self._fleet
        if failed is not None and alive:
            self._links.failed(flow.source_id, flow.target_id, now_s, failed)
            self.doubts.append((flow.source_id, flow.target_id))

    def take_doubts(self) -> Sequence[tuple[str, str]]:
        """The `doubts`; there are none then."""
        doubts, self.doubts = self.doubts, []
        return doubts
