"""The replica's end of the fleet link: one bound socket, a session for each coordinator.

Theory of operation: a session begins with `Open`. It ends when its coordinator says goodbye, times
out, disconnects, opens a newer session, sends a bad frame, or lets its send queue fill up. Its legs
then go to `_LinkHandler.orphan` to be aborted. A frame from a peer without a session is answered
with `Close(NO_SESSION)`, so a coordinator learns of a lost session with its next heartbeat. Nothing
here waits. Frames that a full queue may drop go through `reports`; all others end the session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, assert_never

import zmq

from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegOutput
from baton.runtime.link import codec, frames
from baton.runtime.link.authenticator import ZapAuthenticator
from baton.runtime.link.channel import Channel, SendResult, configure
from baton.runtime.link.codec import BadFrame, ProtocolMismatch
from baton.runtime.link.frames import CloseReason
from baton.runtime.link.liveness import HeartbeatMonitor
from baton.runtime.link.options import LinkCounters, LinkOptions, next_tick_at_s
from baton.runtime.link.reports import Reports
from baton.runtime.link.sessions import LegOwners, Session
from baton.runtime.process.log_events import log_event

_LOG = logging.getLogger(__name__)
_CLOSE_DEADLINE_S = 5.0
_CLOSE_LINGER_S = 0.1
_INGRESS_UNRESPONSIVE = "an ingress stood still, or the network lost its heartbeats"


class _LinkHandler(Protocol):
    """The runner of legs. Called synchronously on the event loop; must not wait."""

    def submit(self, leg: Leg) -> None:
        """Run a leg; it has an owner until it ends."""
        ...

    def abort(self, leg_ids: tuple[str, ...]) -> None:
        """Stop these owned legs, then call `LinkServer.send_legs_aborted`."""
        ...

    def orphan(self, leg_ids: tuple[str, ...]) -> None:
        """Stop these legs, which have no owner; send no reply."""
        ...

    def release(self, kv_handle: KvHandle) -> None:
        """Release blocks: no replica will pull this KV handle."""
        ...

    def load_status(self) -> tuple[Load, bool]:
        """The load with all submitted legs, and whether the replica drains; every `beat_s`."""
        ...

    def links(self) -> Iterable[LinkTotals]:
        """The pulls so far, by source; called once every `beat_s`."""
        ...

    def sync_cache(self, *, immediately: bool) -> None:
        """Sessions want a snapshot of the prefix cache through `LinkServer.reports`.

        At once, or as soon as a snapshot is due: a frequent caller gets no more than it can read.
        """
        ...

    def check_side_channel(self, source_id: str, address: str) -> bool:
        """Check pulls from `source_id` and tell `LinkServer.reports`; False when too many wait."""
        ...

    def report_broken_agent(self, reason: str) -> None:
        """The engine can pull from no source, though others can."""
        ...


class LinkServer:
    """Serves coordinators on one address; lives on one running event loop."""

    def __init__(
        self, facts: ReplicaFacts, handler: _LinkHandler, *, options: LinkOptions | None = None
    ) -> None:
        self.counters = LinkCounters()
        self._facts = facts
        self._role_epoch = 0
        self._handler = handler
        self._options = options or LinkOptions()
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: Channel | None = None
        self._authenticator: ZapAuthenticator | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tick_due_at_s = 0.0
        self._sessions: dict[bytes, Session] = {}
        self._legs = LegOwners()
        self.reports = Reports(self._sessions, self._try_send)
        self._close_frame: frames.Close | None = None
        self._logged_mismatch = ""

    def bind(self, address: str) -> str:
        """Start to serve; returns the real address, also for port 0.

        Raises:
            OSError: the address cannot be bound; the text names it.
        """
        socket = self._context.socket(zmq.ROUTER)
        configure(socket, address, self._options)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        authenticator = ZapAuthenticator(
            self._context, socket, options=self._options, counters=self.counters
        )
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            authenticator.close()
            socket.close(linger=0)
            raise OSError(error.errno, f"fleet link cannot bind {address}: {error}") from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._authenticator = authenticator
        self._channel = Channel(
            socket,
            self._on_message,
            batch_frames=self._options.batch_frames,
            counters=self.counters,
        )
        self._tick_due_at_s = self._loop.time() + self._options.heartbeat_interval_s
        self._timer = self._loop.call_at(self._tick_due_at_s, self._tick)
        return bound

    # ------------------------------------------------------------------ what the host asks

    @property
    def facts(self) -> ReplicaFacts:
        """The facts for new sessions."""
        return self._facts

    @property
    def live_legs(self) -> int:
        """Legs that a session owns."""
        return len(self._legs.by_leg)

    @property
    def coordinators(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def owns(self, leg_id: str) -> bool:
        """Whether a session still waits for this leg."""
        return leg_id in self._legs.by_leg

    # ------------------------------------------------------------------ what the host says

    def send_step(self, outputs: Iterable[LegOutput]) -> None:
        """Send one engine step: one frame to each coordinator that has legs in it."""
        owners = self._legs.by_leg
        outputs_by_session: dict[Session, list[LegOutput]] = {}
        for output in outputs:
            session = owners.get(output.leg_id)
            if session is None:
                self.counters.unowned_outputs += 1
                continue
            outputs_by_session.setdefault(session, []).append(output)
            if output.finish is not None:
                self._legs.unassign(output.leg_id)
        for session, session_outputs in outputs_by_session.items():
            if self._sessions.get(session.peer) is session:
                self._send_step_frames(session, tuple(session_outputs))

    def _send_step_frames(self, session: Session, outputs: tuple[LegOutput, ...]) -> None:
        parts = codec.encode(frames.Step(session.next_seq, outputs))
        if len(parts[1]) <= self._options.max_part_bytes:
            session.next_seq += 1
            self._send(session, parts)
        elif len(outputs) > 1:
            middle = len(outputs) // 2
            self._send_step_frames(session, outputs[:middle])
            self._send_step_frames(session, outputs[middle:])
        else:
            self._fail_oversized_output(session, outputs[0].leg_id, len(parts[1]))

    def _fail_oversized_output(self, session: Session, leg_id: str, output_bytes: int) -> None:
        reason = f"output of {output_bytes} bytes, expected at most {self._options.max_part_bytes}"
        self._legs.unassign(leg_id)
        self._send(session, _leg_failed_frame(leg_id, LegFailure.ENGINE_ERROR, reason))
        self._handler.orphan((leg_id,))

    def send_leg_failed(self, leg_id: str, failure: LegFailure, reason: str = "") -> None:
        """Report a leg that did not finish; ignored without an owner."""
        session = self._legs.unassign(leg_id)
        if session is not None:
            self._send(session, _leg_failed_frame(leg_id, failure, reason))

    def send_legs_aborted(self, leg_ids: Iterable[str]) -> None:
        """Report to the sender that these legs no longer run, however they ended."""
        for session, session_leg_ids in self._legs.on_aborted(leg_ids).items():
            self._send(session, codec.encode(frames.Aborted(tuple(session_leg_ids))))

    def beat_now(self) -> None:
        """Send every coordinator a heartbeat now."""
        self._send_beats(tuple(self._sessions.values()))

    def change_role(self, role: Role) -> bool:
        """Tell every coordinator the replica's new role; False without a change.

        A session that cannot be notified is dropped: the next begins with the present facts.
        """
        if role is self._facts.role:
            return False
        self._facts = replace(self._facts, role=role)
        self._role_epoch += 1
        parts = codec.encode(frames.RoleChanged(role, self._role_epoch))
        for session in tuple(self._sessions.values()):
            self._send(session, parts)
        return True

    def close_sessions(self, reason: CloseReason, detail: str = "") -> None:
        """End every session, and answer every later `Open` with the same words.

        Legs are not handed to `orphan`: a replica that parts for good ends its engine, too.
        """
        self._close_frame = frames.Close(reason, detail[: frames.MAX_REASON_CHARS])
        for session in tuple(self._sessions.values()):
            self._send_to(session.peer, codec.encode(self._close_frame))
        self._sessions.clear()
        self._legs.clear()

    async def close(self) -> None:
        """Say goodbye, close the port and free all sockets. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._close_frame is None:
            self.close_sessions(CloseReason.CLOSED)
        if self._authenticator is not None:
            self._authenticator.close()
        if self._channel is not None:
            self._channel.close(linger_s=_CLOSE_LINGER_S)
        async with asyncio.timeout(_CLOSE_DEADLINE_S):
            await asyncio.to_thread(self._context.term)

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._tick_due_at_s
        beat_s = self._options.heartbeat_interval_s
        self._tick_due_at_s = next_tick_at_s(self._tick_due_at_s, now_s, beat_s, beat_s=beat_s)
        self._timer = self._loop.call_at(self._tick_due_at_s, self._tick)
        stalled = late_s > beat_s  # this process did not run
        for session in tuple(self._sessions.values()):
            if session.heartbeat_monitor.expired(now_s, stalled=stalled):
                close = frames.Close(CloseReason.UNRESPONSIVE, _INGRESS_UNRESPONSIVE)
                self._drop_session(session, close)
        self._send_beats(tuple(self._sessions.values()), skip_idle=True)

    def _send_beats(self, sessions: Sequence[Session], *, skip_idle: bool = False) -> None:
        load, draining = self._handler.load_status()
        self.reports.record_links(self._handler.links())
        for session in sessions:
            beat = frames.ReplicaBeat(load, draining, session.received_legs)
            if skip_idle and self._can_skip_beat(session, beat):
                continue
            session.on_beat_sent(beat, self._loop.time())
            self._send(session, codec.encode(beat))
            if self._sessions.get(session.peer) is session:
                self.reports.send_links(session)

    def _can_skip_beat(self, session: Session, beat: frames.ReplicaBeat) -> bool:
        """Whether a session knows all that a heartbeat would say: nothing is in flight here."""
        session.beats_since_sent += 1
        is_due = session.beats_since_sent >= self._options.idle_beat_divisor
        return not (
            is_due or session.legs or beat.load.total_requests or beat != session.last_sent_beat
        )

    # ------------------------------------------------------------------ sending

    def _send(self, session: Session, parts: list[bytes]) -> None:
        match self._send_to(session.peer, parts):
            case SendResult.QUEUED:
                return
            case SendResult.QUEUE_FULL:
                self._drop_session(session, None, reason="its send queue is full")
            case SendResult.NOT_CONNECTED:
                self._drop_session(session, None, reason="it is not connected")

    def _try_send(self, session: Session, parts: list[bytes]) -> bool:
        """Send a frame that may be dropped; False when it was."""
        if max(map(len, parts)) <= self._options.max_part_bytes:
            match self._send_to(session.peer, parts):
                case SendResult.QUEUED:
                    return True
                case SendResult.NOT_CONNECTED:
                    self._drop_session(session, None, reason="it is not connected")
                case SendResult.QUEUE_FULL:
                    pass
        self.counters.dropped_frames += 1
        return False

    def _send_to(self, peer: bytes, parts: list[bytes]) -> SendResult:
        if self._channel is None:
            return SendResult.NOT_CONNECTED
        return self._channel.send([peer, *parts])

    def _send_close(self, peer: bytes, close_frame: frames.Close) -> None:
        if self._send_to(peer, codec.encode(close_frame)) is not SendResult.QUEUED:
            self.counters.dropped_frames += 1

    # ------------------------------------------------------------------ sessions

    def _drop_session(
        self, session: Session, close_frame: frames.Close | None, *, reason: str | None = None
    ) -> None:
        if self._sessions.get(session.peer) is not session:
            return
        self._remove_session(session)
        self.counters.sessions_lost += 1
        fields = {
            "coordinator_id": session.coordinator_id,
            "reason": reason or (close_frame and (close_frame.detail or close_frame.reason)),
            "aborted_legs": len(session.legs),
        }
        log_event(_LOG, logging.WARNING, "session_dropped", fields)
        if close_frame is not None:
            self._send_close(session.peer, close_frame)
        self._orphan_legs(session)

    def _remove_session(self, session: Session) -> None:
        del self._sessions[session.peer]
        self._legs.remove_session(session)

    def _orphan_legs(self, session: Session) -> None:
        if session.legs:
            self._handler.orphan(tuple(session.legs))

    # ------------------------------------------------------------------ receiving

    def _on_message(self, parts: list[bytes]) -> None:
        peer, *frame = parts
        session = self._sessions.get(peer)
        try:
            decoded = codec.decode_from_coordinator(frame)
        except BadFrame as error:
            self._on_bad_frame(peer, session, error)
            return
        if isinstance(decoded, frames.Open):
            self._on_open(peer, decoded)
        elif session is None:
            self.counters.dropped_frames += 1
            if not isinstance(decoded, frames.Close):
                self._send_close(peer, self._close_frame or frames.Close(CloseReason.NO_SESSION))
        else:
            session.heartbeat_monitor.beat(self._loop.time())
            self._on_frame(session, decoded)

    def _on_bad_frame(self, peer: bytes, session: Session | None, error: BadFrame) -> None:
        self.counters.bad_frames += 1
        if session is not None:
            self._drop_session(session, frames.Close(CloseReason.BAD_FRAME, str(error)))
        elif isinstance(error, ProtocolMismatch):
            if error.reason != self._logged_mismatch:  # once, though coordinators go on trying
                log_event(_LOG, logging.ERROR, "coordinator_refused", {"reason": error.reason})
            self._logged_mismatch = error.reason
            self._send_close(peer, frames.Close(CloseReason.PROTOCOL_MISMATCH, error.reason))

    def _on_open(self, peer: bytes, open_frame: frames.Open) -> None:
        if self._close_frame is not None:
            self._send_close(peer, self._close_frame)
            return
        session_key = (peer, open_frame.coordinator_id, open_frame.session_id)
        for other in tuple(self._sessions.values()):
            same_peer = other.peer == peer or other.coordinator_id == open_frame.coordinator_id
            if same_peer and (other.peer, other.coordinator_id, other.session_id) != session_key:
                self._drop_session(other, frames.Close(CloseReason.REPLACED))
        session = self._sessions.get(peer) or self._open_session(peer, open_frame)
        if session is not None:
            session.heartbeat_monitor.beat(self._loop.time())
            accept_frame = frames.Accept(
                frames.PROTOCOL_VERSION, open_frame.session_id, self._facts
            )
            self._send(session, codec.encode(accept_frame))
            if session.needs_snapshot:  # before the beat, which names the update that it has
                self._handler.sync_cache(immediately=True)
            self._send_beats((session,))

    def _open_session(self, peer: bytes, open_frame: frames.Open) -> Session | None:
        if len(self._sessions) >= self._options.max_coordinators:
            reason = f"{len(self._sessions)} coordinators are connected, expected fewer"
            self._send_close(peer, frames.Close(CloseReason.TOO_MANY_COORDINATORS, reason))
            return None
        self.counters.sessions += 1
        session = Session(
            peer=peer,
            coordinator_id=open_frame.coordinator_id,
            session_id=open_frame.session_id,
            heartbeat_monitor=HeartbeatMonitor(
                self._options.heartbeat_timeout_s,
                self._loop.time(),
                idle_extra_s=self._options.idle_extra_s,
            ),
            needs_snapshot=True,
        )
        self._sessions[peer] = session
        return session

    def _on_frame(
        self,
        session: Session,
        frame: frames.Submit
        | frames.Abort
        | frames.Release
        | frames.CoordinatorBeat
        | frames.SyncCache
        | frames.CheckSideChannel
        | frames.AgentBroken
        | frames.Close,
    ) -> None:
        match frame:
            case frames.Submit(leg):
                self._on_submit(session, leg)
            case frames.Abort(leg_ids):
                self._on_abort(session, leg_ids)
            case frames.Release():
                self._handler.release(frame.kv_handle)
            case frames.CoordinatorBeat():
                pass
            case frames.SyncCache():
                session.needs_snapshot = True
                self._handler.sync_cache(immediately=False)
            case frames.CheckSideChannel(source_id, address):
                self._on_check(session, source_id, address)
            case frames.AgentBroken(reason):
                self._handler.report_broken_agent(reason)
            case frames.Close():
                self._remove_session(session)
                self._orphan_legs(session)
            case _:
                assert_never(frame)

    def _on_submit(self, session: Session, leg: Leg) -> None:
        session.received_legs += 1
        if self._legs.assign(session, leg.leg_id):
            self._handler.submit(leg)
        else:
            reason = f"a leg {leg.leg_id} runs here already"
            self._send(session, _leg_failed_frame(leg.leg_id, LegFailure.REJECTED, reason))

    def _on_abort(self, session: Session, leg_ids: tuple[str, ...]) -> None:
        new_ids, ended_ids = self._legs.request_abort(session, leg_ids)
        if new_ids:
            self._handler.abort(new_ids)
        if ended_ids:
            self._send(session, codec.encode(frames.Aborted(ended_ids)))

    def _on_check(self, session: Session, source_id: str, address: str) -> None:
        self.reports.add_check_requester(session, source_id, address)
        if not self._handler.check_side_channel(source_id, address):
            self.reports.drop_check_requesters(source_id, address)


def _leg_failed_frame(leg_id: str, failure: LegFailure, reason: str) -> list[bytes]:
    return codec.encode(frames.LegFailed(leg_id, failure, reason[: frames.MAX_REASON_CHARS]))
