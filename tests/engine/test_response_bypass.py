"""Which messages of a stream the layers of vLLM's app get to see."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.vllm.gate.errors import Dialect
from baton.engine.vllm.gate.gate import (
    CURRENT_EXCHANGE,
    AsgiApp,
    Exchange,
    Message,
    Receive,
    Scope,
    Send,
)
from baton.engine.vllm.patches.api_server import ROUTERS

straight_streams = pytest.importorskip("baton.engine.vllm.fast_path.stream_bypass")
fastapi = pytest.importorskip("fastapi")
WHOLE = ["start", "one", "two", ""]


class Layer:
    """Middleware that notes what is sent through it."""

    def __init__(self, app: AsgiApp, seen: list[str]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            self._seen.append(told(message))
            await send(message)

        await self._app(scope, receive, noted)


def told(message: Message) -> str:
    return str(message.get("body", b"start"), "ascii")


async def words() -> AsyncIterator[str]:
    yield "one"
    yield "two"


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def streamed(*, middleware: bool, gate: bool = True) -> tuple[list[str], list[str]]:
    """What a layer saw of a stream, and what its client did."""
    seen: list[str] = []
    got: list[str] = []
    app = fastapi.FastAPI()
    app.add_middleware(Layer, seen=seen)
    straight_streams.install_response_bypass(app, middleware=middleware)

    async def stream() -> Any:  # noqa: ANN401 - vllm is not followed
        return straight_streams.BypassStreamingResponse(words())

    app.add_api_route("/", stream)

    async def send(message: Message) -> None:
        got.append(told(message))

    exchange = Exchange(Dialect.OPENAI, send, generates=True)
    exchange.has_output = True
    token = CURRENT_EXCHANGE.set(exchange if gate else None)
    try:
        await app(scope(), never, exchange.send)
    finally:
        CURRENT_EXCHANGE.reset(token)
    return seen, got


def scope() -> Scope:
    return {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [],
        "asgi": {"spec_version": "2.3"},
    }


async def test_layers_see_start_and_end_of_a_stream_and_its_client_sees_all() -> None:
    assert await streamed(middleware=False) == (["start", ""], WHOLE)


async def test_where_operators_have_layers_of_their_own_these_see_all() -> None:
    assert await streamed(middleware=True) == (WHOLE, WHOLE)


async def test_without_a_gate_before_it_an_app_streams_as_it_did() -> None:
    assert await streamed(middleware=False, gate=False) == (WHOLE, WHOLE)


async def test_a_client_that_leaves_while_others_of_its_tokens_are_sent_ends_the_handler() -> None:
    """At once, and not when the handler's generators are found to be garbage."""
    ended: list[str] = []

    async def handler() -> AsyncIterator[str]:
        try:
            yield "one"
        finally:
            ended.append("handler")

    async def leaves() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(_message: Message) -> None:
        """Take it."""

    exchange = Exchange(Dialect.OPENAI, send, generates=True)
    never_sent = asyncio.get_running_loop().create_future()
    exchange.bypass = SimpleNamespace(unsent=never_sent)  # type: ignore[assignment]
    stream = straight_streams.BypassStreamingResponse(handler())
    app = SimpleNamespace(state=SimpleNamespace(streams_straight=True))
    token = CURRENT_EXCHANGE.set(exchange)
    gc.disable()
    try:
        await asyncio.wait_for(stream({**scope(), "app": app}, leaves, send), 5)
        assert ended == ["handler"]
    finally:
        gc.enable()
        CURRENT_EXCHANGE.reset(token)


def test_every_route_of_vllms_that_streams_does_it_so() -> None:
    straight_streams.install_response_bypass(fastapi.FastAPI(), middleware=False)
    for router in map(importlib.import_module, ROUTERS):
        assert router.StreamingResponse is straight_streams.BypassStreamingResponse
        assert "StreamingResponse(" in inspect.getsource(router)
