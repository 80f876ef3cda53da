"""One coordinator's connection to one replica: its sessions, one after another.

Theory of operation:

    WAITING ─retry is due─▶ CONNECTING ─Welcome─▶ JOINED ─┐
       ▲                        │ refused, broken         │ silent, broken, goodbye, gap, bad frame
       └────────────────────────┴─────────────────────────┘

Each session has a socket of its own with a routing id of its own, so no frame of an earlier session
can reach a later one, and closing the socket drops whatever was queued for a dead peer. Leaving
JOINED emits `ReplicaLost` exactly once. All entry points are synchronous and run on the event loop;
`on_event` may call back into this object at any time, so after each event the state is read anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
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
    StepProduced,
)
from baton.domain.fleet import LossReason, ReplicaFacts
from baton.domain.handoff import Leg, LegFailure, Ticket
from baton.runtime.link import codec, frames
from baton.runtime.link.channel import Channel, ConnectionMonitor, Sent, configure
from baton.runtime.link.codec import BadFrame
from baton.runtime.link.frames import Parting
from baton.runtime.link.liveness import Silence
from baton.runtime.link.options import LinkCounters, LinkOptions
from baton.runtime.link.sanity import is_sane
from baton.runtime.process.log_events import log_event

_LOG = logging.getLogger(__name__)

_PARTING_LINGER_S = 0.1
_BEAT = codec.encode(frames.CoordinatorBeat())
_HUNG_UP = "it hangs up on us: its link keys are other ones, or it is no replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """What all connections of one coordinator share."""

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


class ReplicaConnection:
    """Keeps a session with the replica at `address` for as long as it is not closed."""

    def __init__(self, replica_id: str, address: str, end: LinkEnd) -> None:
        self.replica_id = replica_id
        self.address = address
        self.facts: ReplicaFacts | None = None
        self.refusal: str | None = None
        """Why the replica, or this side, would not open the last session."""
        self._end = end
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
        self._said_something = False
        self._idle = False
        """By its last beat the replica has nothing to do, and was sent nothing since."""
        self._unsaid_turns = 0
        self._idle_beats = end.options.idle_beats
        self._unsent_aborts: dict[str, None] = {}
        self._heard_at_s = 0.0
        self._silence = Silence(end.options.liveness_s, 0.0, rest_s=end.options.rest_s)
        self._pause_s = end.options.reconnect_s
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
            self._say_unsendable(leg.leg_id, str(error))
            return LegFailure.INVALID
        if max(map(len, parts)) > self._end.options.max_part_bytes:
            most_bytes = self._end.options.max_part_bytes
            why = f"{max(map(len, parts))} bytes, wanted at most {most_bytes} in one part"
            self._say_unsendable(leg.leg_id, why)
            return LegFailure.INVALID
        self._idle = False
        self._silence.works(self._loop.time())
        match self._send(parts):
            case Sent.QUEUED:
                return None
            case Sent.FULL:
                return LegFailure.OVERLOADED
            case Sent.NOBODY:
                return LegFailure.UNREACHABLE

    def abort(self, leg_ids: Sequence[str]) -> None:
        """Ask for an abort now, or as soon as the queue has room: it must not be lost."""
        if self._state is _State.JOINED:
            self._unsent_aborts.update(dict.fromkeys(leg_ids))
            self._send_aborts()

    def release(self, ticket: Ticket) -> None:
        """Ask for a release; lost when the queue is full, for the lease expires anyway."""
        self._send_or_drop(frames.Release(ticket.tokens, ticket.blocks, ticket.params))

    def sync_cache(self) -> None:
        """Ask for a snapshot of the prefix cache; lost when the queue is full."""
        self._send_or_drop(frames.SyncCache())

    def check_side_channel(self, source_id: str, address: str) -> None:
        """Have the replica check that it could pull from another; lost when the queue is full."""
        self._send_or_drop(frames.CheckSideChannel(source_id, address))

    def report_broken_agent(self, why: str) -> None:
        """Tell the replica that its agent is broken; lost when the queue is full."""
        self._send_or_drop(frames.AgentBroken(why[: frames.MAX_WHY_CHARS]))

    def _send_or_drop(
        self,
        frame: frames.Release | frames.SyncCache | frames.CheckSideChannel | frames.AgentBroken,
    ) -> None:
        if self._state is not _State.JOINED:
            return
        try:
            parts = codec.encode(frame)
        except ValueError as error:
            self._say_unsendable(type(frame).__name__, str(error))
            return
        if self._send(parts) is not Sent.QUEUED:
            self._end.counters.dropped_frames += 1

    def _say_unsendable(self, what: str, why: str) -> None:
        told = {"what": what, "replica_id": self.replica_id, "reason": why}
        log_event(_LOG, logging.WARNING, "not_sendable", told)

    def _send_aborts(self) -> None:
        waiting = tuple(self._unsent_aborts)
        for start in range(0, len(waiting), frames.MAX_IDS_IN_FRAME):
            leg_ids = waiting[start : start + frames.MAX_IDS_IN_FRAME]
            if self._send(codec.encode(frames.Abort(leg_ids))) is not Sent.QUEUED:
                return
            for leg_id in leg_ids:
                del self._unsent_aborts[leg_id]

    def _send(self, parts: Sequence[bytes]) -> Sent:
        if self._channel is None:
            return Sent.NOBODY
        sent = self._channel.send(parts)
        self._said_something |= sent is Sent.QUEUED
        return sent

    def _say_hello(self) -> None:
        hello = frames.Hello(frames.PROTOCOL, self._end.coordinator_id, self._session)
        self._send(codec.encode(hello))

    # ------------------------------------------------------------------ time

    def tick(self, now_s: float, *, stalled: bool) -> None:
        """Do what time asks for: beats, liveness, retries.

        `stalled`: this process itself did not run just before; nobody can be blamed for that.
        """
        if self._state is _State.JOINED:
            self._tick_joined(now_s, stalled=stalled)
        elif self._state is _State.CONNECTING:
            if now_s - self._heard_at_s >= self._end.options.liveness_s:
                self._heard_at_s = now_s
                if self._connected:
                    self._say_hello()
        elif now_s >= self._retry_at_s:
            self._open(now_s)

    def _tick_joined(self, now_s: float, *, stalled: bool) -> None:
        if self._silence.too_long(now_s, stalled=stalled):
            self._lose(LossReason.SILENT)
            return
        if self._unsent_aborts:
            self._send_aborts()
        self._unsaid_turns = 0 if self._said_something else self._unsaid_turns + 1
        if self._unsaid_turns >= (self._idle_beats if self._idle else 1):
            self._send(_BEAT)
            self._unsaid_turns = 0
        self._said_something = False

    # ------------------------------------------------------------------ sessions

    def _open(self, now_s: float) -> None:
        end = self._end
        self._session = end.new_session()
        self._state = _State.CONNECTING
        self._connected = False
        self._next_seq = 1
        self._draining = self._idle = False
        self._role_epoch = 0
        self._heard_at_s = now_s
        socket = end.context.socket(zmq.DEALER)
        configure(socket, self.address, end.options)
        socket.setsockopt(zmq.ROUTING_ID, f"{end.coordinator_id}/{self._session}"[-255:].encode())
        self._monitor = ConnectionMonitor(
            socket, on_connected=self._on_connected, on_disconnected=self._on_disconnected
        )
        self._channel = Channel(
            socket,
            self._on_message,
            batch_frames=end.options.batch_frames,
            counters=end.counters,
            parts=codec.REPLICA_PARTS,
        )
        end.counters.sessions += 1
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            self._refuse(f"cannot connect: {error}")

    def _on_connected(self) -> None:
        self._connected = True
        self._say_hello()

    def _on_disconnected(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.drain()  # what arrived before the break counts, a parting word above all
        if channel is not self._channel:
            return
        if not self._connected and self._pause_s >= self._end.options.reconnect_max_s:
            self._refuse(_HUNG_UP)
        else:
            self._lose(LossReason.DISCONNECTED)

    def _lose(self, reason: LossReason) -> None:
        was_joined = self._state is _State.JOINED
        self._close_socket()
        self._state = _State.WAITING
        self._unsent_aborts.clear()
        self.facts = None
        if was_joined:
            self._pause_s = self._end.options.reconnect_s
        self._retry_at_s = self._loop.time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._end.options.reconnect_max_s)
        if was_joined:
            self._end.counters.sessions_lost += not self._closed
            self._end.on_event(ReplicaLost(replica_id=self.replica_id, reason=reason))

    def _refuse(self, why: str) -> None:
        if why != self.refusal:
            told = {"replica_id": self.replica_id, "address": self.address, "reason": why}
            log_event(_LOG, logging.ERROR, "session_refused", told)
        self.refusal = why
        self._pause_s = self._end.options.reconnect_max_s
        self._lose(LossReason.OUT_OF_STEP)

    def close(self) -> None:
        """Say goodbye and forget the replica; `ReplicaLost(LEFT)` if it had joined. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._state is _State.JOINED:
            self._send(codec.encode(frames.Goodbye(Parting.CLOSED)))
        self._close_socket(linger_s=_PARTING_LINGER_S)
        if self._state is _State.JOINED:
            self._lose(LossReason.LEFT)

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
            self._end.counters.bad_frames += 1
            self._refuse(str(error))

    def _on_frame(self, frame: frames.FromReplica) -> None:
        self._heard_at_s = self._loop.time()
        self._silence.broken(self._heard_at_s)
        if isinstance(frame, frames.Welcome):
            self._on_welcome(frame)
        elif isinstance(frame, frames.Goodbye):
            self._on_goodbye(frame)
        elif self._state is not _State.JOINED:
            self._end.counters.dropped_frames += 1
        elif isinstance(frame, frames.Step):
            self._on_step(frame)
        else:
            self._on_joined_frame(frame)

    def _on_step(self, step: frames.Step) -> None:
        if step.seq != self._next_seq:
            self._lose(LossReason.OUT_OF_STEP)
            return
        self._next_seq += 1
        self._end.on_event(StepProduced(replica_id=self.replica_id, outputs=step.outputs))

    def _on_joined_frame(
        self,
        frame: frames.LegEnded
        | frames.Aborted
        | frames.ReplicaBeat
        | frames.RoleChanged
        | frames.CacheUpdate
        | frames.Links
        | frames.SideChannelChecked,
    ) -> None:
        emit, replica_id = self._end.on_event, self.replica_id
        match frame:
            case frames.LegEnded(leg_id, failure, why):
                emit(LegFailed(replica_id=replica_id, leg_id=leg_id, failure=failure, why=why))
            case frames.Aborted(leg_ids):
                emit(LegsAborted(replica_id=replica_id, leg_ids=leg_ids))
            case frames.ReplicaBeat():
                self._on_beat(frame)
            case frames.RoleChanged():
                self._on_role(frame)
            case frames.CacheUpdate(update):
                emit(CacheChanged(replica_id=replica_id, update=update))
            case frames.Links(links):
                self._emit_if_sane(links, LinksReported(replica_id=replica_id, links=links))
            case frames.SideChannelChecked(source_id, ok, took_s, why):
                checked = SideChannelChecked(
                    replica_id=replica_id, source_id=source_id, ok=ok, took_s=took_s, why=why
                )
                self._emit_if_sane((took_s,), checked)
            case _:
                assert_never(frame)

    def _emit_if_sane(self, figures: tuple[object, ...], event: Event) -> None:
        if is_sane(figures):
            self._end.on_event(event)
        else:
            self._end.counters.bad_frames += 1

    def _on_beat(self, beat: frames.ReplicaBeat) -> None:
        reported = LoadReported(
            replica_id=self.replica_id, load=beat.load, received_legs=beat.received_legs
        )
        self._idle = not beat.load.requests
        if self._idle:
            self._silence.rests()
        else:
            self._silence.works(self._heard_at_s)
        self._emit_if_sane(beat.load, reported)
        if beat.draining and not self._draining and self._state is _State.JOINED:
            self._draining = True
            self._end.on_event(ReplicaDraining(replica_id=self.replica_id))

    def _on_role(self, changed: frames.RoleChanged) -> None:
        if changed.epoch <= self._role_epoch or self.facts is None:
            self._end.counters.dropped_frames += 1
            return
        self._role_epoch = changed.epoch
        self.facts = replace(self.facts, role=changed.role)
        self._end.on_event(RoleChanged(replica_id=self.replica_id, role=changed.role))

    def _on_welcome(self, welcome: frames.Welcome) -> None:
        if self._state is _State.JOINED or welcome.session != self._session:
            self._end.counters.dropped_frames += 1
            return
        facts = welcome.facts
        if facts.replica_id != self.replica_id:
            self._refuse(f"replica {facts.replica_id} answers there, wanted {self.replica_id}")
            return
        self.facts = facts
        self.refusal = None
        self._state = _State.JOINED
        self._silence.works(self._heard_at_s)  # until its first beat says otherwise
        self._end.on_event(ReplicaJoined(facts=facts))

    def _on_goodbye(self, goodbye: frames.Goodbye) -> None:
        if self._state is not _State.JOINED:
            self._refuse(goodbye.why or goodbye.reason)
            return
        if goodbye.why:
            told = {"replica_id": self.replica_id, "reason": goodbye.why}
            log_event(_LOG, logging.WARNING, "session_ended", told)
        self._lose(frames.LOSS[goodbye.reason])
