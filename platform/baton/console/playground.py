"""A chat with the deployment from the console: one request to its own API, streamed back.

*Theory of operation.* The page posts messages and sampling values, never a URL, a path or a header
of the request that is sent. The console builds that request itself, so it is no proxy: it reaches
only `ChatTarget.urls`, only chat completions, and only with these fields. The body is bounded and
has a deadline; so has the answer. When the browser leaves, the request is cancelled. An API key
passes through to the API: it is neither stored nor logged, and without one the caller is anonymous.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Final, Literal

import httpx
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.console.feed import ChatTarget, ChatUnavailable

CHAT_PATH: Final = "/api/chat"
KEY_HEADER: Final = "x-api-key"
"""Of the browser's request: its `Authorization` carries the console's token."""
MAX_BODY_BYTES: Final = 1024 * 1024
MAX_CONCURRENT_CHATS: Final = 8
"""More get 503: the controller has other work."""
_BODY_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 3.0
_MAX_ERROR_BYTES = 64 * 1024
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_API_PATH = "/v1/chat/completions"
_JSON = "application/json"


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Chat(msgspec.Struct, forbid_unknown_fields=True):
    """The body of the page's request."""

    model: str
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=1000)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 256


class _Rejected(Exception):
    """The answer to a chat that is not sent."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class Playground:
    """See the module. `target` is called for each request: a configuration can change."""

    def __init__(self, target: Callable[[], ChatTarget | ChatUnavailable]) -> None:
        self._target = target
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CHATS)

    async def status(self, _request: Request) -> Response:
        """Whether a chat is possible, with which models, and whether it needs a key."""
        target = self._target()
        if isinstance(target, ChatUnavailable):
            return JSONResponse({"available": False, "reason": target.reason})
        return JSONResponse(
            {
                "available": True,
                "models": target.models,
                "takes_key": target.takes_key,
                "needs_key": target.needs_key,
            }
        )

    async def chat(self, request: Request) -> ASGIApp:
        """The answer to one chat, as server-sent events of the API."""
        target = self._target()
        if isinstance(target, ChatUnavailable):
            return _rejection(503, target.reason)
        try:
            headers = _headers(request, target)
            chat = await _read_chat(request)
        except _Rejected as error:
            return _rejection(error.status, error.reason)
        if self._slots.locked():
            return _rejection(503, f"{MAX_CONCURRENT_CHATS} chats run already; wait for one")
        return _ChatStream(target, _api_body(chat), headers, self._slots)


class _ChatStream:
    """An ASGI response: the API's, without its headers, until either side ends it."""

    def __init__(
        self, target: ChatTarget, body: bytes, headers: Mapping[str, str], slots: asyncio.Semaphore
    ) -> None:
        self._target = target
        self._body = body
        self._headers = headers
        self._slots = slots
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay until the answer ends, the browser leaves or the deadline passes."""
        async with self._slots, asyncio.TaskGroup() as group:
            tasks = {
                group.create_task(self._answer(scope, receive, send)),
                group.create_task(_wait_for_disconnect(receive)),
            }
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout_s = self._target.total_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._opened() as answer:
                await self._relay(answer, scope, receive, send)
        except TimeoutError:
            reason = f"no complete answer within {timeout_s:g} s (admission.timeouts.total)"
        except (httpx.HTTPError, OSError) as error:
            reason = f"the API does not answer: {type(error).__name__}: {error}"
        else:
            return
        if not self._has_begun:
            await _rejection(502, reason)(scope, receive, send)
            return
        event = msgspec.json.encode({"error": {"message": reason}})
        await send(_body(b"data: " + event + b"\n\n", more=True))
        await send(_body(b"", more=False))

    async def _relay(
        self, answer: httpx.Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if answer.status_code != httpx.codes.OK:
            text = await _bounded_text(answer)
            await _rejection(answer.status_code, text)(scope, receive, send)
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in answer.aiter_raw():
            await send(_body(part, more=True))
        await send(_body(b"", more=False))

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[httpx.Response]:
        """The API's answer, from the first address that accepts a connection."""
        timeout = httpx.Timeout(self._target.total_timeout_s, connect=_CONNECT_TIMEOUT_S)
        context = await asyncio.to_thread(_tls_context, self._target.cert_file)
        async with httpx.AsyncClient(
            verify=context, timeout=timeout, trust_env=False, follow_redirects=False
        ) as client:
            answer = await self._send(client)
            try:
                yield answer
            finally:
                await answer.aclose()

    async def _send(self, client: httpx.AsyncClient) -> httpx.Response:
        *others, last = self._target.urls
        for url in others:
            try:
                return await self._send_to(client, url)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue  # nothing was sent
        return await self._send_to(client, last)

    async def _send_to(self, client: httpx.AsyncClient, url: str) -> httpx.Response:
        request = client.build_request(
            "POST", url + _API_PATH, content=self._body, headers=self._headers
        )
        return await client.send(request, stream=True)


def _rejection(status: int, reason: str) -> Response:
    return JSONResponse({"reason": reason}, status)


def _headers(request: Request, target: ChatTarget) -> dict[str, str]:
    """Those of the request that is sent: the key, and nothing else of the browser's."""
    headers = {"content-type": _JSON, "accept-encoding": "identity"}
    key = request.headers.get(KEY_HEADER, "")
    if key and not _KEY.fullmatch(key):
        raise _Rejected(400, "an API key is one word of up to 512 visible ASCII characters")
    if target.needs_key and not key:
        raise _Rejected(401, "this deployment needs an API key; enter one of a tenant")
    return headers | ({"authorization": f"Bearer {key}"} if key else {})


async def _read_chat(request: Request) -> Chat:
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            body = await _read_body(request)
    except TimeoutError:
        raise _Rejected(408, f"the body took longer than {_BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise _Rejected(400, "the body was not complete") from None
    try:
        return msgspec.json.decode(body, type=Chat)
    except msgspec.DecodeError as error:
        raise _Rejected(400, f"the chat cannot be read: {error}") from None


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _Rejected(
                413, f"a chat has at most {MAX_BODY_BYTES} bytes; begin a new conversation"
            )
    return bytes(body)


def _api_body(chat: Chat) -> bytes:
    fields = msgspec.to_builtins(chat)
    return msgspec.json.encode(
        {**fields, "stream": True, "stream_options": {"include_usage": True}}
    )


async def _bounded_text(answer: httpx.Response) -> str:
    """The message of an error, or as much of its text as is reasonable."""
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > _MAX_ERROR_BYTES:
            break
    text = bytes(body[:_MAX_ERROR_BYTES]).decode(errors="replace").strip()
    try:
        return str(msgspec.json.decode(text)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return text or f"the API answered {answer.status_code}"


def _tls_context(cert_file: str | None) -> ssl.SSLContext:
    """Trusts the front's own certificate only; its names are those for the public."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    if cert_file is not None:
        context.load_verify_locations(cert_file)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(body: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": more}
