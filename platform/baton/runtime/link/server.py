"""The replica's end of the fleet link: one bound socket, a session for each coordinator.

Theory of operation: a session begins with `Hello` and ends when its coordinator says goodbye, goes
silent, disconnects, opens a newer session, sends a bad frame, or lets its send queue fill up.
However it ends, its legs are handed to `LinkHandler.orphan` to be aborted: whoever waited for them
has gone, or has been told to start over. A frame from a peer without a session is answered with
`Goodbye(NO_SESSION)`, so a coordinator that missed the end of its session learns of it with its
next beat. Nothing here waits, and one coordinator's full queue costs no other anything. What may
be left out when a queue is full goes through `reports`; all else ends a session that has no room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import assert_never

import zmq

from baton.domain.fleet import ReplicaFacts, Role
from baton.domain.handoff import Leg, LegFailure, LegOutput
from baton.runtime.link import codec, frames
from baton.runtime.link.authenticator import Gate
from baton.runtime.link.channel import Channel, Sent, configure
from baton.runtime.link.codec import BadFrame, ProtocolMismatch
from baton.runtime.link.frames import Parting
from baton.runtime.link.handler import LinkHandler
from baton.runtime.link.liveness import Silence
from baton.runtime.link.options import LinkCounters, LinkOptions, next_tick_at_s
from baton.runtime.link.reports import Reports
from baton.runtime.link.sessions import LegOwners, Session
from baton.runtime.process.log_events import log_event

_LOG = logging.getLogger(__name__)
_CLOSE_DEADLINE_S = 5.0
_PARTING_LINGER_S = 0.1


class LinkServer:
    """Serves coordinators on one address. To be made, used and closed on one running event loop."""

    def __init__(
        self, facts: ReplicaFacts, handler: LinkHandler, *, options: LinkOptions | None = None
    ) -> None:
        self.counters = LinkCounters()
        self._facts = facts
        self._role_epoch = 0
        self._handler = handler
        self._options = options or LinkOptions()
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: Channel | None = None
        self._gate: Gate | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tick_due_at_s = 0.0
        self._sessions: dict[bytes, Session] = {}
        self._legs = LegOwners()
        self.reports = Reports(self._sessions, self._offer)
        self._parting: frames.Goodbye | None = None
        self._said_refusal = ""

    def bind(self, address: str) -> str:
        """Start to serve; returns the real address, also when port 0 asked for any free one.

        Raises:
            OSError: the address cannot be bound; the text names it.
        """
        socket = self._context.socket(zmq.ROUTER)
        configure(socket, address, self._options)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        gate = Gate(self._context, socket, options=self._options, counters=self.counters)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            gate.close()
            socket.close(linger=0)
            raise OSError(error.errno, f"fleet link cannot bind {address}: {error}") from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._gate = gate
        self._channel = Channel(
            socket,
            self._on_message,
            batch_frames=self._options.batch_frames,
            counters=self.counters,
        )
        self._tick_due_at_s = self._loop.time() + self._options.beat_s
        self._timer = self._loop.call_at(self._tick_due_at_s, self._tick)
        return bound

    # ------------------------------------------------------------------ what the host asks

    @property
    def facts(self) -> ReplicaFacts:
        """What new sessions are told."""
        return self._facts

    @property
    def live_legs(self) -> int:
        """Legs that a session owns."""
        return len(self._legs.by_leg)

    @property
    def coordinators(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    def owns(self, leg_id: str) -> bool:
        """Whether a session still waits for this leg."""
        return leg_id in self._legs.by_leg

    # ------------------------------------------------------------------ what the host says

    def step(self, outputs: Iterable[LegOutput]) -> None:
        """Send one engine step: one frame to each coordinator that has legs in it."""
        owners = self._legs.by_leg
        shares: dict[Session, list[LegOutput]] = {}
        for output in outputs:
            session = owners.get(output.leg_id)
            if session is None:
                self.counters.unowned_outputs += 1
                continue
            shares.setdefault(session, []).append(output)
            if output.finish is not None:
                self._legs.disown(output.leg_id)
        for session, share in shares.items():
            if self._sessions.get(session.peer) is session:
                self._send_step(session, tuple(share))

    def _send_step(self, session: Session, outputs: tuple[LegOutput, ...]) -> None:
        parts = codec.encode(frames.Step(session.next_seq, outputs))
        if len(parts[1]) <= self._options.max_part_bytes:
            session.next_seq += 1
            self._send(session, parts)
        elif len(outputs) > 1:
            middle = len(outputs) // 2
            self._send_step(session, outputs[:middle])
            self._send_step(session, outputs[middle:])
        else:
            self._give_up_output(session, outputs[0].leg_id, len(parts[1]))

    def _give_up_output(self, session: Session, leg_id: str, got_bytes: int) -> None:
        why = f"output of {got_bytes} bytes, wanted at most {self._options.max_part_bytes}"
        self._legs.disown(leg_id)
        self._send(session, _leg_ended(leg_id, LegFailure.ENGINE_ERROR, why))
        self._handler.orphan((leg_id,))

    def leg_failed(self, leg_id: str, failure: LegFailure, why: str = "") -> None:
        """Tell a leg's owner that it ended without finishing; ignored when nobody owns it."""
        session = self._legs.disown(leg_id)
        if session is not None:
            self._send(session, _leg_ended(leg_id, failure, why))

    def legs_aborted(self, leg_ids: Iterable[str]) -> None:
        """Tell whoever asked that these legs no longer run, also if they ended by themselves."""
        for session, share in self._legs.aborted(leg_ids).items():
            self._send(session, codec.encode(frames.Aborted(tuple(share))))

    def beat_now(self) -> None:
        """Tell every coordinator the load without waiting for the next beat."""
        self._beat(tuple(self._sessions.values()))

    def change_role(self, role: Role) -> bool:
        """Tell every coordinator what this replica is meant for from now on; False if it was so.

        A session that cannot be told is dropped: the next one begins with the present facts.
        """
        if role is self._facts.role:
            return False
        self._facts = replace(self._facts, role=role)
        self._role_epoch += 1
        parts = codec.encode(frames.RoleChanged(role, self._role_epoch))
        for session in tuple(self._sessions.values()):
            self._send(session, parts)
        return True

    def part(self, reason: Parting, why: str = "") -> None:
        """End every session, and answer every later hello with the same words.

        Legs are not handed to `orphan`: whoever parts for good ends its engine too.
        """
        self._parting = frames.Goodbye(reason, why[: frames.MAX_WHY_CHARS])
        for session in tuple(self._sessions.values()):
            self._send_to(session.peer, codec.encode(self._parting))
        self._sessions.clear()
        self._legs.clear()

    async def close(self) -> None:
        """Say goodbye, close the port and free all sockets. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._parting is None:
            self.part(Parting.CLOSED)
        if self._gate is not None:
            self._gate.close()
        if self._channel is not None:
            self._channel.close(linger_s=_PARTING_LINGER_S)
        async with asyncio.timeout(_CLOSE_DEADLINE_S):
            await asyncio.to_thread(self._context.term)

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._tick_due_at_s
        beat_s = self._options.beat_s
        self._tick_due_at_s = next_tick_at_s(self._tick_due_at_s, now_s, beat_s, beat_s=beat_s)
        self._timer = self._loop.call_at(self._tick_due_at_s, self._tick)
        stalled = late_s > beat_s  # this process did not run
        for session in tuple(self._sessions.values()):
            if session.silence.too_long(now_s, stalled=stalled):
                self._drop(session, frames.Goodbye(Parting.SILENT))
        self._beat(tuple(self._sessions.values()), unless_idle=True)

    def _beat(self, sessions: Sequence[Session], *, unless_idle: bool = False) -> None:
        load, draining = self._handler.beat()
        self.reports.note_links(self._handler.links())
        for session in sessions:
            beat = frames.ReplicaBeat(load, draining, session.received_legs)
            if unless_idle and self._says_enough(session, beat):
                continue
            session.say(beat, self._loop.time())
            self._send(session, codec.encode(beat))
            if self._sessions.get(session.peer) is session:
                self.reports.send_links(session)

    def _says_enough(self, session: Session, beat: frames.ReplicaBeat) -> bool:
        """Whether a session need not be told what it knows: nothing is under way here."""
        session.unsaid_beats += 1
        due = session.unsaid_beats >= self._options.idle_beats
        return not (due or session.legs or beat.load.requests or beat != session.said)

    # ------------------------------------------------------------------ sending

    def _send(self, session: Session, parts: list[bytes]) -> None:
        match self._send_to(session.peer, parts):
            case Sent.QUEUED:
                return
            case Sent.FULL:
                self._drop(session, None, why="its send queue is full")
            case Sent.NOBODY:
                self._drop(session, None, why="it is not connected")

    def _offer(self, session: Session, parts: list[bytes]) -> bool:
        """Send what may be left out; False when it was."""
        if max(map(len, parts)) <= self._options.max_part_bytes:
            match self._send_to(session.peer, parts):
                case Sent.QUEUED:
                    return True
                case Sent.NOBODY:
                    self._drop(session, None, why="it is not connected")
                case Sent.FULL:
                    pass
        self.counters.dropped_frames += 1
        return False

    def _send_to(self, peer: bytes, parts: list[bytes]) -> Sent:
        if self._channel is None:
            return Sent.NOBODY
        return self._channel.send([peer, *parts])

    def _tell(self, peer: bytes, goodbye: frames.Goodbye) -> None:
        if self._send_to(peer, codec.encode(goodbye)) is not Sent.QUEUED:
            self.counters.dropped_frames += 1

    # ------------------------------------------------------------------ sessions

    def _drop(
        self, session: Session, goodbye: frames.Goodbye | None, *, why: str | None = None
    ) -> None:
        if self._sessions.get(session.peer) is not session:
            return
        self._end(session)
        self.counters.sessions_lost += 1
        told = {
            "coordinator_id": session.coordinator_id,
            "reason": why or (goodbye and (goodbye.why or goodbye.reason)),
            "aborted_legs": len(session.legs),
        }
        log_event(_LOG, logging.WARNING, "session_dropped", told)
        if goodbye is not None:
            self._tell(session.peer, goodbye)
        self._orphan(session)

    def _end(self, session: Session) -> None:
        del self._sessions[session.peer]
        self._legs.end(session)

    def _orphan(self, session: Session) -> None:
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
        if isinstance(decoded, frames.Hello):
            self._on_hello(peer, decoded)
        elif session is None:
            self.counters.dropped_frames += 1
            if not isinstance(decoded, frames.Goodbye):
                self._tell(peer, self._parting or frames.Goodbye(Parting.NO_SESSION))
        else:
            session.silence.broken(self._loop.time())
            self._on_frame(session, decoded)

    def _on_bad_frame(self, peer: bytes, session: Session | None, error: BadFrame) -> None:
        self.counters.bad_frames += 1
        if session is not None:
            self._drop(session, frames.Goodbye(Parting.BAD_FRAME, str(error)))
        elif isinstance(error, ProtocolMismatch):
            if error.why != self._said_refusal:  # once, though coordinators go on trying
                log_event(_LOG, logging.ERROR, "coordinator_refused", {"reason": error.why})
            self._said_refusal = error.why
            self._tell(peer, frames.Goodbye(Parting.PROTOCOL, error.why))

    def _on_hello(self, peer: bytes, hello: frames.Hello) -> None:
        if self._parting is not None:
            self._tell(peer, self._parting)
            return
        wanted = (peer, hello.coordinator_id, hello.session)
        for other in tuple(self._sessions.values()):
            same = other.peer == peer or other.coordinator_id == hello.coordinator_id
            if same and (other.peer, other.coordinator_id, other.session) != wanted:
                self._drop(other, frames.Goodbye(Parting.REPLACED))
        session = self._sessions.get(peer) or self._open(peer, hello)
        if session is not None:
            session.silence.broken(self._loop.time())
            welcome = frames.Welcome(frames.PROTOCOL, hello.session, self._facts)
            self._send(session, codec.encode(welcome))
            if session.wants_cache:  # before the beat, which names the update that it has
                self._handler.sync_cache(at_once=True)
            self._beat((session,))

    def _open(self, peer: bytes, hello: frames.Hello) -> Session | None:
        if len(self._sessions) >= self._options.max_coordinators:
            why = f"{len(self._sessions)} coordinators are connected, wanted fewer"
            self._tell(peer, frames.Goodbye(Parting.FULL, why))
            return None
        self.counters.sessions += 1
        session = Session(
            peer=peer,
            coordinator_id=hello.coordinator_id,
            session=hello.session,
            silence=Silence(
                self._options.liveness_s, self._loop.time(), rest_s=self._options.rest_s
            ),
            wants_cache=True,
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
        | frames.Goodbye,
    ) -> None:
        match frame:
            case frames.Submit(leg):
                self._on_submit(session, leg)
            case frames.Abort(leg_ids):
                self._on_abort(session, leg_ids)
            case frames.Release():
                self._handler.release(frame.ticket)
            case frames.CoordinatorBeat():
                pass
            case frames.SyncCache():
                session.wants_cache = True
                self._handler.sync_cache(at_once=False)
            case frames.CheckSideChannel(source_id, address):
                self._on_check(session, source_id, address)
            case frames.AgentBroken(why):
                self._handler.agent_broken(why)
            case frames.Goodbye():
                self._end(session)
                self._orphan(session)
            case _:
                assert_never(frame)

    def _on_submit(self, session: Session, leg: Leg) -> None:
        session.received_legs += 1
        if self._legs.own(session, leg.leg_id):
            self._handler.submit(leg)
        else:
            why = f"a leg {leg.leg_id} runs here already"
            self._send(session, _leg_ended(leg.leg_id, LegFailure.REFUSED, why))

    def _on_abort(self, session: Session, leg_ids: tuple[str, ...]) -> None:
        fresh, ended = self._legs.ask_abort(session, leg_ids)
        if fresh:
            self._handler.abort(fresh)
        if ended:
            self._send(session, codec.encode(frames.Aborted(ended)))

    def _on_check(self, session: Session, source_id: str, address: str) -> None:
        self.reports.check_asked(session, source_id, address)
        if not self._handler.check_side_channel(source_id, address):
            self.reports.check_refused(source_id, address)


def _leg_ended(leg_id: str, failure: LegFailure, why: str) -> list[bytes]:
    return codec.encode(frames.LegEnded(leg_id, failure, why[: frames.MAX_WHY_CHARS]))
