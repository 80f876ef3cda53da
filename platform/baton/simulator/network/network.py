"""Transfers that share network interfaces: the rate and the end of each.

Theory of operation: every engine has one interface that carries `bytes_per_s` in and as much out. A
flow gets an equal share of its source's outgoing and of its target's incoming bandwidth, and runs
at the lower of the two; the rest stays unused. Max-min fairness would use it, but equal shares
approximate flow control per connection while flows are alike, and never exceed a link. Rates are
updated when a flow begins or ends, which costs as much as there are flows at its two interfaces.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Flow:
    key: str
    source_id: str
    target_id: str
    remaining_bytes: float
    updated_at_s: float
    bytes_per_s: float = 0.0
    done_at_s: float = float("inf")


class Network:
    """The flows under way between engines; keys are the caller's."""

    def __init__(self, *, share: bool = True) -> None:
        self._is_shared = share
        self._bytes_per_s: dict[str, float] = {}
        self._flows: dict[str, _Flow] = {}
        self._outgoing: defaultdict[str, dict[str, _Flow]] = defaultdict(dict)
        self._incoming: defaultdict[str, dict[str, _Flow]] = defaultdict(dict)
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._flows)

    def __contains__(self, key: str) -> bool:
        return key in self._flows

    def connect(self, engine_id: str, bytes_per_s: float) -> None:
        """Add an engine with the bandwidth of its interface."""
        self._bytes_per_s[engine_id] = bytes_per_s

    def set_bandwidth(self, engine_id: str, bytes_per_s: float, now_s: float) -> None:
        """Change a connected engine's bandwidth, also for flows under way."""
        self._bytes_per_s[engine_id] = bytes_per_s
        affected_flows = self._outgoing.get(engine_id, {}) | self._incoming.get(engine_id, {})
        self._update_rates(affected_flows.values(), now_s)

    def disconnect(self, engine_id: str) -> None:
        """Remove an engine without flows."""
        self._bytes_per_s.pop(engine_id, None)

    def begin(
        self, key: str, *, source_id: str, target_id: str, moved_bytes: float, now_s: float
    ) -> None:
        """Start a flow between two connected engines."""
        flow = _Flow(
            key=key,
            source_id=source_id,
            target_id=target_id,
            remaining_bytes=moved_bytes,
            updated_at_s=now_s,
        )
        self._flows[key] = flow
        self._outgoing[source_id][key] = self._incoming[target_id][key] = flow
        self._update_rates(self._flows_sharing_with(flow), now_s)

    def end(self, key: str, now_s: float) -> bool:
        """Remove a flow, done or not; False when there is none with this key."""
        flow = self._flows.pop(key, None)
        if flow is None:
            return False
        del self._outgoing[flow.source_id][key], self._incoming[flow.target_id][key]
        self._update_rates(self._flows_sharing_with(flow), now_s)
        for flows, engine_id in (
            (self._outgoing, flow.source_id),
            (self._incoming, flow.target_id),
        ):
            if not flows[engine_id]:
                del flows[engine_id]
        return True

    def next_done_at_s(self) -> float | None:
        """When the next flow will be done at present rates; None without flows."""
        while self._heap:
            at_s, key = self._heap[0]
            flow = self._flows.get(key)
            if flow is not None and flow.done_at_s == at_s:
                return at_s
            heapq.heappop(self._heap)
        return None

    def pop_done(self, now_s: float) -> list[str]:
        """Remove the flows that are done by now, in order."""
        done = []
        while (at_s := self.next_done_at_s()) is not None and at_s <= now_s:
            _, key = heapq.heappop(self._heap)
            self.end(key, at_s)
            done.append(key)
        return done

    def _flows_sharing_with(self, changed: _Flow) -> Iterable[_Flow]:
        return (self._outgoing[changed.source_id] | self._incoming[changed.target_id]).values()

    def _update_rates(self, affected_flows: Iterable[_Flow], now_s: float) -> None:
        for flow in affected_flows:
            flow.remaining_bytes -= flow.bytes_per_s * (now_s - flow.updated_at_s)
            flow.remaining_bytes = max(0.0, flow.remaining_bytes)
            flow.updated_at_s = now_s
            flow.bytes_per_s = self._rate(flow)
            flow.done_at_s = now_s + flow.remaining_bytes / flow.bytes_per_s
            heapq.heappush(self._heap, (flow.done_at_s, flow.key))

    def _rate(self, flow: _Flow) -> float:
        out, into = self._bytes_per_s[flow.source_id], self._bytes_per_s[flow.target_id]
        if not self._is_shared:
            return min(out, into)
        return min(
            out / len(self._outgoing[flow.source_id]), into / len(self._incoming[flow.target_id])
        )
