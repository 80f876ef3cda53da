"""The order of tenants that want more than there is: start-time fair queueing.

*Theory of operation.* Each tenant is a flow with a weight. A served request has a *start tag* in
virtual time: the later of the present virtual time and the flow's last end tag. Its end tag adds
its work over the weight. The flow with the smallest tag is next; virtual time is the tag of the
last served request. So waiting flows get work in proportion to their weights, within one request of
each, and an idle flow saves up nothing. Source: Goyal, Vin, Cheng, Start-Time Fair Queueing,
IEEE/ACM Transactions on Networking 5(5), 1997.

Inside a flow the earliest deadline comes first. Work is in predicted device-seconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

_MAX_IDLE_FLOWS = 1024
"""Flows that are remembered without a waiting request; above it, flows without debt are dropped."""


_OVERTAKE_SAFETY_FACTOR = 2.0
"""No request overtakes another with less than twice the predicted time of its turn left. Found by
trying: at 1, an eighth of all rejections came late, for overtaken requests."""


class QueuedRequest(NamedTuple):
    """A request in the queue."""

    request_id: str
    flow: str
    weight: float
    work_s: float
    start_deadline_s: float
    """When it must begin at the latest; or the deadline it stands behind, see `assign_position`."""


@dataclass(slots=True)
class _Flow:
    """One tenant's own line."""

    weight: float
    start_tag: float
    """Start tag of its next one."""
    queue: list[tuple[float, int, str]] = field(default_factory=list)
    """By when each must begin; its number; its id."""
    queued_work_s: float = 0.0


class FairQueue:
    """Tenants' requests of one priority, in the order in which they are to be served."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._waiting: dict[str, tuple[QueuedRequest, int]] = {}
        """By id, in the order in which they came; with their numbers."""
        self._backlogged: dict[str, _Flow] = {}
        self._virtual_time = 0.0
        """Virtual time."""
        self._arrivals = 0
        self._max_flows = _MAX_IDLE_FLOWS
        self.queued_work_s = 0.0
        """Of all who wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: QueuedRequest) -> None:
        """Add a request to the queue."""
        self._arrivals += 1
        self._waiting[request.request_id] = (request, self._arrivals)
        flow = self._flow(request)
        if not flow.queue:
            flow.start_tag = max(flow.start_tag, self._virtual_time)
            self._backlogged[request.flow] = flow
        insort(flow.queue, (request.start_deadline_s, self._arrivals, request.request_id))
        flow.queued_work_s += request.work_s
        self.queued_work_s += request.work_s

    def head(self) -> QueuedRequest | None:
        """The next request; None when the queue is empty."""
        if not self._backlogged:
            return None
        flow = min(self._backlogged.values(), key=_service_order)
        return self._waiting[flow.queue[0][2]][0]

    def serve(self, request_id: str) -> None:
        """Take a request out for its turn, and charge its flow."""
        request = self._waiting[request_id][0]
        flow = self._flows[request.flow]
        self._charge(flow, request)
        self.remove(request_id)

    def serve_immediately(self, request: QueuedRequest) -> None:
        """Charge the flow of a request that need not wait."""
        flow = self._flow(request)
        flow.start_tag = max(flow.start_tag, self._virtual_time)
        self._charge(flow, request)
        self._drop_idle_flows()

    def remove(self, request_id: str) -> QueuedRequest | None:
        """Take a request out without a turn; None when it did not wait."""
        entry = self._waiting.pop(request_id, None)
        if entry is None:
            return None
        request, number = entry
        flow = self._flows[request.flow]
        del flow.queue[bisect_left(flow.queue, (request.start_deadline_s, number, request_id))]
        flow.queued_work_s = flow.queued_work_s - request.work_s if flow.queue else 0.0
        self.queued_work_s = self.queued_work_s - request.work_s if self._waiting else 0.0
        if not flow.queue:
            del self._backlogged[request.flow]
            self._drop_idle_flows()
        return request

    def newest_id(self) -> str | None:
        """The newest request in the queue."""
        return next(reversed(self._waiting), None)

    def work_ahead_s(self, flow_name: str, *, weight: float, begin_by_s: float) -> float:
        """How much work is served before a request that would arrive now.

        As if flows were served side by side, each at its share. It is the work ahead in its own
        line, and of each other line the work that is due by the tag that it would have.
        """
        flow, own_work_s, tag = self._flows.get(flow_name), 0.0, self._virtual_time
        if flow is not None:
            tag = max(flow.start_tag, self._virtual_time)
            if flow.queue:
                tag = flow.start_tag
                index = bisect_left(flow.queue, (begin_by_s, self._arrivals + 1, ""))
                own_work_s = sum(
                    [self._waiting[waiting_id][0].work_s for _, _, waiting_id in flow.queue[:index]]
                )
        tag += own_work_s / weight
        other_work_s = 0.0
        for other in self._backlogged.values():
            if other is not flow and other.start_tag < tag:
                other_work_s += min(other.queued_work_s, other.weight * (tag - other.start_tag))
        return own_work_s + other_work_s

    def assign_position(
        self, request: QueuedRequest, *, now_s: float, rate: float
    ) -> QueuedRequest:
        """The deadline by which a new request is ordered in its line: its own, or the last.

        It stands at the end when another request behind it would be late because of it, at the
        given work per second for all lines. Earliest deadline first is the best order as long as
        all can be in time, and a bad one when not. Each urgent new request would then ruin an old
        one. Under overload lines are as long as they may be, hence requests stand in the order of
        arrival.
        """
        flow = self._flows.get(request.flow)
        if flow is None or not flow.queue:
            return request
        index = bisect_left(flow.queue, (request.start_deadline_s, self._arrivals + 1, ""))
        weights = sum(other.weight for other in self._backlogged.values())
        flow_rate = rate * request.weight / weights
        work_ahead_s = request.work_s + sum(
            self._waiting[request_id][0].work_s for _, _, request_id in flow.queue[:index]
        )
        for begin_by_s, _, request_id in flow.queue[index:]:
            if now_s + _OVERTAKE_SAFETY_FACTOR * work_ahead_s / flow_rate > begin_by_s:
                return request._replace(start_deadline_s=flow.queue[-1][0])
            work_ahead_s += self._waiting[request_id][0].work_s
        return request

    def check_integrity(self) -> None:
        """Raise AssertionError when lines, sums and those who wait disagree."""
        queued_ids = sorted(
            waiting_id for flow in self._flows.values() for _, _, waiting_id in flow.queue
        )
        assert queued_ids == sorted(self._waiting), "lines and waiting requests differ"
        for name, flow in self._flows.items():
            work_values_s = [self._waiting[waiting_id][0].work_s for _, _, waiting_id in flow.queue]
            assert abs(flow.queued_work_s - sum(work_values_s)) <= 1e-6 * (
                1 + sum(work_values_s)
            ), f"{name}: work"
            assert bool(flow.queue) == (name in self._backlogged), f"{name}: backlogged or not"
            assert flow.queue == sorted(flow.queue), f"{name} is out of order"

    def _flow(self, request: QueuedRequest) -> _Flow:
        """Its flow, with its current weight."""
        flow = self._flows.get(request.flow)
        if flow is None:
            flow = self._flows[request.flow] = _Flow(request.weight, self._virtual_time)
        flow.weight = request.weight
        return flow

    def _charge(self, flow: _Flow, request: QueuedRequest) -> None:
        self._virtual_time = max(self._virtual_time, flow.start_tag)
        flow.start_tag += request.work_s / request.weight

    def _drop_idle_flows(self) -> None:
        """Forget flows without waiting requests whose tag is past: new flows begin alike."""
        if len(self._flows) > self._max_flows:
            self._flows = {
                name: flow
                for name, flow in self._flows.items()
                if flow.queue or flow.start_tag > self._virtual_time
            }
            self._max_flows = max(_MAX_IDLE_FLOWS, 2 * len(self._flows))


def _service_order(flow: _Flow) -> tuple[float, int]:
    """Sort key: the smallest tag first; among equal tags, the oldest flow."""
    return flow.start_tag, flow.queue[0][1]
