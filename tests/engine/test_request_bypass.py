"""Requests that go straight to vLLM's handlers are answered as FastAPI has them answered."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.vllm.gate.gate import AsgiApp, Message

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from fastapi import Depends, FastAPI, HTTPException
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from baton.engine.vllm.cli_args import make_arg_parser
    from baton.engine.vllm.fast_path.stream_bypass import (
        PATHS,
        BypassRoute,
        install_request_bypass,
    )

JSON = b"application/json"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "hello", "max_tokens": 3},
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
}


class Handler:
    """Stands for vLLM's: streams what it was asked, or does as it is told."""

    def __init__(self, failure: Exception | None = None, *, waits: bool = False) -> None:
        self.failure = failure
        self.waits = waits
        self.asked: list[Any] = []
        self.cancelled = asyncio.Event()
        self.began = asyncio.Event()

    async def create_completion(self, request: Any, raw_request: Any) -> Any:  # noqa: ANN401
        self.asked.append(request)
        raw_request.state.request_metadata = "as vLLM leaves it"
        self.began.set()
        if self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if self.failure is not None:
            raise self.failure

        async def stream() -> Any:  # noqa: ANN401
            yield f"data: {request.model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

        return stream()

    create_chat_completion = create_completion


def vllms_app(handler: Handler, *, straight: bool) -> FastAPI:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "tiny"])
    app: FastAPI = build_app(args, ("generate",), None)
    app.state.openai_serving_completion = app.state.openai_serving_chat = handler
    app.state.server = SimpleNamespace(should_exit=False)
    app.state.engine_client = SimpleNamespace(errored=False, dead_error=None)
    if straight:
        assert set(install_request_bypass(app)) == set(PATHS)
    return app


HANDLER = Handler()
FASTAPI, STRAIGHT = (vllms_app(HANDLER, straight=straight) for straight in (False, True))


def without_ids(text: bytes) -> str:
    """An answer; ids and times that vLLM draws for each request are left out."""
    if not text.startswith(b"data: {"):
        return text.decode()
    told = json.loads(text.split(b"\n", 1)[0].removeprefix(b"data: "))
    told.pop("request_id", None)
    return json.dumps(told)


async def ask(
    app: AsgiApp,
    path: str,
    parts: Sequence[bytes],
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", JSON),),
    *,
    method: str = "POST",
    breaks: BaseException | str | None = None,
) -> tuple[object, ...]:
    """The status, the headers and the text of an answer; what is raised, where anything is."""
    last = len(parts) - 1
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": number < last or breaks is not None}
        for number, part in enumerate(parts)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        if isinstance(breaks, BaseException):
            raise breaks
        if breaks is None:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers),
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
    raised = None
    try:
        async with asyncio.timeout(20):
            await app(scope, receive, send)
    except Exception as error:  # noqa: BLE001 - compared
        raised = repr(error)
    start = sent[0] if sent else {}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    heads = sorted(item for item in start.get("headers", ()) if item[0] != b"content-length")
    return raised, start.get("status"), heads, without_ids(body)


async def same(path: str, parts: Sequence[bytes], **more: Any) -> tuple[object, ...]:  # noqa: ANN401
    HANDLER.asked.clear()
    straight = await ask(STRAIGHT, path, parts, **more)
    assert straight == await ask(FASTAPI, path, parts, **more)
    return straight


@pytest.mark.parametrize("path", PATHS)
async def test_a_readable_request_is_answered_as_it_was(path: str) -> None:
    _, status, headers, text = await same(path, [json.dumps(GOOD[path]).encode()])
    assert status == 200
    assert "text/event-stream" in str(headers)
    assert '"model": "tiny"' in str(text)
    first, second = HANDLER.asked
    assert type(first) is type(second)


UNREADABLE = [
    b"",
    b"null",
    b"7",
    b"[]",
    b'"text"',
    b"{",
    b"{}",
    b'{"model": "tiny"',
    b"\xff\xfe",
    '{"model": "tiny", "prompt": "\ud83d\ude00"}'.encode("utf-16", "surrogatepass"),
    b'{"model": "tiny", "prompt": NaN}',
    b'{"model": 3, "prompt": "a"}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": "many"}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": -1}',
    b'{"model": "tiny", "prompt": "a", "n": 1e400}',
    b'{"model": "tiny", "prompt": "a", "nobody": "knows this"}',
    b'{"model": "tiny", "prompt": "a", "stream_options": {"include_usage": true}}',
    b'{"model": "tiny", "prompt": "a", "logprobs": -3}',
    b'{"model": "tiny", "prompt": "a", "response_format": {"type": "json_schema"}}',
    b'{"model": "tiny", "prompt": "a", "model": "other"}',
    b'{"messages": "none"}',
    b'{"messages": [{"role": "user"}], "tool_choice": "auto"}',
    b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", UNREADABLE, ids=range(len(UNREADABLE)))
async def test_an_unreadable_body_is_answered_as_by_fastapi(path: str, body: bytes) -> None:
    await same(path, [body])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"Application/JSON; charset=utf-8")],
        [(b"content-type", b"application/json ; charset=utf-8")],
        [(b"content-type", b"application/vnd.api+json")],
        [(b"content-type", b"application/json/more")],
        [(b"content-type", JSON), (b"content-type", b"text/plain")],
        [(b"content-type", b"text/plain"), (b"content-type", JSON)],
        [(b"content-type", JSON), (b"origin", b"https://example.com")],
        [(b"content-type", JSON), (b"endpoint-load-metrics-format", b"JSON")],
    ],
    ids=str,
)
async def test_headers_decide_as_they_did(headers: list[tuple[bytes, bytes]]) -> None:
    await same(COMPLETIONS, [json.dumps(GOOD[COMPLETIONS]).encode()], headers=headers)


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS", "HEAD"])
async def test_other_methods_are_answered_as_they_were(method: str) -> None:
    await same(COMPLETIONS, [b""], method=method)


async def test_a_body_may_come_in_parts() -> None:
    whole = json.dumps(GOOD[CHAT]).encode()
    _, status, _, _ = await same(CHAT, [whole[:5], b"", whole[5:9], whole[9:]])
    assert status == 200


@pytest.mark.parametrize("breaks", ["gone", OSError("reset")], ids=["leaves", "breaks"])
async def test_a_body_that_is_not_complete_ends_as_it_did(breaks: BaseException | str) -> None:
    await same(CHAT, [b'{"model": "ti'], breaks=breaks)
    assert HANDLER.asked == []


@pytest.mark.parametrize(
    "failure",
    [
        ValueError("a wrong value"),
        TypeError("a wrong type"),
        NotImplementedError("not here"),
        OverflowError("too much"),
        HTTPException(418, "a teapot"),
        KeyError("a bug"),
    ],
    ids=lambda failure: type(failure).__name__,
)
async def test_an_exception_of_a_handler_is_answered_as_by_fastapi(failure: Exception) -> None:
    answers = [
        await ask(
            vllms_app(Handler(failure), straight=straight),
            CHAT,
            [json.dumps(GOOD[CHAT]).encode()],
        )
        for straight in (True, False)
    ]
    assert answers[0] == answers[1]
    assert answers[0][1] != 200


async def test_a_handler_whose_client_leaves_is_cancelled() -> None:
    handler = Handler(waits=True)
    app = vllms_app(handler, straight=True)
    body = {"type": "http.request", "body": json.dumps(GOOD[CHAT]).encode()}
    messages: list[Message] = [body]

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await handler.began.wait()
        return {"type": "http.disconnect"}

    async def send(_message: Message) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "query_string": b"",
        "headers": [(b"content-type", JSON)],
        "asgi": {"spec_version": "2.3"},
    }
    async with asyncio.timeout(20):
        await app(scope, receive, send)
        await handler.cancelled.wait()


FIELDS = st.sampled_from(
    ["model", "prompt", "messages", "max_tokens", "stream", "n", "stop", "temperature", "seed"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(PATHS), body=st.dictionaries(FIELDS, VALUES), whole=st.booleans())
def test_any_body_is_answered_as_it_was(path: str, body: dict[str, Any], *, whole: bool) -> None:
    asked = {**GOOD[path], **body} if whole else body
    asyncio.run(same(path, [json.dumps(asked).encode()]))


def test_these_routes_are_the_first_that_are_tried() -> None:
    first, second, *others = STRAIGHT.router.routes
    assert {getattr(route, "path", None) for route in (first, second)} == set(PATHS)
    assert {*map(id, others)}.isdisjoint({id(first), id(second)})
    assert len(STRAIGHT.router.routes) == len(FASTAPI.router.routes)


async def test_routes_of_another_form_are_left_to_fastapi() -> None:
    def more() -> None:
        pass

    app = FastAPI()

    @app.post(CHAT, dependencies=[Depends(more)])
    async def chat(request: dict[str, str]) -> dict[str, str]:
        return request

    assert install_request_bypass(app) == ()
    assert not any(isinstance(getattr(route, "app", None), BypassRoute) for route in app.routes)
    _, status, _, text = await ask(app, CHAT, [b'{"a": "b"}'])
    assert (status, text) == (200, '{"a":"b"}')
