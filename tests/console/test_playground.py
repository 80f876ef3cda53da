"""The playground: what it sends to the deployment's API, and what it sends nowhere."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from baton.console.app import console_app
from baton.console.feed import ChatTarget, ChatUnavailable
from baton.console.playground import MAX_BODY_BYTES, MAX_CONCURRENT_CHATS
from tests.console.chat_api import WORDS, FakeApi, chat_target_of, opened_api
from tests.console.scripted_feed import ScriptedFeed
from tests.console.viewers import TIMEOUT_S
from tests.fakes.certificates import make_key_pair

CHAT = {
    "model": "qwen-7b",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    "temperature": 0.5,
    "max_tokens": 64,
}
Target = ChatTarget | ChatUnavailable


def app_of(target: Target) -> Starlette:
    return console_app(ScriptedFeed(target=target))


@asynccontextmanager
async def chatting(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app_of(target))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://baton.test/", timeout=TIMEOUT_S
    ) as client:
        yield client


def unused_url() -> str:
    """Where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


class Browser:
    """A chat that goes on until `leave`."""

    def __init__(self, app: Starlette) -> None:
        self.body = b""
        self.status = 0
        self.has_output = asyncio.Event()
        self._app = app
        self._sent = False
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/chat",
            "raw_path": b"/api/chat",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": json.dumps(CHAT).encode(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.body += message["body"]
        if message["body"]:
            self.has_output.set()


# ------------------------------------------------------------------------------------ what is sent


async def test_an_answer_is_streamed_from_the_deployments_api() -> None:
    async with opened_api() as api, chatting(chat_target_of(api)) as client:
        answer = await client.post("api/chat", json=CHAT)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, usage = events_of(answer.text)
    said = [event["choices"][0]["delta"]["content"] for event in events]
    assert said == list(WORDS)
    assert usage["usage"]["completion_tokens"] == 24
    ((headers, body),) = api.asked
    assert headers[""] == "POST /v1/chat/completions HTTP/1.1"
    assert body == {**CHAT, "stream": True, "stream_options": {"include_usage": True}}


async def test_nothing_of_the_browsers_request_but_the_chat_and_the_key_is_sent_on() -> None:
    sent = {
        "authorization": "Basic dG9rZW4=",
        "cookie": "a=b",
        "x-forwarded-for": "1.2.3.4",
        "x-slo-class": "gold",
        "x-api-key": "bk_acme_1",
    }
    async with opened_api() as api, chatting(chat_target_of(api)) as client:
        await client.post("api/chat?url=http://evil.test/", json=CHAT, headers=sent)
        await client.post("api/chat", json=CHAT)
    (with_key, _), (without_key, _) = api.asked
    assert with_key["authorization"] == "Bearer bk_acme_1"
    assert "authorization" not in without_key
    assert not {"cookie", "x-forwarded-for", "x-slo-class", "x-api-key"} & set(with_key)


@pytest.mark.parametrize(
    "change",
    [
        {"url": "http://169.254.169.254/"},
        {"stream": False},
        {"temperature": 2.5},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": "y"}]},
    ],
)
async def test_a_chat_with_other_fields_or_values_is_not_sent(change: dict[str, object]) -> None:
    async with opened_api() as api, chatting(chat_target_of(api)) as client:
        answer = await client.post("api/chat", json={**CHAT, **change})
    assert answer.status_code == 400
    assert "cannot be read" in answer.json()["reason"]
    assert api.asked == []


async def test_a_chat_that_is_too_large_is_not_read_to_its_end() -> None:
    parts = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal parts
        for _ in range(64):
            parts += 1
            yield b"x" * (MAX_BODY_BYTES // 4)

    async with opened_api() as api, chatting(chat_target_of(api)) as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("api/chat", content=body(), headers=headers)
    assert answer.status_code == 413
    assert parts < 8
    assert api.asked == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json", "sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "application/json", "sec-fetch-site": "same-site"}, 403),
    ],
)
async def test_a_page_of_another_site_cannot_chat(headers: dict[str, str], status: int) -> None:
    async with opened_api() as api, chatting(chat_target_of(api)) as client:
        answer = await client.post("api/chat", content=json.dumps(CHAT), headers=headers)
    assert answer.status_code == status
    assert api.asked == []


async def test_a_deployment_with_keys_is_not_asked_without_one() -> None:
    async with opened_api() as api, chatting(chat_target_of(api, needs_key=True)) as client:
        offer = (await client.get("api/playground")).json()
        refused = await client.post("api/chat", json=CHAT)
        garbled = await client.post("api/chat", json=CHAT, headers={"x-api-key": "two words"})
        assert api.asked == []
        served = await client.post("api/chat", json=CHAT, headers={"x-api-key": "bk_1"})
    assert offer == {"available": True, "models": ["qwen-7b"], "takes_key": True, "needs_key": True}
    assert (refused.status_code, garbled.status_code, served.status_code) == (401, 400, 200)
    assert "API key" in refused.json()["reason"]


# ----------------------------------------------------------------------------------- what fails


async def test_the_words_of_the_apis_error_reach_the_page_with_its_status() -> None:
    api = FakeApi(status=429, error="over the limit of tenant acme, retry in 3 s")
    async with opened_api(api), chatting(chat_target_of(api)) as client:
        answer = await client.post("api/chat", json=CHAT)
    assert answer.status_code == 429
    assert answer.json() == {"reason": "over the limit of tenant acme, retry in 3 s"}


async def test_an_api_that_is_not_there_is_said_to_be_so() -> None:
    target = ChatTarget(urls=(unused_url(),), models=("m",), takes_key=False, needs_key=False)
    async with chatting(target) as client:
        answer = await client.post("api/chat", json=CHAT)
    assert answer.status_code == 502
    assert "the API does not answer: ConnectError" in answer.json()["reason"]


async def test_where_the_front_is_on_another_node_that_one_is_asked() -> None:
    async with opened_api() as api:
        target = ChatTarget(
            urls=(unused_url(), api.url), models=("m",), takes_key=False, needs_key=False
        )
        async with chatting(target) as client:
            assert (await client.post("api/chat", json=CHAT)).status_code == 200
    assert len(api.asked) == 1


@pytest.mark.parametrize(("trusted", "status"), [("front", 200), ("other", 502)])
async def test_a_front_with_tls_must_have_the_configured_certificate(
    tmp_path: Path, trusted: str, status: int
) -> None:
    pairs = {name: make_key_pair(tmp_path, name) for name in ("front", "other")}
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pairs["front"].cert, pairs["front"].key)
    async with opened_api(tls=tls) as api:
        target = ChatTarget(
            urls=(api.url.replace("http:", "https:").replace("127.0.0.1", "localhost"),),
            models=("m",),
            takes_key=False,
            needs_key=False,
            cert_file=str(pairs[trusted].cert),
        )
        async with chatting(target) as client:
            answer = await client.post("api/chat", json=CHAT)
    assert answer.status_code == status
    assert len(api.asked) == (status == 200)


async def test_without_an_api_the_reason_is_told() -> None:
    async with chatting(ChatUnavailable(reason="chat is closed")) as client:
        offer = await client.get("api/playground")
        answer = await client.post("api/chat", json=CHAT)
    assert offer.json() == {"available": False, "reason": "chat is closed"}
    assert (answer.status_code, answer.json()) == (503, {"reason": "chat is closed"})


async def test_an_answer_that_takes_too_long_ends_with_an_error() -> None:
    api = FakeApi(gate=asyncio.Event())
    async with opened_api(api):
        target = ChatTarget(
            urls=(api.url,), models=("m",), takes_key=False, needs_key=False, total_timeout_s=0.2
        )
        async with chatting(target) as client:
            answer = await client.post("api/chat", json=CHAT)
    first, error = events_of(answer.text)
    assert first["choices"][0]["delta"]["content"] == WORDS[0]
    assert "within 0.2 s" in error["error"]["message"]


async def test_a_browser_that_leaves_cancels_its_request() -> None:
    api = FakeApi(gate=asyncio.Event())
    async with opened_api(api):
        browser = Browser(app_of(chat_target_of(api)))
        chat = asyncio.create_task(browser.run())
        async with asyncio.timeout(TIMEOUT_S):
            await browser.has_output.wait()
            browser.leave()
            await chat
            await api.abandoned.wait()
    assert WORDS[0].encode() in browser.body
    assert WORDS[1].encode() not in browser.body


async def test_chats_at_a_time_have_a_limit() -> None:
    api = FakeApi(gate=asyncio.Event())
    async with opened_api(api):
        app = app_of(chat_target_of(api))
        browsers = [Browser(app) for _ in range(MAX_CONCURRENT_CHATS)]
        chats = [asyncio.create_task(browser.run()) for browser in browsers]
        async with asyncio.timeout(TIMEOUT_S):
            for browser in browsers:
                await browser.has_output.wait()
            one_more = Browser(app)
            await one_more.run()
            assert one_more.status == 503
            assert b"8 chats run already" in one_more.body
            browsers[0].leave()
            await chats[0]
            again = Browser(app)
            chats.append(asyncio.create_task(again.run()))
            await again.has_output.wait()
            assert again.status == 200
            assert api.gate is not None
            api.gate.set()
            await asyncio.gather(*chats)
    assert b"[DONE]" in again.body
