"""Where Ray Serve sends what is for a replica, and who serves there in Rust mode."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.frontend_gate import Message
from baton.serving.replica_port import nothing_here, serve_at_port

DIRECT = {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"}


class Doorway:
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


async def test_the_doorway_serves_at_the_replicas_port_until_serve_wants_it_to_exit(
    serves: ModuleType,
) -> None:
    doorway = Doorway()
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
    serve_at_port(Doorway(), DIRECT)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError) as failed:
        await serves.start_asgi_http_server(
            None, options(taken.getsockname()[1]), event_loop=asyncio.get_running_loop()
        )
    assert isinstance(failed.value.__cause__, OSError)


@pytest.mark.parametrize("environ", [{}, {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}])
def test_where_requests_come_through_python_that_is_said(environ: dict[str, str]) -> None:
    with pytest.raises(EngineStartFailed, match="Python proxy"):
        serve_at_port(Doorway(), environ)


async def test_the_app_that_serve_is_given_instead_serves_nothing() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {}

    await nothing_here({"type": "http"}, receive, send)
    assert sent[0]["status"] == 503
    await nothing_here({"type": "lifespan"}, receive, send)
    told = [message["type"] for message in sent[2:]]
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_serve_still_starts_its_server_in_the_way_that_is_looked_for(serves: ModuleType) -> None:
    assert serves.__file__ is not None
    with open(serves.__file__) as source:  # noqa: PTH123 - a module's own
        text = source.read()
    assert text.count("return await start_asgi_http_server(\n") == 1
    assert "self._direct_ingress_http_server.should_exit = True" in text
