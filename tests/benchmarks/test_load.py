from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest

from benchmarks._load import Client, Exchange, completion_body, poisson_arrivals
from benchmarks._statistics import read_stream
from benchmarks._systems import (
    API,
    ENGINE,
    HAPROXY,
    OTHER,
    engine_settings,
    group_of,
    load_scenario,
)

TOKEN = b'data: {"choices": [{"text": "x"}], "usage": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunked(*bodies: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


async def answers(pieces: Sequence[bytes], requests: Sequence[bytes]) -> list[Exchange]:
    """What the client makes of a server that answers every request with these pieces."""

    closed: list[asyncio.Event] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed.append(asyncio.Event())
        own = closed[-1]
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])
            own.set()

    async with asyncio.timeout(10), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await client.open(1)
        exchanges = await client.send_sequentially(requests)
        assert client.late_connections == sum(1 for e in exchanges[:-1] if e.error)
        client.close()
        for event in closed:
            await event.wait()
    return exchanges


async def test_the_client_finds_the_end_of_answers_that_come_byte_by_byte() -> None:
    body = chunked(TOKEN, TOKEN, USAGE, DONE)
    response = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body
    pieces = [response[:15], *(response[at : at + 1] for at in range(15, len(response)))]

    exchanges = await answers(pieces, [b"{}", b"{}"])

    for exchange in exchanges:
        assert exchange.error == ""
        assert b"".join(part for _, part in exchange.body()) == body
        assert read_stream(exchange.sent_at_s, exchange.body()).tokens == 2


async def test_a_refusal_is_a_problem_and_costs_the_connection() -> None:
    refusal = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"

    exchanges = await answers([refusal], [b"{}", b"{}"])

    assert [exchange.error[:12] for exchange in exchanges] == ["HTTP/1.1 503"] * 2


def test_the_same_seed_draws_the_same_load() -> None:
    def draw(seed: int) -> tuple[list[float], bytes]:
        rng = random.Random(seed)
        arrivals = poisson_arrivals(rng, rate_per_s=20.0, window_s=5.0)
        return arrivals, completion_body(rng, model="m", words=200, max_tokens=4)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_arrivals_come_at_their_rate_and_within_the_window() -> None:
    arrivals = poisson_arrivals(random.Random(7), rate_per_s=50.0, window_s=100.0)

    assert arrivals == sorted(arrivals)
    assert 0 < arrivals[0] < arrivals[-1] < 100.0
    # Five standard deviations of a Poisson count with mean 5,000.
    assert abs(len(arrivals) - 5000) < 5 * 5000**0.5


def test_no_two_prompts_begin_alike() -> None:
    rng = random.Random(1)
    bodies = [completion_body(rng, model="m", words=200, max_tokens=4) for _ in range(100)]

    prompts = [json.loads(body)["prompt"] for body in bodies]
    assert len({prompt[:10] for prompt in prompts}) == 100
    assert all(len(prompt.split()) == 201 for prompt in prompts)


@pytest.mark.parametrize(
    ("name", "title", "group"),
    [
        ("haproxy", "/somewhere/haproxy", HAPROXY),
        ("ray::ServeRepl", "ray::ServeReplica:baton:ingress", API),
        ("ray::ServeRepl", "ray::ServeReplica:baton:mixed", ENGINE),
        ("ray::ServeRepl", "ray::ServeReplica:baton:prefill.handle_request", ENGINE),
        ("ray::ServeRepl", "ray::ServeReplica:baton:controller", OTHER),
        ("ray::ServeCont", "ray::ServeController.listen_for_change", OTHER),
        ("raylet", "/somewhere/raylet", OTHER),
        ("python", "python", OTHER),
    ],
)
def test_every_process_has_its_group(name: str, title: str, group: str) -> None:
    assert group_of(name, [title]) == group


def test_a_scenario_takes_settings_and_has_one_kind_of_engine() -> None:
    local, pd = (
        load_scenario("rivals-local", overrides=("server.port=1234",)),
        load_scenario("rivals-pd"),
    )

    assert engine_settings(local).kv_blocks == 65536
    assert set(local.pools) == {"mixed"}
    assert set(pd.pools) == {"prefill", "decode"}
    assert local.server.port == 1234
