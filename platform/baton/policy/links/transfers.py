"""The transfers in flight that this coordinator began, and what they cost each other.

Flows share a NIC evenly. While one more flow moves its bytes, each other flow at the same end moves
at most as many, and no more than it has; of the two ends the busier one counts.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Flow(NamedTuple):
    """One transfer."""

    source_id: str
    target_id: str
    moved_bytes: int


class _Nic:
    """The flows at one end: how many, and how many bytes they carry."""

    __slots__ = ("flows", "moved_bytes")

    def __init__(self) -> None:
        self.flows = 0
        self.moved_bytes = 0


class LinkFlows:
    """Flows by id, and their sums at each end."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._out: dict[str, _Nic] = {}
        self._into: dict[str, _Nic] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def begin(self, flow_id: str, flow: Flow) -> None:
        """Count a flow; one that has the id already is over."""
        self.end(flow_id)
        self._flows[flow_id] = flow
        for nics, replica_id in ((self._out, flow.source_id), (self._into, flow.target_id)):
            nic = nics.setdefault(replica_id, _Nic())
            nic.flows += 1
            nic.moved_bytes += flow.moved_bytes

    def end(self, flow_id: str) -> Flow | None:
        """Discount a flow; None when there is none with this id."""
        flow = self._flows.pop(flow_id, None)
        if flow is None:
            return None
        for nics, replica_id in ((self._out, flow.source_id), (self._into, flow.target_id)):
            nic = nics[replica_id]
            nic.flows -= 1
            nic.moved_bytes -= flow.moved_bytes
            if not nic.flows:
                del nics[replica_id]
        return flow

    def beside(self, source_id: str, target_id: str, moved_bytes: int) -> int:
        """The bytes that others move at the busier end while so many of ours are moved."""
        if not self._flows:
            return 0
        most = 0
        for nic in (self._out.get(source_id), self._into.get(target_id)):
            if nic is not None:
                most = max(most, min(nic.flows * moved_bytes, nic.moved_bytes))
        return most

    def by_link(self) -> Counter[tuple[str, str]]:
        """How many flows there are from one replica to another."""
        return Counter((flow.source_id, flow.target_id) for flow in self._flows.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when flows and sums disagree."""
        for nics, end in ((self._out, 0), (self._into, 1)):
            owed: dict[object, list[int]] = {}
            for flow in self._flows.values():
                owed.setdefault(flow[end], []).append(flow.moved_bytes)
            counted = {name: (nic.flows, nic.moved_bytes) for name, nic in nics.items()}
            wanted = {name: (len(moved), sum(moved)) for name, moved in owed.items()}
            assert counted == wanted, f"flows counted as {counted}, there are {wanted}"
