"""The transfers in flight that this coordinator began, and how they slow each other.

Flows share a NIC evenly. While one more flow moves its bytes, each other flow at the same end moves
at most as many, and no more than it has. Of the two ends the busier one counts.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Transfer(NamedTuple):
    """One transfer."""

    source_id: str
    target_id: str
    moved_bytes: int


class _Nic:
    """The flows at one end: how many, and how many bytes they carry."""

    __slots__ = ("moved_bytes", "transfers")

    def __init__(self) -> None:
        self.transfers = 0
        self.moved_bytes = 0


class LinkTransfers:
    """Flows by id, and their sums at each end."""

    def __init__(self) -> None:
        self._transfers: dict[str, Transfer] = {}
        self._outgoing: dict[str, _Nic] = {}
        self._incoming: dict[str, _Nic] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def begin(self, transfer_id: str, transfer: Transfer) -> None:
        """Count a flow; an earlier flow with this id is over."""
        self.end(transfer_id)
        self._transfers[transfer_id] = transfer
        for nics, replica_id in (
            (self._outgoing, transfer.source_id),
            (self._incoming, transfer.target_id),
        ):
            nic = nics.setdefault(replica_id, _Nic())
            nic.transfers += 1
            nic.moved_bytes += transfer.moved_bytes

    def end(self, transfer_id: str) -> Transfer | None:
        """Discount a flow; None when there is none with this id."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return None
        for nics, replica_id in (
            (self._outgoing, transfer.source_id),
            (self._incoming, transfer.target_id),
        ):
            nic = nics[replica_id]
            nic.transfers -= 1
            nic.moved_bytes -= transfer.moved_bytes
            if not nic.transfers:
                del nics[replica_id]
        return transfer

    def concurrent_bytes(self, source_id: str, target_id: str, moved_bytes: int) -> int:
        """The bytes that others move at the busier end while these bytes are moved."""
        if not self._transfers:
            return 0
        max_bytes = 0
        for nic in (self._outgoing.get(source_id), self._incoming.get(target_id)):
            if nic is not None:
                max_bytes = max(max_bytes, min(nic.transfers * moved_bytes, nic.moved_bytes))
        return max_bytes

    def count_by_link(self) -> Counter[tuple[str, str]]:
        """How many flows there are from one replica to another."""
        return Counter((flow.source_id, flow.target_id) for flow in self._transfers.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when flows and sums disagree."""
        for nics, end in ((self._outgoing, 0), (self._incoming, 1)):
            bytes_by_replica: dict[object, list[int]] = {}
            for flow in self._transfers.values():
                bytes_by_replica.setdefault(flow[end], []).append(flow.moved_bytes)
            counted = {name: (nic.transfers, nic.moved_bytes) for name, nic in nics.items()}
            expected = {name: (len(moved), sum(moved)) for name, moved in bytes_by_replica.items()}
            assert counted == expected, f"flows counted as {counted}, there are {expected}"
