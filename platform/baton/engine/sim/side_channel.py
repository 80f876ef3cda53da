"""How simulated engines fetch blocks from each other: a small request/answer protocol over TCP.

Theory of operation: a message is a 4-byte big-endian length and a msgpack array. The puller
connects and waits as long as the transfer would take. As with NIXL, it reads memory even if the
blocks are another prompt's by then. It then sends `done`; the source frees the blocks and answers
whether it had kept them to the end. `release` frees without a pull, `renew` extends the lease.
`describe` asks for the engine's id and the layout of its blocks, for a check of the side channel.
No bytes of KV cache exist, so none move.

Failures: no connection, no answer within the deadline, or a connection that breaks (the source
died). All are `PullFailedError`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Final, Self, TypeVar, cast

import msgspec

from baton.domain.names.addresses import format_address, parse_address
from baton.runtime.process.sockets import create_bound_socket

_Reply = TypeVar("_Reply")
_LENGTH: Final = struct.Struct("!I")
_MAX_MESSAGE_BYTES: Final = 4096
"""Ids are a few dozen bytes."""
_MAX_CONNECTIONS: Final = 512
_CLOSE_DEADLINE_S: Final = 2.0
_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Of a message: wrong types, invalid text, or too deep nesting."""


class Verb(StrEnum):
    """A puller's requests."""

    DONE = "done"
    RENEW = "renew"
    RELEASE = "release"
    DESCRIBE = "describe"


class PullFailedError(Exception):
    """Blocks could not be fetched, or a release could not be delivered."""


class EngineDescription(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The engine behind a side channel, and the layout of its blocks."""

    engine_id: str
    layout: str


class _Request(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    verb: Verb
    leg_id: str


def _frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class LeaseServer:
    """The source's end. Without connections it has no task and no timer.

    `description` is its answer to `describe`. `renew` extends the lease of a finished prefill leg's
    blocks, `release` frees them; each returns whether they had been kept until then. A connection
    is cut after `idle_s`.
    """

    def __init__(
        self,
        description: EngineDescription,
        renew: Callable[[str], bool],
        release: Callable[[str], bool],
        *,
        idle_s: float,
    ) -> None:
        self._description = msgspec.msgpack.encode(description)
        self._renew = renew
        self._release = release
        self._idle_s = idle_s
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._paused = False

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the address as `host:port`, an IPv6 host in brackets.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        listener = create_bound_socket(host, port)
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener)
        return format_address(host, listener.getsockname()[1])

    def pause(self) -> None:
        """Send no answers until `resume`."""
        self._paused = True
        for connection in self._connections:
            connection.pause()

    def resume(self) -> None:
        """Answer the requests that came meanwhile."""
        self._paused = False
        for connection in self._connections:
            connection.resume()

    def stop(self) -> None:
        """Stop listening and break every connection."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.abort()

    async def wait_closed(self) -> None:
        """Wait until the port is free again, after `stop`."""
        if self._server is not None:
            async with asyncio.timeout(_CLOSE_DEADLINE_S):
                await self._server.wait_closed()

    def admit(self, connection: _Connection) -> bool:
        """Add a connection; False when there are too many."""
        if len(self._connections) >= _MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        if self._paused:
            connection.pause()
        return True

    def remove(self, connection: _Connection) -> None:
        """Forget a connection that ended."""
        self._connections.discard(connection)

    def start_idle_timer(self, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `callback` when a connection has lasted longer than any pull may take."""
        return asyncio.get_running_loop().call_later(self._idle_s, callback)

    def handle(self, body: bytes) -> bytes:
        """Carry out a request and return the answer.

        Raises:
            msgspec.DecodeError: it is not a message of this protocol.
        """
        request = msgspec.msgpack.decode(body, type=_Request)
        match request.verb:
            case Verb.RENEW:
                was_leased = self._renew(request.leg_id)
            case Verb.DONE | Verb.RELEASE:
                was_leased = self._release(request.leg_id)
            case Verb.DESCRIBE:
                return self._description
        return msgspec.msgpack.encode(was_leased)


class _Connection(asyncio.Protocol):
    """A puller's connection; an invalid message ends it."""

    def __init__(self, server: LeaseServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream server makes no other kind; uvloop's class does not show it.
        self._transport = cast("asyncio.Transport", transport)
        if self._server.admit(self):
            self._timer = self._server.start_idle_timer(self.abort)
        else:
            self.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _MAX_MESSAGE_BYTES:
                return self.abort()
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return None
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                reply = self._server.handle(body)
            except _DECODE_ERRORS:
                return self.abort()
            if self._transport is not None:
                self._transport.write(_frame(reply))
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class LeaseClient:
    """The puller's end of an exchange; use with `async with`."""

    def __init__(self, address: str, leg_id: str, *, deadline_s: float) -> None:
        self._address = address
        self._leg_id = leg_id
        self._deadline_s = deadline_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        try:
            address = parse_address(self._address)
            async with asyncio.timeout(self._deadline_s):
                self._reader, self._writer = await asyncio.open_connection(
                    address.host, address.port
                )
        except (OSError, ValueError, OverflowError) as error:
            raise PullFailedError(f"no connection to {self._address}: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def request(self, verb: Verb) -> bool:
        """Send a message with a yes/no answer, and return the answer.

        Raises:
            PullFailedError: there is none in time.
        """
        return await self._exchange(verb, bool)

    async def describe(self) -> EngineDescription:
        """Ask for the engine's description.

        Raises:
            PullFailedError: there is no answer in time.
        """
        return await self._exchange(Verb.DESCRIBE, EngineDescription)

    async def _exchange(self, verb: Verb, reply_type: type[_Reply]) -> _Reply:
        reader, writer = self._streams()
        body = msgspec.msgpack.encode(_Request(verb, self._leg_id))
        try:
            async with asyncio.timeout(self._deadline_s):
                writer.write(_frame(body))
                await writer.drain()
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if length > _MAX_MESSAGE_BYTES:
                    raise PullFailedError(f"{self._address}: an answer of {length} bytes")
                body = await reader.readexactly(length)
                return msgspec.msgpack.decode(body, type=reply_type)
        except (OSError, EOFError, *_DECODE_ERRORS) as error:
            raise PullFailedError(f"{verb} to {self._address}: {error!r}") from error

    async def wait_connected(self, arrived: asyncio.Event) -> None:
        """Wait for the end of a transfer.

        Raises:
            PullFailedError: the source disconnected meanwhile.
        """
        reader, _ = self._streams()
        async with asyncio.TaskGroup() as tasks:
            disconnection = tasks.create_task(_wait_for_disconnection(reader))
            arrival = tasks.create_task(_wait_set(arrived))
            await asyncio.wait((disconnection, arrival), return_when=asyncio.FIRST_COMPLETED)
            arrival.cancel()
            disconnection.cancel()
        if not arrived.is_set():
            raise PullFailedError(f"{self._address} {disconnection.result()}")

    def _streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            raise AssertionError("use a LeaseClient inside `async with`")
        return self._reader, self._writer


async def _wait_for_disconnection(reader: asyncio.StreamReader) -> str:
    """The failure, as soon as a source sends anything or disconnects during a transfer."""
    try:
        data = await reader.read(1)
    except OSError as error:
        return f"broke off: {error}"
    return "sent an unexpected answer" if data else "broke off"


async def _wait_set(event: asyncio.Event) -> None:
    await event.wait()


async def pull(client: LeaseClient, transfer: AbstractAsyncContextManager[asyncio.Event]) -> bool:
    """Fetch blocks: wait for the transfer, then have the source free them.

    Returns whether the source had kept them to the end; else they may be another prompt's.

    Raises:
        PullFailedError: the source cannot be read, or does not answer.
    """
    async with client:
        async with transfer as arrived:
            await client.wait_connected(arrived)
        return await client.request(Verb.DONE)


async def renew(client: LeaseClient) -> bool:
    """Have the source keep blocks for longer; False when it does not keep them any more.

    Raises:
        PullFailedError: the source does not answer.
    """
    async with client:
        return await client.request(Verb.RENEW)


async def release(client: LeaseClient) -> bool:
    """Have the source free blocks without a pull; False when it had done so already.

    Raises:
        PullFailedError: the source does not answer.
    """
    async with client:
        return await client.request(Verb.RELEASE)


async def check_source(client: LeaseClient, expected: EngineDescription) -> None:
    """Check that the expected engine, with the expected layout, listens there.

    Raises:
        PullFailedError: it does not answer, or is another one.
    """
    async with client:
        description = await client.describe()
    if description.engine_id != expected.engine_id:
        engine_mismatch = (
            f"replica {description.engine_id!r} answers there, expected {expected.engine_id!r}"
        )
        raise PullFailedError(f"{engine_mismatch}: the address belongs to another one now")
    if description.layout != expected.layout:
        layout_mismatch = f"its blocks are {description.layout!r}, expected {expected.layout!r}"
        raise PullFailedError(
            f"{layout_mismatch}: give both engines the same model and block settings"
        )
