"""The live driver in virtual time: its loop, clock, link, frontend and recorder are fakes.

The loop is not one that could run anything: it only lets the driver set timers, on the timeline of
a virtual fleet, whose replicas the link talks to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton.control.coordinator import Coordinator
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError
from baton.domain.events import Event, ReplicaLost
from baton.domain.handoff import KvHandle, Leg, LegFailure
from baton.domain.request import Request
from baton.runtime.driver import Driver
from baton.simulator.fleet.fleet import VirtualFleet
from baton.simulator.fleet.replica import Session, VirtualReplica
from baton.simulator.network.timeline import Timeline


class VirtualLoop(asyncio.AbstractEventLoop):
    """Timers on a timeline, and nothing else."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def call_later(  # type: ignore[override]  # no context: nobody here has one
        self, delay: float, callback: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle:
        at_s = self._timeline.now_s + delay
        handle = asyncio.TimerHandle(at_s, callback, args, self)

        def fire() -> None:
            if not handle.cancelled():
                callback(*args)

        self._timeline.call_at(at_s, fire)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """As a real loop has it: the driver cancels timers."""

    def get_debug(self) -> bool:
        return False


class VirtualClock:
    """The time of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def now_s(self) -> float:
        return self._timeline.now_s


class LiveIngress:
    """A live driver that a virtual fleet takes for one of its ingresses."""

    def __init__(self, coordinator: Coordinator, fleet: VirtualFleet) -> None:
        self.coordinator = coordinator
        self.delivered: list[Delivery] = []
        self.failed: dict[str, BatonError] = {}
        self.records: list[RequestRecord] = []
        self._timeline = fleet.timeline
        self._sessions: dict[str, tuple[VirtualReplica, Session]] = {}
        loop = VirtualLoop(fleet.timeline)  # type: ignore[abstract]  # its other methods raise
        asyncio.events._set_running_loop(loop)
        try:
            self.driver = Driver(
                coordinator,
                link=self,
                frontend=self,
                recorder=self,
                clock=VirtualClock(fleet.timeline),
            )
        finally:
            asyncio.events._set_running_loop(None)

    # ------------------------------------------------------------------ what a fleet asks of it
    def join(self, replica: VirtualReplica, latency_s: float) -> None:
        self._sessions[replica.facts.replica_id] = (replica, replica.open_session(self, latency_s))

    def send(self, request: Request) -> None:
        self.driver.on_request(request)

    def on_replica_event(self, replica: VirtualReplica, event: Event) -> None:
        replica_id = replica.facts.replica_id
        if self._sessions.get(replica_id, (None, None))[0] is not replica:
            return
        if isinstance(event, ReplicaLost):
            del self._sessions[replica_id]
        self.driver.on_event(event)

    # ------------------------------------------------------------------ link
    def submit(self, replica_id: str, leg: Leg) -> LegFailure | None:
        sent = self._call_replica(replica_id, lambda replica, own: replica.submit(own, leg))
        return None if sent else LegFailure.UNREACHABLE

    def abort(self, replica_id: str, leg_ids: Sequence[str]) -> None:
        legs = tuple(leg_ids)
        self._call_replica(replica_id, lambda replica, own: replica.abort(own, legs))

    def release(self, replica_id: str, kv_handle: KvHandle) -> None:
        self._call_replica(replica_id, lambda replica, _: replica.release(kv_handle))

    def sync_cache(self, replica_id: str) -> None:
        self._call_replica(replica_id, lambda replica, own: replica.sync_cache(own))

    def check_side_channel(self, replica_id: str, source_id: str, address: str) -> None:
        self._call_replica(
            replica_id, lambda replica, own: replica.check_side_channel(own, source_id, address)
        )

    def report_broken_agent(self, replica_id: str, reason: str) -> None:
        del reason  # a simulated replica asks for none
        self._call_replica(replica_id, lambda replica, _: replica.on_agent_broken())

    def _call_replica(
        self, replica_id: str, call: Callable[[VirtualReplica, Session], None]
    ) -> bool:
        entry = self._sessions.get(replica_id)
        if entry is None:
            return False
        replica, session = entry
        self._timeline.call_later(session.latency_s, lambda: call(replica, session))
        return True

    # ------------------------------------------------------------------ frontend and recorder
    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self.delivered.extend(deliveries)

    def fail(self, request_id: str, error: BatonError) -> None:
        self.failed[request_id] = error

    def record(self, record: RequestRecord) -> None:
        self.records.append(record)
