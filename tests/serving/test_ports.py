"""Ports that two replicas of a node never share."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.gate.gate import AsgiApp, Message, Receive, Scope, Send
from baton.runtime.process.sockets import create_bound_socket
from baton.serving.ray.asgi_port import placeholder_app, serve_app_at_port, serve_at_port
from baton.serving.replica.port_reservation import QUARANTINE_S, PortReservation
from tests.fakes.machine import require_ipv6

HOST = "127.0.0.1"
BASE = 27_000
"""Below those of outgoing connections, which come and go."""


def test_two_replicas_get_different_ports_before_either_listens(tmp_path: Path) -> None:
    one, two = PortReservation(tmp_path), PortReservation(tmp_path)
    assert one.reserve(HOST, BASE, 1) != two.reserve(HOST, BASE, 1)


def test_ports_in_a_row_do_not_overlap(tmp_path: Path) -> None:
    one, two = PortReservation(tmp_path), PortReservation(tmp_path)
    first, second = one.reserve(HOST, BASE, 4), two.reserve(HOST, BASE, 4)
    assert set(range(first, first + 4)).isdisjoint(range(second, second + 4))


def test_a_port_in_use_is_skipped(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert PortReservation(tmp_path).reserve(HOST, taken, 1) != taken


def test_ports_are_found_at_an_address_of_ipv6(tmp_path: Path) -> None:
    require_ipv6()
    with create_bound_socket("::1", 0) as listener:
        listener.listen()
        taken = listener.getsockname()[1]
        assert PortReservation(tmp_path).reserve("::1", taken, 1) != taken


class WallClock:
    """The time of day, set by hand."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def all_of_five(folder: Path, clock: WallClock) -> list[int]:
    """Every port that can be had among the last five that there are; nobody gives them back."""
    found: list[int] = []
    while True:
        try:
            found.append(PortReservation(folder, clock=clock).reserve(HOST, 65_531, 1))
        except EngineStartFailed:
            return sorted(found)


def test_a_restarted_side_channel_takes_a_port_that_its_peers_do_not_remember(
    tmp_path: Path,
) -> None:
    clock = WallClock()
    taken = []
    for _ in range(3):
        life = PortReservation(tmp_path, clock=clock)
        first = life.reserve(HOST, BASE, 2)
        taken += [first, first + 1]
        life.release()
    assert len(set(taken)) == 6


@pytest.mark.parametrize(("after_s", "had"), [(QUARANTINE_S - 1.0, 4), (QUARANTINE_S, 5)])
def test_a_released_port_is_free_again_after_a_pause(
    tmp_path: Path, after_s: float, had: int
) -> None:
    clock = WallClock()
    one = PortReservation(tmp_path, clock=clock)
    one.reserve(HOST, 65_531, 1)
    clock.now_s += 10 * QUARANTINE_S
    one.release()
    clock.now_s += after_s
    assert len(all_of_five(tmp_path, clock)) == had


def test_the_port_of_a_killed_process_pauses_from_when_it_is_found_free(tmp_path: Path) -> None:
    program = (
        "import os, pathlib; from baton.serving.replica.port_reservation import PortReservation;"
        f"print(PortReservation(pathlib.Path({str(tmp_path)!r})).reserve({HOST!r}, 65_531, 1),"
        "flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=False
    )
    killed = int(done.stdout)
    clock = WallClock()
    others = [PortReservation(tmp_path, clock=clock) for _ in range(4)]
    assert killed not in {other.reserve(HOST, 65_531, 1) for other in others}
    with pytest.raises(EngineStartFailed, match="rests"):
        PortReservation(tmp_path, clock=clock).reserve(HOST, 65_531, 1)
    clock.now_s += QUARANTINE_S
    assert PortReservation(tmp_path, clock=clock).reserve(HOST, 65_531, 1) == killed


def test_a_clock_that_is_set_back_blocks_no_port_forever(tmp_path: Path) -> None:
    clock = WallClock()
    one = PortReservation(tmp_path, clock=clock)
    port = one.reserve(HOST, 65_531, 1)
    one.release()
    clock.now_s -= 365 * 86_400.0
    assert port not in all_of_five(tmp_path, clock)
    clock.now_s += QUARANTINE_S
    assert all_of_five(tmp_path, clock) == [port]


def test_two_lives_differ_though_the_first_left_no_file(tmp_path: Path) -> None:
    clock = WallClock()
    before = PortReservation(tmp_path / "one-container", clock=clock).reserve(HOST, BASE, 8)
    clock.now_s += 60.0  # so many rows on: whoever else has a port of the first is passed over
    after = PortReservation(tmp_path / "the-next", clock=clock).reserve(HOST, BASE, 8)
    assert before != after


def test_a_lack_of_ports_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="port_base"):
        PortReservation(tmp_path).reserve(HOST, 65_530, 100)


# -------------------------------------------------------------------- the port of a replica


DIRECT = {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"}


class FakePortServer:
    def __init__(self) -> None:
        self.address: object = None
        self.drained = asyncio.Event()
        self.empty = asyncio.Event()

    async def open(self, listener: socket.socket) -> None:
        self.address = listener.getsockname()

    async def drain(self) -> None:
        self.drained.set()
        await self.empty.wait()


@pytest.fixture
def serves() -> Iterator[ModuleType]:
    replica = pytest.importorskip("ray.serve._private.replica")
    before = replica.start_asgi_http_server
    yield replica
    replica.start_asgi_http_server = before


def options(port: int = 0) -> SimpleNamespace:
    return SimpleNamespace(host="127.0.0.1", port=port)


async def test_the_server_of_a_port_serves_until_serve_wants_it_to_exit(
    serves: ModuleType,
) -> None:
    doorway = FakePortServer()
    serve_at_port(doorway, DIRECT)
    loop = asyncio.get_running_loop()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task, server = await serves.start_asgi_http_server(None, options(port), event_loop=loop)
    assert doorway.address == ("127.0.0.1", port)
    assert not server.should_exit
    server.should_exit = True
    assert server.should_exit
    await asyncio.wait_for(doorway.drained.wait(), 5)
    assert not task.done()
    doorway.empty.set()
    await asyncio.wait_for(task, 5)


async def test_a_port_that_is_taken_is_told_as_serve_has_it(serves: ModuleType) -> None:
    serve_at_port(FakePortServer(), DIRECT)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError) as failed:
        await serves.start_asgi_http_server(
            None, options(taken.getsockname()[1]), event_loop=asyncio.get_running_loop()
        )
    assert isinstance(failed.value.__cause__, OSError)


@pytest.mark.parametrize("environ", [{}, {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}])
def test_where_requests_come_through_python_that_is_said(environ: dict[str, str]) -> None:
    with pytest.raises(EngineStartFailed, match="Python proxy"):
        serve_at_port(FakePortServer(), environ)


async def test_the_app_that_serve_is_given_instead_serves_nothing() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {}

    await placeholder_app({"type": "http"}, receive, send)
    assert sent[0]["status"] == 503
    await placeholder_app({"type": "lifespan"}, receive, send)
    told = [message["type"] for message in sent[2:]]
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


class App:
    """Answers with its name; a stream waits in the middle."""

    def __init__(self, name: str = "ours") -> None:
        self.name = name
        self.scopes: list[Scope] = []
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/raises":
            raise ValueError("a prompt")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(chunk(self.name))
        if scope["path"] == "/stream":
            await self.go_on.wait()
        if scope["path"] == "/leave":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        await send(chunk("", more=False))


def chunk(text: str, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def refused(url: str) -> None:
    """Wait until nobody listens there; the server looks ten times a second what it is told.

    Who has connected as it stops listening, and was not accepted yet, is cut off: the next is told.
    """
    while True:
        async with httpx.AsyncClient() as another:
            try:
                await another.get(url)
            except httpx.ConnectError:
                return
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                continue


@asynccontextmanager
async def served(
    serves: ModuleType, ours: AsgiApp, own: AsgiApp
) -> AsyncIterator[tuple[str, Any, asyncio.Task[None]]]:
    """Serve's own server, as it starts it for a replica, after we have had our say."""
    from ray.serve.config import HTTPOptions

    serve_app_at_port(ours)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task, server = await serves.start_asgi_http_server(
        own,
        HTTPOptions(host="127.0.0.1", port=port),
        event_loop=asyncio.get_running_loop(),
        enable_so_reuseport=False,
    )
    while not server.started:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}", server, task
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


async def test_at_the_port_our_app_serves_and_serves_own_says_that_the_replica_is_there(
    serves: ModuleType,
) -> None:
    ours, own = App(), App("serve")
    async with served(serves, ours, own) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/models")).text == "ours"
        assert (await client.get("/-/healthz")).text == "serve"
        assert [scope["path"] for scope in own.scopes] == ["/-/healthz"]


async def test_a_request_has_an_id_that_its_answer_tells(serves: ModuleType) -> None:
    ours = App()
    async with served(serves, ours, App()) as (url, _, _), httpx.AsyncClient() as client:
        named = await client.get(url, headers={"x-request-id": "mine"})
        other = await client.get(url)
    assert named.headers["x-request-id"] == "mine"
    assert (b"x-request-id", other.headers["x-request-id"].encode()) in ours.scopes[1]["headers"]


async def test_told_to_exit_it_accepts_no_connection_and_ends_after_its_answers(
    serves: ModuleType,
) -> None:
    ours = App()
    async with served(serves, ours, App()) as (url, server, task), httpx.AsyncClient() as client:
        async with client.stream("GET", f"{url}/stream") as answer:
            words = answer.aiter_text()
            assert await anext(words) == "ours"
            server.should_exit = True
            await refused(url)
            assert not task.done()
            ours.go_on.set()
            assert [word async for word in words] == []
        await asyncio.wait_for(task, 10)


async def test_the_app_is_told_that_a_client_has_disconnected(serves: ModuleType) -> None:
    ours = App()
    async with served(serves, ours, App()) as (url, _, _):
        async with httpx.AsyncClient() as client, client.stream("GET", f"{url}/leave"):
            pass
        await asyncio.wait_for(ours.left.wait(), 5)


async def test_an_exception_of_the_app_is_logged_without_a_word_of_the_request(
    serves: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(serves, App(), App()) as (url, _, _):
        with caplog.at_level(logging.ERROR, "baton"):
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"{url}/raises")
    assert answer.status_code == 500
    (record,) = caplog.records
    assert record.message == "request_failed"
    assert record.__dict__["baton_fields"]["error"] == "ValueError"
    assert "a prompt" not in caplog.text


def test_serve_still_starts_its_server_in_the_way_that_is_looked_for(serves: ModuleType) -> None:
    assert serves.__file__ is not None
    with open(serves.__file__) as source:  # noqa: PTH123 - a module's own
        text = source.read()
    called = (
        "return await start_asgi_http_server(\n                    self._direct_ingress_asgi,\n"
    )
    assert text.count(called) == 1
    assert "self._direct_ingress_http_server.should_exit = True" in text
