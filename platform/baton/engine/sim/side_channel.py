"""How simulated engines fetch blocks from each other: a small request/answer protocol over TCP.

Theory of operation: a message is a 4-byte big-endian length and a msgpack array. The puller
connects and lets the time pass that moving the bytes would take: memory is read, whoever's blocks
are in it by then, as by NIXL. It then sends `done`; the source frees the blocks and answers whether
it had kept them to the end. `release` frees without a pull, `renew` keeps for longer. `describe`
asks who listens and of which layout its blocks are; it is what a check of the side channel sends.
No bytes of KV cache exist, so none move.
What may fail: no connection, no answer within the deadline, a connection that breaks meanwhile (the
source died). All are `PullFailedError`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Final, Self, TypeVar, cast

import msgspec

from baton.domain.names.addresses import address_text, parse_address
from baton.runtime.process.sockets import bound_socket

_Answer = TypeVar("_Answer")
_LENGTH: Final = struct.Struct("!I")
_LIMIT_BYTES: Final = 4096
"""Longest message: ids are a few dozen bytes."""
_LIMIT_CONNECTIONS: Final = 512
_CLOSE_DEADLINE_S: Final = 2.0
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Of a message: it is not what it should be, no text, or nested too deeply."""


class Verb(StrEnum):
    """What a puller asks."""

    DONE = "done"
    RENEW = "renew"
    RELEASE = "release"
    DESCRIBE = "describe"


class PullFailedError(Exception):
    """Blocks could not be fetched, or a release could not be delivered."""


class Description(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Who listens at a side channel, and which blocks it has."""

    engine_id: str
    layout: str


class _Ask(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    verb: Verb
    leg_id: str


def _frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class LeaseServer:
    """The source's end. Costs nothing while nobody asks: no task, no timer without a connection.

    `description` is what it says of itself. `renew` keeps a finished prefill leg's blocks for
    longer, `release` frees them; each says whether they had been kept until then. A connection is
    cut after `idle_s`.
    """

    def __init__(
        self,
        description: Description,
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
        """Listen; the address is returned as `host:port`, an IPv6 host in brackets.

        Raises:
            OSError: the address cannot be had.
        """
        loop = asyncio.get_running_loop()
        made = bound_socket(host, port)
        self._server = await loop.create_server(lambda: _Connection(self), sock=made)
        return address_text(host, made.getsockname()[1])

    def pause(self) -> None:
        """Answer nobody until `resume`."""
        self._paused = True
        for connection in self._connections:
            connection.pause()

    def resume(self) -> None:
        """Answer what was asked meanwhile."""
        self._paused = False
        for connection in self._connections:
            connection.resume()

    def stop(self) -> None:
        """Stop listening and break every connection."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.abort()

    async def closed(self) -> None:
        """Wait until the port is free again, after `stop`."""
        if self._server is not None:
            async with asyncio.timeout(_CLOSE_DEADLINE_S):
                await self._server.wait_closed()

    def admit(self, connection: _Connection) -> bool:
        """Note a new connection; False when there are too many."""
        if len(self._connections) >= _LIMIT_CONNECTIONS:
            return False
        self._connections.add(connection)
        if self._paused:
            connection.pause()
        return True

    def forget(self, connection: _Connection) -> None:
        """Note that a connection ended."""
        self._connections.discard(connection)

    def idle_timer(self, then: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `then` when a connection has lasted longer than any pull may take."""
        return asyncio.get_running_loop().call_later(self._idle_s, then)

    def answer(self, body: bytes) -> bytes:
        """Do what a message asks.

        Raises:
            msgspec.DecodeError: it is not a message of ours.
        """
        ask = msgspec.msgpack.decode(body, type=_Ask)
        match ask.verb:
            case Verb.RENEW:
                held = self._renew(ask.leg_id)
            case Verb.DONE | Verb.RELEASE:
                held = self._release(ask.leg_id)
            case Verb.DESCRIBE:
                return self._description
        return msgspec.msgpack.encode(held)


class _Connection(asyncio.Protocol):
    """One puller's connection; anything that is not a message of ours ends it."""

    def __init__(self, server: LeaseServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream server makes no other kind; uvloop's does not say so by its class.
        self._transport = cast("asyncio.Transport", transport)
        if self._server.admit(self):
            self._timer = self._server.idle_timer(self.abort)
        else:
            self.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _LIMIT_BYTES:
                return self.abort()
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return None
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                answer = self._server.answer(body)
            except _UNREADABLE:
                return self.abort()
            if self._transport is not None:
                self._transport.write(_frame(answer))
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.forget(self)
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
    """The puller's end of one exchange; use with `async with`."""

    def __init__(self, address: str, leg_id: str, *, deadline_s: float) -> None:
        self._address = address
        self._leg_id = leg_id
        self._deadline_s = deadline_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        try:
            at = parse_address(self._address)
            async with asyncio.timeout(self._deadline_s):
                self._reader, self._writer = await asyncio.open_connection(at.host, at.port)
        except (OSError, ValueError, OverflowError) as error:
            raise PullFailedError(f"no connection to {self._address}: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def ask(self, verb: Verb) -> bool:
        """Send a message that is answered by yes or no, and return the answer.

        Raises:
            PullFailedError: there is none in time.
        """
        return await self._exchange(verb, bool)

    async def describe(self) -> Description:
        """Ask who listens there.

        Raises:
            PullFailedError: there is no answer in time.
        """
        return await self._exchange(Verb.DESCRIBE, Description)

    async def _exchange(self, verb: Verb, answer: type[_Answer]) -> _Answer:
        reader, writer = self._streams()
        body = msgspec.msgpack.encode(_Ask(verb, self._leg_id))
        try:
            async with asyncio.timeout(self._deadline_s):
                writer.write(_frame(body))
                await writer.drain()
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if length > _LIMIT_BYTES:
                    raise PullFailedError(f"{self._address}: an answer of {length} bytes")
                body = await reader.readexactly(length)
                return msgspec.msgpack.decode(body, type=answer)
        except (OSError, EOFError, *_UNREADABLE) as error:
            raise PullFailedError(f"{verb} to {self._address}: {error!r}") from error

    async def wait_connected(self, arrived: asyncio.Event) -> None:
        """Let a transfer's time pass.

        Raises:
            PullFailedError: the source went away meanwhile.
        """
        reader, _ = self._streams()
        async with asyncio.TaskGroup() as tasks:
            broken = tasks.create_task(_said(reader))
            there = tasks.create_task(_set(arrived))
            await asyncio.wait((broken, there), return_when=asyncio.FIRST_COMPLETED)
            there.cancel()
            broken.cancel()
        if not arrived.is_set():
            raise PullFailedError(f"{self._address} {broken.result()}")

    def _streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            raise AssertionError("use a LeaseClient inside `async with`")
        return self._reader, self._writer


async def _said(reader: asyncio.StreamReader) -> str:
    """What went wrong, as soon as a source says anything while its blocks move."""
    try:
        said = await reader.read(1)
    except OSError as error:
        return f"broke off: {error}"
    return "said something unasked" if said else "broke off"


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def pull(client: LeaseClient, moving: AbstractAsyncContextManager[asyncio.Event]) -> bool:
    """Fetch blocks: let the time of the transfer pass, have the source free them.

    Returns whether the source had kept them to the end; else they may be another prompt's.

    Raises:
        PullFailedError: the source cannot be read, or does not answer.
    """
    async with client:
        async with moving as arrived:
            await client.wait_connected(arrived)
        return await client.ask(Verb.DONE)


async def renew(client: LeaseClient) -> bool:
    """Have the source keep blocks for longer; False when it does not keep them any more.

    Raises:
        PullFailedError: the source does not answer.
    """
    async with client:
        return await client.ask(Verb.RENEW)


async def release(client: LeaseClient) -> bool:
    """Have the source free blocks that nobody pulls; False when it had done so already.

    Raises:
        PullFailedError: the source does not answer.
    """
    async with client:
        return await client.ask(Verb.RELEASE)


async def check(client: LeaseClient, expected: Description) -> None:
    """Make sure that the expected engine, with the expected blocks, listens there.

    Raises:
        PullFailedError: it does not answer, or is another one.
    """
    async with client:
        found = await client.describe()
    if found.engine_id != expected.engine_id:
        who = f"replica {found.engine_id!r} answers there, wanted {expected.engine_id!r}"
        raise PullFailedError(f"{who}: the address belongs to another one now")
    if found.layout != expected.layout:
        what = f"its blocks are {found.layout!r}, wanted {expected.layout!r}"
        raise PullFailedError(f"{what}: give both engines the same model and block settings")
