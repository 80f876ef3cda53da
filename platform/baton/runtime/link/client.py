"""The coordinator's end of the fleet link: one connection per replica, one timer for all.

Theory of operation: every `beat_s` each connection sends a heartbeat and checks its last message.
In a large fleet that takes tens of milliseconds, so a few connections at a time have their turn,
spread over the beat. An idle replica gets one heartbeat of a few; replicas do the same. When this
process itself did not run for longer than a beat, one turn of each connection blames no replica.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

import zmq

from baton.domain.events import (
    CacheChanged,
    Event,
    LegFailed,
    LegsAborted,
    LinksReported,
    LoadReported,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    RoleChanged,
    SideChannelChecked,
    StepCompleted,
)
from baton.domain.fleet import LossReason, ReplicaFacts
from baton.domain.handoff import KvHandle, Leg, LegFailure
from baton.domain.names.addresses import Address, parse_address
from baton.runtime.link import codec, frames
from baton.runtime.link.channel import Channel, ConnectionMonitor, SendResult, configure
from baton.runtime.link.codec import BadFrame
from baton.runtime.link.frames import MAX_ID_CHARS, CloseReason
from baton.runtime.link.liveness import HeartbeatMonitor
from baton.runtime.link.options import LinkCounters, LinkOptions, next_tick_at_s
from baton.runtime.process.log_events import log_event

_HOST = re.compile(r"[0-9A-Za-z.:_-]+")
_CLOSE_DEADLINE_S = 5.0
_CONNECTIONS_PER_TICK = 32
"""Connections that have their turn together: about a millisecond."""
_MAX_SOCKETS = 16_384  # three for each replica; ZMQ's default of 1023 ends at 340 replicas
_LOG = logging.getLogger(__name__)
_CLOSE_LINGER_S = 0.1
_BEAT = codec.encode(frames.CoordinatorBeat())
_HANDSHAKE_REFUSED = "it hangs up on us: its link keys are other ones, or it is no replica"
_HANDSHAKE_LATE = "it takes connections, but does not answer: its process hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkContext:
    """The state that all connections of one coordinator share."""

    context: zmq.Context[zmq.Socket[bytes]]
    coordinator_id: str
    new_session: Callable[[], str]
    on_event: Callable[[Event], None]
    options: LinkOptions
    counters: LinkCounters


class _State(StrEnum):
    WAITING = "waiting"
    CONNECTING = "connecting"
    JOINED = "joined"


def _check_address(replica_id: str, address: str) -> None:
    try:
        parsed = parse_address(address)
    except ValueError:
        parsed = Address("", 0)
    if not (address.startswith("tcp://") and _HOST.fullmatch(parsed.host) and parsed.port):
        raise ValueError(
            f"address of replica {replica_id} is {address!r}, expected tcp://HOST:PORT"
        )


def _random_session() -> str:
    return secrets.token_hex(8)


class LinkClient:
    """Keeps sessions with replicas and turns their frames into domain events.

    Matches `ports.ReplicaLink`; lives on one running event loop. `on_event` gets events
    synchronously, in the order of each replica, and never from inside a method of the port.
    """

    def __init__(
        self,
        coordinator_id: str,
        on_event: Callable[[Event], None],
        *,
        options: LinkOptions | None = None,
        new_session: Callable[[], str] = _random_session,
    ) -> None:
        self.counters = LinkCounters()
        self._options = options or LinkOptions()
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._link_context = _LinkContext(
            context=self._context,
            coordinator_id=coordinator_id,
            new_session=new_session,
            on_event=on_event,
            options=self._options,
            counters=self.counters,
        )
        self._connections: dict[str, _ReplicaConnection] = {}
        self._closed = False
        self._pending_ticks: list[_ReplicaConnection] = []
        """Connections that have not had their turn in this round."""
        self._tick_parts = 1
        """Parts of a round."""
        self._stalled_at_s = -math.inf
        self._tick_due_at_s = self._loop.time() + self._options.heartbeat_interval_s
        self._timer = self._loop.call_at(self._tick_due_at_s, self._tick)

    # ------------------------------------------------------------------ membership

    def connect(self, replica_id: str, address: str) -> None:
        """Keep a session with the replica at `address`; another address replaces the connection.

        Raises:
            ValueError: the address is not of the form tcp://HOST:PORT.
        """
        _check_address(replica_id, address)
        existing = self._connections.get(replica_id)
        if existing is not None and existing.address == address:
            return
        self.disconnect(replica_id)
        self._connections[replica_id] = _ReplicaConnection(replica_id, address, self._link_context)

    def disconnect(self, replica_id: str) -> None:
        """Forget a replica; emits `ReplicaLost(LEFT)` if it had joined. Unknown ids are ignored."""
        connection = self._connections.pop(replica_id, None)
        if connection is not None:
            connection.close()

    @property
    def replica_ids(self) -> frozenset[str]:
        """Replicas with a connection, joined or not."""
        return frozenset(self._connections)

    @property
    def joined_ids(self) -> frozenset[str]:
        """Replicas that take legs now."""
        return frozenset(r for r, connection in self._connections.items() if connection.joined)

    @property
    def rejection_reasons(self) -> Mapping[str, str]:
        """Why replicas refuse a session, as far as they say."""
        return {
            r: c.rejection_reason
            for r, c in self._connections.items()
            if c.rejection_reason is not None
        }

    # ------------------------------------------------------------------ ports.ReplicaLink

    def submit(self, replica_id: str, leg: Leg) -> LegFailure | None:
        """See `ports.ReplicaLink`."""
        connection = self._connections.get(replica_id)
        return LegFailure.UNREACHABLE if connection is None else connection.submit(leg)

    def abort(self, replica_id: str, leg_ids: Sequence[str]) -> None:
        """See `ports.ReplicaLink`."""
        connection = self._connections.get(replica_id)
        if connection is not None and leg_ids:
            connection.abort(leg_ids)

    def release(self, replica_id: str, kv_handle: KvHandle) -> None:
        """See `ports.ReplicaLink`."""
        connection = self._connections.get(replica_id)
        if connection is not None:
            connection.release(kv_handle)

    def sync_cache(self, replica_id: str) -> None:
        """See `ports.ReplicaLink`."""
        connection = self._connections.get(replica_id)
        if connection is not None:
            connection.sync_cache()

    def check_side_channel(self, replica_id: str, source_id: str, address: str) -> None:
        """See `ports.ReplicaLink`."""
        connection = self._connections.get(replica_id)
        if connection is not None:
            connection.check_side_channel(source_id, address)

    def report_broken_agent(self, replica_id: str, reason: str) -> None:
        """See `ports.ReplicaLink`."""
        connection = self._connections.get(replica_id)
        if connection is not None:
            connection.report_broken_agent(reason)

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        now_s, beat_s = self._loop.time(), self._options.heartbeat_interval_s
        late_s = now_s - self._tick_due_at_s
        if late_s > beat_s:
            self._stalled_at_s = now_s
        if not self._pending_ticks:
            self._pending_ticks = list(self._connections.values())
            self._tick_parts = max(1, math.ceil(len(self._pending_ticks) / _CONNECTIONS_PER_TICK))
        part_s = beat_s / self._tick_parts
        # A loop whose turns are longer than a part would let beats come ever later.
        due_parts = 1 if late_s > beat_s else 1 + int(max(0.0, late_s) / part_s)
        # Half a part less: the turns of the next round are none of those that the stall excuses.
        stalled = now_s - self._stalled_at_s < beat_s * (1 - 0.5 / self._tick_parts)
        self._tick_due_at_s = next_tick_at_s(
            self._tick_due_at_s, now_s, due_parts * part_s, beat_s=beat_s
        )
        self._timer = self._loop.call_at(self._tick_due_at_s, self._tick)
        count = due_parts * _CONNECTIONS_PER_TICK
        batch, self._pending_ticks = self._pending_ticks[:count], self._pending_ticks[count:]
        for connection in batch:
            if self._connections.get(connection.replica_id) is connection:
                connection.tick(now_s, stalled=stalled)

    async def close(self) -> None:
        """Say goodbye to every replica and free all sockets. Idempotent.

        A consumer gets `ReplicaLost(LEFT)` for each during this call.
        """
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        for replica_id in tuple(self._connections):
            self.disconnect(replica_id)
        async with asyncio.timeout(_CLOSE_DEADLINE_S):
            # Every socket was closed on this thread, as ZMQ wants it; this waits for its own.
            await asyncio.to_thread(self._context.term)


class _ReplicaConnection:
    """Keeps a session with the replica at `address` until it is closed.

    Theory of operation:

        WAITING ─retry is due─▶ CONNECTING ─Welcome─▶ JOINED ─┐
           ▲                        │ refused, broken         │ timeout, goodbye, gap, bad frame
           └────────────────────────┴─────────────────────────┘

    Each session has a socket with a routing id of its own, so no frame of an earlier session
    reaches it. Closing the socket drops all frames queued for a dead peer. Leaving JOINED emits
    `ReplicaLost` exactly once. All entry points are synchronous on the event loop; `on_event` may
    call back into this object, so after each event the state is read anew.
    """

    def __init__(self, replica_id: str, address: str, link_context: _LinkContext) -> None:
        self.replica_id = replica_id
        self.address = address
        self.facts: ReplicaFacts | None = None
        self.rejection_reason: str | None = None
        """Why the last session could not be opened."""
        self._link_context = link_context
        self._loop = asyncio.get_running_loop()
        self._state = _State.WAITING
        self._closed = False
        self._connected = False
        self._channel: Channel | None = None
        self._monitor: ConnectionMonitor | None = None
        self._session = ""
        self._next_seq = 1
        self._draining = False
        self._role_epoch = 0
        self._sent_since_tick = False
        self._idle = False
        """Its last heartbeat reported no work, and nothing was sent since."""
        self._ticks_since_sent = 0
        self._idle_beat_divisor = link_context.options.idle_beat_divisor
        self._unsent_aborts: dict[str, None] = {}
        self._last_received_at_s = 0.0
        self._opened_at_s = 0.0
        self._heartbeat_monitor = HeartbeatMonitor(
            link_context.options.heartbeat_timeout_s,
            0.0,
            idle_extra_s=link_context.options.idle_extra_s,
        )
        self._reconnect_delay_s = link_context.options.reconnect_s
        self._retry_at_s = self._loop.time()
        self.tick(self._retry_at_s, stalled=False)

    @property
    def joined(self) -> bool:
        """Whether legs can be sent now."""
        return self._state is _State.JOINED

    # ------------------------------------------------------------------ sending

    def submit(self, leg: Leg) -> LegFailure | None:
        """Queue a leg, or say why not."""
        if self._state is not _State.JOINED:
            return LegFailure.UNREACHABLE
        try:
            parts = codec.encode(frames.Submit(leg))
        except ValueError as error:
            self._log_unsendable(leg.leg_id, str(error))
            return LegFailure.INVALID
        if max(map(len, parts)) > self._link_context.options.max_part_bytes:
            max_bytes = self._link_context.options.max_part_bytes
            reason = f"{max(map(len, parts))} bytes, expected at most {max_bytes} in one part"
            self._log_unsendable(leg.leg_id, reason)
            return LegFailure.INVALID
        self._idle = False
        self._heartbeat_monitor.set_busy(self._loop.time())
        match self._send(parts):
            case SendResult.QUEUED:
                return None
            case SendResult.QUEUE_FULL:
                return LegFailure.OVERLOADED
            case SendResult.NOT_CONNECTED:
                return LegFailure.UNREACHABLE

    def abort(self, leg_ids: Sequence[str]) -> None:
        """Request an abort now, or as soon as the queue has room: it must not be lost."""
        if self._state is _State.JOINED:
            self._unsent_aborts.update(dict.fromkeys(leg_ids))
            self._send_aborts()

    def release(self, kv_handle: KvHandle) -> None:
        """Request a release; dropped by a full queue, for the lease expires anyway."""
        self._send_or_drop(frames.Release(kv_handle.tokens, kv_handle.blocks, kv_handle.params))

    def sync_cache(self) -> None:
        """Request a snapshot of the prefix cache; dropped by a full queue."""
        self._send_or_drop(frames.SyncCache())

    def check_side_channel(self, source_id: str, address: str) -> None:
        """Request a check of another replica; dropped by a full queue."""
        self._send_or_drop(frames.CheckSideChannel(source_id, address))

    def report_broken_agent(self, reason: str) -> None:
        """Report that the replica's agent is broken; dropped by a full queue."""
        self._send_or_drop(frames.AgentBroken(reason[: frames.MAX_REASON_CHARS]))

    def _send_or_drop(
        self,
        frame: frames.Release | frames.SyncCache | frames.CheckSideChannel | frames.AgentBroken,
    ) -> None:
        if self._state is not _State.JOINED:
            return
        try:
            parts = codec.encode(frame)
        except ValueError as error:
            self._log_unsendable(type(frame).__name__, str(error))
            return
        if self._send(parts) is not SendResult.QUEUED:
            self._link_context.counters.dropped_frames += 1

    def _log_unsendable(self, subject: str, reason: str) -> None:
        fields = {"what": subject, "replica_id": self.replica_id, "reason": reason}
        log_event(_LOG, logging.WARNING, "not_sendable", fields)

    def _send_aborts(self) -> None:
        waiting = tuple(self._unsent_aborts)
        for start in range(0, len(waiting), frames.MAX_IDS_IN_FRAME):
            leg_ids = waiting[start : start + frames.MAX_IDS_IN_FRAME]
            if self._send(codec.encode(frames.Abort(leg_ids))) is not SendResult.QUEUED:
                return
            for leg_id in leg_ids:
                del self._unsent_aborts[leg_id]

    def _send(self, parts: Sequence[bytes]) -> SendResult:
        if self._channel is None:
            return SendResult.NOT_CONNECTED
        result = self._channel.send(parts)
        self._sent_since_tick |= result is SendResult.QUEUED
        return result

    def _send_open(self) -> None:
        open_frame = frames.Open(
            frames.PROTOCOL_VERSION, self._link_context.coordinator_id, self._session
        )
        self._send(codec.encode(open_frame))

    # ------------------------------------------------------------------ time

    def tick(self, now_s: float, *, stalled: bool) -> None:
        """Send heartbeats, check liveness, retry.

        `stalled`: this process itself did not run just before, so no replica can be blamed.
        """
        if self._state is _State.JOINED:
            self._tick_joined(now_s, stalled=stalled)
        elif self._state is _State.CONNECTING:
            if now_s - self._last_received_at_s >= self._link_context.options.heartbeat_timeout_s:
                self._last_received_at_s = now_s
                if self._connected:
                    self._send_open()
        elif now_s >= self._retry_at_s:
            self._open_session(now_s)

    def _tick_joined(self, now_s: float, *, stalled: bool) -> None:
        if self._heartbeat_monitor.expired(now_s, stalled=stalled):
            self._end_session(LossReason.UNRESPONSIVE)
            return
        if self._unsent_aborts:
            self._send_aborts()
        self._ticks_since_sent = 0 if self._sent_since_tick else self._ticks_since_sent + 1
        if self._ticks_since_sent >= (self._idle_beat_divisor if self._idle else 1):
            self._send(_BEAT)
            self._ticks_since_sent = 0
        self._sent_since_tick = False

    # ------------------------------------------------------------------ sessions

    def _open_session(self, now_s: float) -> None:
        link_context = self._link_context
        self._session = link_context.new_session()
        self._opened_at_s = self._loop.time()
        self._state = _State.CONNECTING
        self._connected = False
        self._next_seq = 1
        self._draining = self._idle = False
        self._role_epoch = 0
        self._last_received_at_s = now_s
        socket = link_context.context.socket(zmq.DEALER)
        configure(socket, self.address, link_context.options)
        socket.setsockopt(
            zmq.ROUTING_ID, f"{link_context.coordinator_id}/{self._session}"[-255:].encode()
        )
        self._monitor = ConnectionMonitor(
            socket, on_connected=self._on_connected, on_disconnected=self._on_disconnected
        )
        self._channel = Channel(
            socket,
            self._on_message,
            batch_frames=link_context.options.batch_frames,
            counters=link_context.counters,
            parts=codec.REPLICA_PARTS,
        )
        link_context.counters.sessions += 1
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            self._on_rejected(f"cannot connect: {error}")

    def _on_connected(self) -> None:
        self._connected = True
        self._send_open()

    def _on_disconnected(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.drain()  # frames before the break count, a parting word above all
        if channel is not self._channel:
            return
        if (
            not self._connected
            and self._reconnect_delay_s >= self._link_context.options.reconnect_max_s
        ):
            waited_s = self._loop.time() - self._opened_at_s
            is_late = waited_s >= self._link_context.options.handshake_s
            self._on_rejected(_HANDSHAKE_LATE if is_late else _HANDSHAKE_REFUSED)
        else:
            self._end_session(LossReason.DISCONNECTED)

    def _end_session(self, reason: LossReason, detail: str = "") -> None:
        was_joined = self._state is _State.JOINED
        self._close_socket()
        self._state = _State.WAITING
        self._unsent_aborts.clear()
        self.facts = None
        if was_joined:
            self._reconnect_delay_s = self._link_context.options.reconnect_s
        self._retry_at_s = self._loop.time() + self._reconnect_delay_s
        self._reconnect_delay_s = min(
            2 * self._reconnect_delay_s, self._link_context.options.reconnect_max_s
        )
        if was_joined:
            self._link_context.counters.sessions_lost += not self._closed
            self._link_context.on_event(
                ReplicaLost(replica_id=self.replica_id, reason=reason, detail=detail)
            )

    def _on_rejected(self, reason: str) -> None:
        if reason != self.rejection_reason:
            fields = {"replica_id": self.replica_id, "address": self.address, "reason": reason}
            log_event(_LOG, logging.ERROR, "session_refused", fields)
        self.rejection_reason = reason
        self._reconnect_delay_s = self._link_context.options.reconnect_max_s
        self._end_session(LossReason.OUT_OF_SYNC)

    def close(self) -> None:
        """Say goodbye and forget the replica; `ReplicaLost(LEFT)` if it had joined. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._state is _State.JOINED:
            self._send(codec.encode(frames.Close(CloseReason.CLOSED)))
        self._close_socket(linger_s=_CLOSE_LINGER_S)
        if self._state is _State.JOINED:
            self._end_session(LossReason.LEFT)

    def _close_socket(self, *, linger_s: float = 0.0) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._channel is not None:
            self._channel.close(linger_s=linger_s)
            self._channel = None

    # ------------------------------------------------------------------ receiving

    def _on_message(self, parts: list[bytes]) -> None:
        try:
            self._on_frame(codec.decode_from_replica(parts))
        except BadFrame as error:
            self._link_context.counters.bad_frames += 1
            self._on_rejected(str(error))

    def _on_frame(self, frame: frames.FromReplica) -> None:
        self._last_received_at_s = self._loop.time()
        self._heartbeat_monitor.beat(self._last_received_at_s)
        if isinstance(frame, frames.Accept):
            self._on_accept(frame)
        elif isinstance(frame, frames.Close):
            self._on_close(frame)
        elif self._state is not _State.JOINED:
            self._link_context.counters.dropped_frames += 1
        elif isinstance(frame, frames.Step):
            self._on_step(frame)
        else:
            self._on_joined_frame(frame)

    def _on_step(self, step: frames.Step) -> None:
        if step.seq != self._next_seq:
            self._end_session(LossReason.OUT_OF_SYNC)
            return
        self._next_seq += 1
        self._link_context.on_event(StepCompleted(replica_id=self.replica_id, outputs=step.outputs))

    def _on_joined_frame(
        self,
        frame: frames.LegFailed
        | frames.Aborted
        | frames.ReplicaBeat
        | frames.RoleChanged
        | frames.CacheUpdate
        | frames.LinkReport
        | frames.SideChannelChecked,
    ) -> None:
        emit, replica_id = self._link_context.on_event, self.replica_id
        match frame:
            case frames.LegFailed(leg_id, failure, reason):
                emit(
                    LegFailed(replica_id=replica_id, leg_id=leg_id, failure=failure, reason=reason)
                )
            case frames.Aborted(leg_ids):
                emit(LegsAborted(replica_id=replica_id, leg_ids=leg_ids))
            case frames.ReplicaBeat():
                self._on_beat(frame)
            case frames.RoleChanged():
                self._on_role_changed(frame)
            case frames.CacheUpdate(update):
                emit(CacheChanged(replica_id=replica_id, update=update))
            case frames.LinkReport(links):
                self._emit_if_valid(links, LinksReported(replica_id=replica_id, links=links))
            case frames.SideChannelChecked(source_id, is_reachable, elapsed_s, reason):
                event = SideChannelChecked(
                    replica_id=replica_id,
                    source_id=source_id,
                    is_reachable=is_reachable,
                    elapsed_s=elapsed_s,
                    reason=reason,
                )
                self._emit_if_valid((elapsed_s,), event)
            case _:
                assert_never(frame)

    def _emit_if_valid(self, values: tuple[object, ...], event: Event) -> None:
        if _is_sane(values):
            self._link_context.on_event(event)
        else:
            self._link_context.counters.bad_frames += 1

    def _on_beat(self, beat: frames.ReplicaBeat) -> None:
        event = LoadReported(
            replica_id=self.replica_id, load=beat.load, received_legs=beat.received_legs
        )
        self._idle = not beat.load.total_requests
        if self._idle:
            self._heartbeat_monitor.set_idle()
        else:
            self._heartbeat_monitor.set_busy(self._last_received_at_s)
        self._emit_if_valid(beat.load, event)
        if beat.draining and not self._draining and self._state is _State.JOINED:
            self._draining = True
            self._link_context.on_event(ReplicaDraining(replica_id=self.replica_id))

    def _on_role_changed(self, changed: frames.RoleChanged) -> None:
        if changed.epoch <= self._role_epoch or self.facts is None:
            self._link_context.counters.dropped_frames += 1
            return
        self._role_epoch = changed.epoch
        self.facts = replace(self.facts, role=changed.role)
        self._link_context.on_event(RoleChanged(replica_id=self.replica_id, role=changed.role))

    def _on_accept(self, accept: frames.Accept) -> None:
        if self._state is _State.JOINED or accept.session_id != self._session:
            self._link_context.counters.dropped_frames += 1
            return
        facts = accept.facts
        if facts.replica_id != self.replica_id:
            self._on_rejected(
                f"replica {facts.replica_id} answers there, expected {self.replica_id}"
            )
            return
        self.facts = facts
        self.rejection_reason = None
        self._state = _State.JOINED
        self._heartbeat_monitor.set_busy(
            self._last_received_at_s
        )  # until its first beat says otherwise
        self._link_context.on_event(ReplicaJoined(facts=facts))

    def _on_close(self, close_frame: frames.Close) -> None:
        if self._state is not _State.JOINED:
            self._on_rejected(close_frame.detail or close_frame.reason)
            return
        if close_frame.detail:
            fields = {"replica_id": self.replica_id, "reason": close_frame.detail}
            log_event(_LOG, logging.WARNING, "session_ended", fields)
        self._end_session(frames.LOSS_REASONS[close_frame.reason], close_frame.detail)


def _is_sane(values: tuple[object, ...]) -> bool:
    """Whether all numbers are finite and not negative, and no text is too long, however nested."""
    for value in values:
        match value:
            case tuple():
                is_valid = _is_sane(value)
            case str():
                is_valid = len(value) <= MAX_ID_CHARS
            case int() | float():
                is_valid = math.isfinite(value) and value >= 0
            case _:
                is_valid = False
        if not is_valid:
            return False
    return True
