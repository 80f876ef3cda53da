"""A TCP proxy that does to a connection what networks do to theirs, and what they should not.

Theory of operation: each client gets a connection of its own to the upstream, and each way has
a reader and a writer with a bounded queue between: the reader stamps each piece with when it is due
by the weather of that moment, the writer waits for it. Pieces keep their order under any jitter.
The weather of each way can be changed at any time, also of connections that are open; one that is
`is_stalled` keeps what it has and gives it later, one that `is_black_hole` loses it for good. What
may
fail: either end; the other is then closed too, unless the connection is half open, which is the
point of it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random

_CHUNK_BYTES = 64 * 1024
_QUEUED_CHUNKS = 64
_CONNECT_S = 10.0
_CLOSE_S = 2.0
_RETRANSMIT_S = 0.2
"""The first timeout of a TCP sender on Linux; it doubles with each loss in a row."""
_RETRANSMITS = 8
"""After this many a piece always comes through: 51 s later."""
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConditions:
    """What happens to bytes on their way in one direction."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """More delay, drawn evenly from 0 to this, for each piece."""
    loss_probability: float = 0.0
    """The chance of a piece to be lost and sent again, as TCP does: it and all behind it wait for
    0.2 s, then 0.4 s, ... An emulation; for packets that are really lost see `faults`."""
    bytes_per_s: float | None = None
    max_chunk_bytes: int | None = None
    """Pieces are cut into such small ones, ..."""
    chunk_pause_s: float = 0.0
    """... with such a pause after each."""
    corruption_probability: float = 0.0
    """The chance of a piece to have one of its bits turned."""
    is_stalled: bool = False
    """Nothing passes, and nothing is lost: a partition that may heal."""
    is_black_hole: bool = False
    """Bytes are lost without an error: a black hole."""

    def __post_init__(self) -> None:
        for name in ("loss_probability", "corruption_probability"):
            chance = getattr(self, name)
            if not 0 <= chance <= 1:
                raise ValueError(f"weather: {name} is {chance}, expected a chance from 0 to 1")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"weather: bytes_per_s is {self.bytes_per_s}, expected more than 0")


NO_IMPAIRMENT = LinkConditions()


@dataclass(slots=True, eq=False)
class _Direction:
    """One direction of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    queue: asyncio.Queue[tuple[float, bytes]] = field(
        default_factory=lambda: asyncio.Queue(_QUEUED_CHUNKS)
    )


class ChaosProxy:
    """Listens on a port of its own for an upstream; to be made and used on one event loop."""

    def __init__(self, *, seed: int = 0) -> None:
        self.upstream_conditions = NO_IMPAIRMENT
        """From who connects to the upstream."""
        self.downstream_conditions = NO_IMPAIRMENT
        self.is_rejecting = False
        """Whether new connections are reset at once."""
        self.connections = 0
        """How many have been made."""
        self.passed_bytes = 0
        self._rng = Random(seed)
        self._upstream: tuple[str, int] | None = None
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._writers: dict[asyncio.StreamWriter, bool] = {}
        """Those of open connections; True for the upstream's side."""
        self._half_open: set[asyncio.StreamWriter] = set()
        """Those whose other side is gone without their knowing."""
        self._changed = asyncio.Event()

    async def start(self, host: str = "127.0.0.1") -> tuple[str, int]:
        """Listen; returns where."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return host, port

    def forward_to(self, host: str, port: int) -> None:
        """Name the upstream of connections from now on."""
        self._upstream = (host, port)

    @property
    def open_connections(self) -> int:
        """Those that are open now."""
        return len(self._open)

    def set_conditions(
        self, *, up: LinkConditions | None = None, down: LinkConditions | None = None
    ) -> None:
        """Change the weather of one way or both, of open connections too; None: as it is."""
        self.upstream_conditions = up or self.upstream_conditions
        self.downstream_conditions = down or self.downstream_conditions
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def reset(self) -> None:
        """Break every connection with a reset, on both sides."""
        for writer in tuple(self._writers):
            _reset(writer)

    def half_open(self) -> None:
        """Close the upstream's side of every connection; the other side hears of nothing."""
        for writer, of_upstream in tuple(self._writers.items()):
            if of_upstream:
                writer.transport.abort()
            else:
                self._half_open.add(writer)

    async def close(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(tuple(self._open), timeout=_CLOSE_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError):
            _reset(writer)
        except asyncio.CancelledError:
            writer.transport.abort()  # the server's own callback wants no cancelled task
        finally:
            self._open.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_rejecting or self._upstream is None:
            _reset(writer)
            return
        self.connections += 1
        async with asyncio.timeout(_CONNECT_S):
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        self._writers |= {writer: False, upstream_writer: True}
        _disable_nagle(writer)
        _disable_nagle(upstream_writer)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    *self._start_direction(group, _Direction(reader, upstream_writer), up=True),
                    *self._start_direction(group, _Direction(upstream_reader, writer), up=False),
                ]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
            if writer in self._half_open:
                await _read_until_closed(reader)
        finally:
            for other in (writer, upstream_writer):
                self._writers.pop(other, None)
                other.close()
            self._half_open.discard(writer)

    def _start_direction(
        self, group: asyncio.TaskGroup, direction: _Direction, *, up: bool
    ) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
        return group.create_task(self._read(direction, up=up)), group.create_task(
            self._write(direction, up=up)
        )

    def _conditions(self, *, up: bool) -> LinkConditions:
        return self.upstream_conditions if up else self.downstream_conditions

    async def _read(self, direction: _Direction, *, up: bool) -> None:
        """Stamp what comes with when it is due; ends when nothing more comes, and all is given."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await direction.reader.read(_CHUNK_BYTES):
                conditions = self._conditions(up=up)
                late_s = conditions.delay_s + self._rng.uniform(0, conditions.jitter_s)
                due_s = loop.time() + late_s + self._retransmit_delay_s(conditions)
                await direction.queue.put((due_s, self._corrupt(data, conditions)))
        await direction.queue.join()

    def _retransmit_delay_s(self, conditions: LinkConditions) -> float:
        """How long a piece waits until it has come through."""
        waited_s, timeout_s = 0.0, _RETRANSMIT_S
        for _ in range(_RETRANSMITS if conditions.loss_probability else 0):
            if self._rng.random() >= conditions.loss_probability:
                break
            waited_s += timeout_s
            timeout_s *= 2
        return waited_s

    def _corrupt(self, data: bytes, conditions: LinkConditions) -> bytes:
        if (
            not conditions.corruption_probability
            or self._rng.random() >= conditions.corruption_probability
        ):
            return data
        corrupted = bytearray(data)
        corrupted[self._rng.randrange(len(corrupted))] ^= 1 << self._rng.randrange(8)
        return bytes(corrupted)

    async def _write(self, direction: _Direction, *, up: bool) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due_s, data = await direction.queue.get()
                try:
                    if (wait_s := due_s - loop.time()) > 0:
                        await asyncio.sleep(wait_s)
                    await self._forward(direction, data, up=up)
                finally:
                    direction.queue.task_done()

    async def _forward(self, direction: _Direction, data: bytes, *, up: bool) -> None:
        """Write a piece as fast as the weather lets it through."""
        while data:
            while (conditions := self._conditions(up=up)).is_stalled:
                await self._changed.wait()
            if conditions.is_black_hole:
                return
            size = conditions.max_chunk_bytes or len(data)
            if conditions.bytes_per_s is not None:
                size = min(size, max(1, int(conditions.bytes_per_s / 50)))
            part, data = data[:size], data[size:]
            direction.writer.write(part)
            await direction.writer.drain()
            self.passed_bytes += len(part)
            pause_s = conditions.chunk_pause_s if conditions.max_chunk_bytes else 0.0
            if conditions.bytes_per_s is not None:
                pause_s += len(part) / conditions.bytes_per_s
            if pause_s:
                await asyncio.sleep(pause_s)


async def _read_until_closed(reader: asyncio.StreamReader) -> None:
    """Take what a half-open connection still says, until it gives up."""
    with suppress(OSError):
        while await reader.read(_CHUNK_BYTES):
            pass


def _disable_nagle(writer: asyncio.StreamWriter) -> None:
    """Small pieces are sent when they come: other delays than the weather's are not wanted."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _reset(writer: asyncio.StreamWriter) -> None:
    if (sock := writer.get_extra_info("socket")) is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@asynccontextmanager
async def running_proxy(
    host: str, port: int, *, seed: int = 0
) -> AsyncIterator[tuple[ChaosProxy, int]]:
    """A proxy before an upstream, and the port where it listens."""
    proxy = ChaosProxy(seed=seed)
    proxy.forward_to(host, port)
    _, listens = await proxy.start()
    try:
        yield proxy, listens
    finally:
        await proxy.close()
