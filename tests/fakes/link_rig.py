"""What link tests are made of: an event log, a host with a scripted engine, and a raw peer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import zmq

from baton.domain.events import Event, LegsAborted, ReplicaJoined, ReplicaLost, StepCompleted
from baton.runtime.link import codec, frames
from baton.runtime.link.client import LinkClient
from baton.runtime.link.options import LinkOptions
from baton.runtime.replica_host import HostOptions, ReplicaHost
from tests.fakes.scripted_engine import ScriptedEngine, Watch, make_facts

FAST_LINK = LinkOptions(
    heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6, reconnect_s=0.02, reconnect_max_s=0.2
)
ANY_PORT = "tcp://127.0.0.1:0"

_Event = TypeVar("_Event", bound=Event)


class EventLog:
    """Collects a link client's events and lets a test wait for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._watch = Watch()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._watch.notify()

    def of_type(self, kind: type[_Event]) -> list[_Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait(self, kind: type[_Event], count: int = 1, timeout_s: float = 5.0) -> _Event:
        """Wait for the `count`-th event of a kind."""
        await self._watch.wait_until(lambda: len(self.of_type(kind)) >= count, timeout_s)
        return self.of_type(kind)[count - 1]

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until something holds that events bring about."""
        await self._watch.wait_until(predicate, timeout_s)

    async def wait_tokens(self, leg_id: str, count: int, timeout_s: float = 5.0) -> list[int]:
        """Wait until a leg has produced `count` tokens; returns all of its tokens."""
        await self._watch.wait_until(lambda: len(self.tokens(leg_id)) >= count, timeout_s)
        return self.tokens(leg_id)

    async def wait_aborted(self, *leg_ids: str, timeout_s: float = 5.0) -> None:
        await self._watch.wait_until(lambda: self.aborted >= set(leg_ids), timeout_s)

    @property
    def aborted(self) -> set[str]:
        return {leg_id for event in self.of_type(LegsAborted) for leg_id in event.leg_ids}

    def tokens(self, leg_id: str) -> list[int]:
        return [
            token
            for event in self.of_type(StepCompleted)
            for output in event.outputs
            if output.leg_id == leg_id
            for token in output.token_ids
        ]

    async def wait_joined(self, count: int = 1, timeout_s: float = 5.0) -> ReplicaJoined:
        return await self.wait(ReplicaJoined, count, timeout_s)

    async def wait_lost(self, count: int = 1, timeout_s: float = 5.0) -> ReplicaLost:
        return await self.wait(ReplicaLost, count, timeout_s)


@asynccontextmanager
async def running_host(
    engine: ScriptedEngine | None = None,
    *,
    bind: str = ANY_PORT,
    link: LinkOptions = FAST_LINK,
    options: HostOptions | None = None,
) -> AsyncIterator[tuple[ReplicaHost, ScriptedEngine]]:
    engine = engine or ScriptedEngine()
    host = ReplicaHost(engine, bind=bind, link=link, options=options)
    await host.start()
    try:
        yield host, engine
    finally:
        await host.close()


class SessionIds:
    """Names sessions, and lets a test wait until the client has opened so many."""

    def __init__(self) -> None:
        self._opened = 0
        self._watch = Watch()

    def __call__(self) -> str:
        self._opened += 1
        self._watch.notify()
        return f"session-{self._opened}"

    async def wait_opened(self, count: int) -> None:
        await self._watch.wait_until(lambda: self._opened >= count)


@asynccontextmanager
async def running_client(
    coordinator_id: str = "c1",
    *,
    link: LinkOptions = FAST_LINK,
    new_session: Callable[[], str] | None = None,
) -> AsyncIterator[tuple[LinkClient, EventLog]]:
    log = EventLog()
    new_session = new_session or SessionIds()
    client = LinkClient(coordinator_id, log, options=link, new_session=new_session)
    try:
        yield client, log
    finally:
        await client.close()


@asynccontextmanager
async def joined_client(
    host: ReplicaHost, coordinator_id: str = "c1", *, link: LinkOptions = FAST_LINK
) -> AsyncIterator[tuple[LinkClient, EventLog]]:
    """A coordinator that has a session with `host`."""
    async with running_client(coordinator_id, link=link) as (client, log):
        facts = host._facts
        assert facts is not None
        client.connect(facts.replica_id, host.address)
        await log.wait_joined()
        yield client, log


class RawPeer:
    """A bare ZMQ socket that speaks whatever a test wants, in a thread so that it may block."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.setsockopt(zmq.SNDTIMEO, 5000)

    async def send(self, *parts: bytes) -> None:
        await asyncio.to_thread(self.socket.send_multipart, parts)

    async def receive(self) -> list[bytes]:
        return await asyncio.to_thread(self.socket.recv_multipart)

    async def open_session(
        self, coordinator_id: str = "raw", session: str = "s"
    ) -> frames.FromReplica:
        await self.send(
            *codec.encode(frames.Open(frames.PROTOCOL_VERSION, coordinator_id, session))
        )
        return await self.next_frame()

    async def next_frame(self, *skip: type[frames.FromReplica]) -> frames.FromReplica:
        """Return the next frame from the replica that is none of the kinds to skip."""
        while True:
            frame = codec.decode_from_replica(await self.receive())
            if not isinstance(frame, skip):
                return frame


@contextmanager
def raw_coordinator(address: str, routing_id: bytes = b"raw/s") -> Iterator[RawPeer]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.connect(address)
        yield RawPeer(socket)


@contextmanager
def raw_replica(bind: str = ANY_PORT) -> Iterator[tuple[RawPeer, str]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(bind)
        yield RawPeer(socket), socket.getsockopt_string(zmq.LAST_ENDPOINT)


async def accept_session(peer: RawPeer, message: list[bytes]) -> bytes:
    """Answer a hello; returns who said it."""
    identity, *parts = message
    open_frame = codec.decode_from_coordinator(parts)
    assert isinstance(open_frame, frames.Open)
    accept_frame = frames.Accept(frames.PROTOCOL_VERSION, open_frame.session_id, make_facts("r1"))
    await peer.send(identity, *codec.encode(accept_frame))
    return identity


@asynccontextmanager
async def running_subprocess(
    script: str, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a script of tests/fakes; yields the process and the first line that it printed."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root), str(root / "platform")))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(root / "tests" / "fakes" / script),
        *arguments,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            line = await process.stdout.readline()
        yield process, line.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(5):
            await process.communicate()
