"""An ingress replica in virtual time: executes commands exactly as the live driver does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import assert_never

from baton.control.coordinator import Coordinator
from baton.domain.commands import (
    AbortLegs,
    CheckSideChannel,
    Command,
    Deliver,
    Delivery,
    FailRequest,
    ReleaseLease,
    ReportFailedAgent,
    RequestRecord,
    StoreRequestRecord,
    SubmitLeg,
    SyncCache,
)
from baton.domain.events import Event, LegFailed, ReplicaLost, RequestArrived, TimerFired
from baton.domain.handoff import LegFailure
from baton.domain.request import Request
from baton.simulator.fleet.replica import Session, VirtualReplica
from baton.simulator.network.timeline import Timeline


class VirtualIngress:
    """One coordinator and its sessions. Messages take their session's latency."""

    def __init__(
        self,
        coordinator: Coordinator,
        timeline: Timeline,
        *,
        on_end: Callable[[RequestRecord], None],
        on_tokens: Callable[[Delivery], None] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._timeline = timeline
        self._on_end = on_end
        self._on_tokens = on_tokens
        self._sessions: dict[str, tuple[VirtualReplica, Session]] = {}
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._timer_at_s = float("inf")

    def join(self, replica: VirtualReplica, latency_s: float) -> None:
        """Open a session with a replica."""
        self._sessions[replica.facts.replica_id] = (replica, replica.open_session(self, latency_s))

    def send(self, request: Request) -> None:
        """A client's request reaches this ingress."""
        self.on_event(RequestArrived(request=request))

    def on_replica_event(self, replica: VirtualReplica, event: Event) -> None:
        """Handle a replica's event; ignores events of an earlier life of the replica."""
        replica_id = replica.facts.replica_id
        entry = self._sessions.get(replica_id)
        if entry is None or entry[0] is not replica:
            return
        if isinstance(event, ReplicaLost):
            del self._sessions[replica_id]
        self.on_event(event)

    def on_event(self, event: Event) -> None:
        """Handle one event and the events that it causes."""
        if self._is_handling:
            self._events.append(event)
            return
        self._is_handling = True
        now_s, handle = self._timeline.now_s, self.coordinator.handle
        for command in handle(event, now_s):
            self._execute(command)
        while self._events:
            for command in handle(self._events.popleft(), now_s):
                self._execute(command)
        self._is_handling = False
        self._set_timer()

    def _execute(self, command: Command) -> None:
        match command:
            case Deliver():
                self._deliver(command)
            case SubmitLeg():
                self._submit(command)
            case StoreRequestRecord():
                self._on_end(command.record)
            case AbortLegs():
                legs = command.leg_ids
                self._send_to_replica(
                    command.replica_id, lambda replica, own: replica.abort(own, legs)
                )
            case ReleaseLease():
                kv_handle = command.lease.kv_handle
                self._send_to_replica(
                    command.via_replica_id, lambda replica, _: replica.release(kv_handle)
                )
            case SyncCache():
                self._send_to_replica(
                    command.replica_id, lambda replica, own: replica.sync_cache(own)
                )
            case CheckSideChannel():
                probe_target = (command.source_id, command.address)
                self._send_to_replica(
                    command.replica_id,
                    lambda replica, own: replica.check_side_channel(own, *probe_target),
                )
            case ReportFailedAgent():
                self._send_to_replica(
                    command.replica_id, lambda replica, _: replica.on_agent_broken()
                )
            case FailRequest():
                pass  # the record says the same
            case _:
                assert_never(command)

    def _submit(self, command: SubmitLeg) -> None:
        leg, entry = command.leg, self._sessions.get(command.replica_id)
        if entry is None:
            self._events.append(
                LegFailed(
                    replica_id=command.replica_id,
                    leg_id=leg.leg_id,
                    failure=LegFailure.UNREACHABLE,
                    was_sent=False,
                )
            )
            return
        replica, session = entry
        self._timeline.call_later(session.latency_s, partial(replica.submit, session, leg))

    def _send_to_replica(
        self, replica_id: str, action: Callable[[VirtualReplica, Session], None]
    ) -> None:
        """Call `action` after the session's latency, if there is a session."""
        entry = self._sessions.get(replica_id)
        if entry is not None:
            replica, session = entry
            self._timeline.call_later(session.latency_s, partial(action, replica, session))

    def _deliver(self, command: Deliver) -> None:
        if self._on_tokens is not None:
            for delivery in command.deliveries:
                self._on_tokens(delivery)

    def _set_timer(self) -> None:
        at_s = self.coordinator.next_deadline_at_s()
        if at_s is not None and at_s < self._timer_at_s:
            self._timer_at_s = at_s
            self._timeline.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        if self._timer_at_s > self._timeline.now_s:
            return
        self._timer_at_s = float("inf")
        self.on_event(TimerFired())
