"""The chaos proxy does each thing that it says, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.chaos.proxy import NO_IMPAIRMENT, ChaosProxy, LinkConditions, running_proxy

_MESSAGE = bytes(range(256)) * 8
_SOON_S = 5.0


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that gives back what it gets."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, data: bytes = _MESSAGE, *, within_s: float = _SOON_S) -> bytes:
        """What comes back for some bytes, as many."""
        self.writer.write(data)
        async with asyncio.timeout(within_s):
            return await self.reader.readexactly(len(data))


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[ChaosProxy, Client]]:
    """A client that talks to an echo through a proxy, and has done so."""
    async with echo() as port, running_proxy("127.0.0.1", port) as (proxy, listens):
        client = Client(*await asyncio.open_connection("127.0.0.1", listens))
        try:
            assert await client.say() == _MESSAGE
            yield proxy, client
        finally:
            client.writer.transport.abort()


async def took_s(client: Client, data: bytes = _MESSAGE) -> float:
    begun_s = asyncio.get_running_loop().time()
    assert await client.say(data) == data
    return asyncio.get_running_loop().time() - begun_s


async def test_fair_weather_changes_nothing_and_is_counted() -> None:
    async with talking() as (proxy, client):
        assert await client.say(_MESSAGE * 100) == _MESSAGE * 100
        assert proxy.passed_bytes == 2 * 101 * len(_MESSAGE)
        assert (proxy.connections, proxy.open_connections) == (1, 1)


async def test_each_way_has_its_own_delay_and_it_can_be_changed_while_a_connection_is_open() -> (
    None
):
    async with talking() as (proxy, client):
        proxy.set_conditions(up=LinkConditions(delay_s=0.05))
        assert await took_s(client) >= 0.05
        proxy.set_conditions(down=LinkConditions(delay_s=0.05))
        assert await took_s(client) >= 0.1
        proxy.set_conditions(up=NO_IMPAIRMENT, down=NO_IMPAIRMENT)
        assert min([await took_s(client) for _ in range(5)]) < 0.05


async def test_jitter_keeps_the_order() -> None:
    async with talking() as (proxy, client):
        proxy.set_conditions(up=LinkConditions(jitter_s=0.02))
        for number in range(10):
            client.writer.write(bytes([number]) * 10)
            await client.writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(_SOON_S):
            assert await client.reader.readexactly(100) == b"".join(
                bytes([n]) * 10 for n in range(10)
            )


async def test_a_narrow_way_takes_as_long_as_its_bandwidth_says() -> None:
    async with talking() as (proxy, client):
        proxy.set_conditions(down=LinkConditions(bytes_per_s=20_000))
        assert 0.09 <= await took_s(client) < 1.0


async def test_a_drip_comes_in_drops() -> None:
    async with talking() as (proxy, client):
        proxy.set_conditions(down=LinkConditions(max_chunk_bytes=1, chunk_pause_s=0.01))
        client.writer.write(b"abcd")
        async with asyncio.timeout(_SOON_S):
            pieces = [await client.reader.read(100) for _ in range(4)]
        assert pieces == [b"a", b"b", b"c", b"d"]


async def test_losses_delay_and_lose_nothing() -> None:
    async with talking() as (proxy, client):
        proxy.set_conditions(up=LinkConditions(loss_probability=1.0))
        client.writer.write(b"late")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.15):
                await client.reader.readexactly(4)


async def test_corruption_turns_one_bit_of_a_piece() -> None:
    async with talking() as (proxy, client):
        proxy.set_conditions(up=LinkConditions(corruption_probability=1.0))
        got = await client.say(_MESSAGE)
        turned = [(a ^ b).bit_count() for a, b in zip(got, _MESSAGE, strict=True) if a != b]
        assert turned == [1]


async def test_stalled_bytes_come_when_the_link_is_free_again() -> None:
    async with talking() as (proxy, client):
        proxy.set_conditions(up=LinkConditions(is_stalled=True))
        with pytest.raises(TimeoutError):
            await client.say(b"held", within_s=0.05)
        proxy.set_conditions(up=NO_IMPAIRMENT)
        async with asyncio.timeout(_SOON_S):
            assert await client.reader.readexactly(4) == b"held"


async def test_swallowed_bytes_never_come_and_the_connection_stays() -> None:
    async with talking() as (proxy, client):
        proxy.set_conditions(up=LinkConditions(is_black_hole=True))
        with pytest.raises(TimeoutError):
            await client.say(b"lost", within_s=0.05)
        proxy.set_conditions(up=NO_IMPAIRMENT)
        assert await client.say(b"next") == b"next"
        assert proxy.open_connections == 1


async def test_a_reset_breaks_connections_and_new_ones_are_served() -> None:
    async with talking() as (proxy, client):
        proxy.reset()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.say()


async def test_a_refused_connection_is_reset_before_any_byte_passes() -> None:
    async with echo() as port, running_proxy("127.0.0.1", port) as (proxy, listens):
        proxy.is_rejecting = True
        client = Client(*await asyncio.open_connection("127.0.0.1", listens))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.say()
        assert proxy.connections == 0


async def test_half_open_is_an_upstream_that_left_without_its_peer_knowing() -> None:
    async with talking() as (proxy, client):
        proxy.half_open()
        with pytest.raises(TimeoutError):
            await client.say(b"anybody?", within_s=0.05)
        assert proxy.open_connections == 1
        client.writer.transport.abort()


async def test_an_upstream_that_is_not_there_looks_like_a_reset() -> None:
    async with echo() as port:
        pass
    async with running_proxy("127.0.0.1", port) as (_, listens):
        client = Client(*await asyncio.open_connection("127.0.0.1", listens))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.say()


async def test_closing_leaves_no_connection() -> None:
    async with talking() as (proxy, client):
        await proxy.close()
        assert proxy.open_connections == 0
        with suppress(ConnectionResetError):
            assert await client.reader.read(1) == b""


@pytest.mark.parametrize(
    "wrong", [{"loss_probability": 1.5}, {"corruption_probability": -0.1}, {"bytes_per_s": 0.0}]
)
def test_weather_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LinkConditions(**wrong)  # type: ignore[arg-type]
