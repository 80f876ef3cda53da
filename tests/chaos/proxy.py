"""A TCP proxy that does to a connection what networks do to theirs, and what they should not.

Theory of operation: whoever connects gets a connection of its own to the upstream, and each way has
a reader and a writer with a bounded queue between: the reader stamps each piece with when it is due
by the weather of that moment, the writer waits for it. Pieces keep their order whatever the jitter.
The weather of each way can be changed at any time, also of connections that are open; one that is
`stalled` keeps what it has and gives it later, one that `swallows` loses it for good. What may
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

_PIECE_BYTES = 64 * 1024
_QUEUED_PIECES = 64
_CONNECT_S = 10.0
_CLOSE_S = 2.0
_RETRANSMIT_S = 0.2
"""The first timeout of a TCP sender on Linux; it doubles with each loss in a row."""
_RETRANSMITS = 8
"""After so many a piece comes through whatever its luck: 51 s later."""
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What happens to bytes on their way in one direction."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """More delay, drawn evenly from 0 to this, for each piece."""
    loss: float = 0.0
    """The chance of a piece to be lost and sent again, as TCP does: it and all behind it wait for
    0.2 s, then 0.4 s, ... An emulation; for packets that are really lost see `faults`."""
    bytes_per_s: float | None = None
    drip_bytes: int | None = None
    """Pieces are cut into such small ones, ..."""
    drip_s: float = 0.0
    """... with such a pause after each."""
    corrupt: float = 0.0
    """The chance of a piece to have one of its bits turned."""
    stalled: bool = False
    """Nothing passes, and nothing is lost: a partition that may heal."""
    swallows: bool = False
    """What comes is lost, and nobody is told: a black hole."""

    def __post_init__(self) -> None:
        for name in ("loss", "corrupt"):
            chance = getattr(self, name)
            if not 0 <= chance <= 1:
                raise ValueError(f"weather: {name} is {chance}, wanted a chance from 0 to 1")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"weather: bytes_per_s is {self.bytes_per_s}, wanted more than 0")


FAIR = Weather()


@dataclass(slots=True, eq=False)
class _Way:
    """One direction of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    queue: asyncio.Queue[tuple[float, bytes]] = field(
        default_factory=lambda: asyncio.Queue(_QUEUED_PIECES)
    )


class ChaosProxy:
    """Listens on a port of its own for an upstream; to be made and used on one event loop."""

    def __init__(self, *, seed: int = 0) -> None:
        self.up = FAIR
        """From who connects to the upstream."""
        self.down = FAIR
        self.refusing = False
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
        self._silent: set[asyncio.StreamWriter] = set()
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

    def set_weather(self, *, up: Weather | None = None, down: Weather | None = None) -> None:
        """Change the weather of one way or both, of open connections too; None: as it is."""
        self.up = up or self.up
        self.down = down or self.down
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
                self._silent.add(writer)

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
        if self.refusing or self._upstream is None:
            _reset(writer)
            return
        self.connections += 1
        async with asyncio.timeout(_CONNECT_S):
            there, out = await asyncio.open_connection(*self._upstream)
        self._writers |= {writer: False, out: True}
        _at_once(writer)
        _at_once(out)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    *self._ways(group, _Way(reader, out), up=True),
                    *self._ways(group, _Way(there, writer), up=False),
                ]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
            if writer in self._silent:
                await _drown(reader)
        finally:
            for one in (writer, out):
                self._writers.pop(one, None)
                one.close()
            self._silent.discard(writer)

    def _ways(
        self, group: asyncio.TaskGroup, way: _Way, *, up: bool
    ) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
        return group.create_task(self._read(way, up=up)), group.create_task(self._write(way, up=up))

    def _weather(self, *, up: bool) -> Weather:
        return self.up if up else self.down

    async def _read(self, way: _Way, *, up: bool) -> None:
        """Stamp what comes with when it is due; ends when nothing more comes, and all is given."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await way.reader.read(_PIECE_BYTES):
                weather = self._weather(up=up)
                late_s = weather.delay_s + self._rng.uniform(0, weather.jitter_s)
                due_s = loop.time() + late_s + self._lost_s(weather)
                await way.queue.put((due_s, self._corrupted(data, weather)))
        await way.queue.join()

    def _lost_s(self, weather: Weather) -> float:
        """How long a piece waits until it has come through."""
        waited_s, timeout_s = 0.0, _RETRANSMIT_S
        for _ in range(_RETRANSMITS if weather.loss else 0):
            if self._rng.random() >= weather.loss:
                break
            waited_s += timeout_s
            timeout_s *= 2
        return waited_s

    def _corrupted(self, data: bytes, weather: Weather) -> bytes:
        if not weather.corrupt or self._rng.random() >= weather.corrupt:
            return data
        turned = bytearray(data)
        turned[self._rng.randrange(len(turned))] ^= 1 << self._rng.randrange(8)
        return bytes(turned)

    async def _write(self, way: _Way, *, up: bool) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due_s, data = await way.queue.get()
                try:
                    if (wait_s := due_s - loop.time()) > 0:
                        await asyncio.sleep(wait_s)
                    await self._give(way, data, up=up)
                finally:
                    way.queue.task_done()

    async def _give(self, way: _Way, data: bytes, *, up: bool) -> None:
        """Write a piece as fast as the weather lets it through."""
        while data:
            while (weather := self._weather(up=up)).stalled:
                await self._changed.wait()
            if weather.swallows:
                return
            size = weather.drip_bytes or len(data)
            if weather.bytes_per_s is not None:
                size = min(size, max(1, int(weather.bytes_per_s / 50)))
            part, data = data[:size], data[size:]
            way.writer.write(part)
            await way.writer.drain()
            self.passed_bytes += len(part)
            pause_s = weather.drip_s if weather.drip_bytes else 0.0
            if weather.bytes_per_s is not None:
                pause_s += len(part) / weather.bytes_per_s
            if pause_s:
                await asyncio.sleep(pause_s)


async def _drown(reader: asyncio.StreamReader) -> None:
    """Take what a half-open connection still says, until it gives up."""
    with suppress(OSError):
        while await reader.read(_PIECE_BYTES):
            pass


def _at_once(writer: asyncio.StreamWriter) -> None:
    """Small pieces are sent when they come: other delays than the weather's are not wanted."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _reset(writer: asyncio.StreamWriter) -> None:
    if (sock := writer.get_extra_info("socket")) is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@asynccontextmanager
async def proxied(host: str, port: int, *, seed: int = 0) -> AsyncIterator[tuple[ChaosProxy, int]]:
    """A proxy before an upstream, and the port where it listens."""
    proxy = ChaosProxy(seed=seed)
    proxy.forward_to(host, port)
    _, listens = await proxy.start()
    try:
        yield proxy, listens
    finally:
        await proxy.close()
