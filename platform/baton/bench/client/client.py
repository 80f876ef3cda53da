"""A client of OpenAI-compatible endpoints that streams answers and measures the times of tokens.

*Theory of operation.* Requests are encoded before they are due, so that sending only writes bytes.
All events in one read have the time of that read. A failure is part of the answer; nothing is
retried, because a retry would hide it. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict

import msgspec

from baton.bench.client.trust import UNAUTHORIZED, TlsTrust, connection_error, key_remedy
from baton.domain.errors import OperatorError

if TYPE_CHECKING:  # imported where it is used: keeps the command line fast
    import aiohttp

_CALL_TIMEOUT_S = 10.0
"""For the list of models, for counting tokens, and for connecting."""
_STREAM_END_TIMEOUT_S = 1.0
"""For a stream's end after its last event; later the connection is closed."""
_KEEP_ALIVE_S = 4.0
"""How long an idle connection is kept: less than servers do (uvicorn: 5 s), so that none closes
under a request."""
_MAX_ERROR_CHARACTERS = 160
_OK = 200
_DONE = b"[DONE]"
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding JSON; RecursionError for deep nesting, even in unread parts."""
_MAX_EVENT_BYTES = 16 << 20
"""A longer event is no event stream."""


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")

    def has_content(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or bytes(self.tool_calls) not in {b"null", b"[]"}
        )


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def answer_text(self) -> str:
        return (self.text if self.delta is None else self.delta.content) or ""

    def has_tokens(self) -> bool:
        """Whether it has tokens: not if it only opens or ends the answer.

        A token may have no text, e.g. a part of a character.
        """
        if self.delta is None or self.delta.has_content():
            return True
        return self.delta.role is None and self.finish_reason is None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: object = None


class StreamInvalid(ValueError):
    """The bytes are no event stream."""


class EndpointUnusable(OperatorError):
    """An endpoint answers, but not as needed."""


class Api(StrEnum):
    """A kind of completion endpoint."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Of its URL."""
        return "/v1/completions" if self is Api.COMPLETIONS else "/v1/chat/completions"


class Message(TypedDict):
    """A message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that an endpoint serves."""

    name: str
    max_tokens: int | None = None
    """Of prompt and output together; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request for one answer."""

    prompt: Sequence[int] | str | Sequence[Message]
    """Token ids or text for completions, messages for chat."""
    output_tokens: int
    session_id: str | None = None
    slo_class: str | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of a chat; empty for a completion."""
        if isinstance(self.prompt, str):
            return ()
        return tuple(message for message in self.prompt if not isinstance(message, int))

    @property
    def api(self) -> Api:
        """The kind of endpoint for this prompt."""
        chat = not isinstance(self.prompt, str) and isinstance(next(iter(self.prompt), None), dict)
        return Api.CHAT if chat else Api.COMPLETIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest:
    """A request as bytes."""

    api: Api
    body: bytes
    headers: Mapping[str, str]
    keep_text: bool = False


@dataclass(slots=True, kw_only=True)
class CompletionResponse:
    """An answer, as far as it was received."""

    sent_at_s: float = 0.0
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    ended_at_s: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Between consecutive pieces of the answer."""
    chunks: int = 0
    output_tokens: int | None = None
    """As the endpoint counted them; None if it did not."""
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    is_finished: bool = False
    failure: str | None = None
    """Why it did not finish; equal for equal causes."""
    failure_kind: str | None = None
    """`timeout`, `connection`, `http 429`, `stream`."""
    text_pieces: list[str] = field(default_factory=list)

    def on_tokens(self, now_s: float) -> None:
        """Record a piece with tokens."""
        if self.last_token_at_s is None:
            self.first_token_at_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_at_s)
        self.last_token_at_s = now_s
        self.chunks += 1

    def fail(self, kind: str, failure: str) -> None:
        """Record why it did not finish; the first cause counts."""
        if self.failure is None:
            self.failure_kind, self.failure = kind, failure


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _TokenCount(msgspec.Struct):
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How to call an endpoint."""

    url: str
    timeout_s: float = 600.0
    """Until the last token of an answer."""
    max_connections: int = 1024
    headers: Mapping[str, str] = field(default_factory=dict)
    trust: TlsTrust = field(default_factory=TlsTrust)


class CompletionClient:
    """Calls an endpoint; an asynchronous context manager.

    Outputs have the requested length: `ignore_eos` is vLLM's.
    """

    def __init__(
        self, options: ClientOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._options = options
        self._base_url = options.url.rstrip("/").removesuffix("/v1")
        self._is_tls = options.url.lower().startswith("https:")
        self._decoder = msgspec.json.Decoder(Chunk)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open a session, without connecting yet."""
        import aiohttp

        self._http = aiohttp.ClientSession(
            # Proxies of the environment are ignored: they would be measured, too.
            trust_env=False,
            headers=dict(self._options.headers),
            # This client has its own deadlines.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CALL_TIMEOUT_S),
            connector=aiohttp.TCPConnector(
                limit=self._options.max_connections,
                keepalive_timeout=_KEEP_ALIVE_S,
                ttl_dns_cache=300,
                ssl=self._options.trust.context() if self._is_tls else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()

    async def get_model(self, name: str | None = None) -> ServedModel:
        """The model of that name, or the first served model.

        Raises:
            NotRunning: nothing answers.
            EndpointUnusable: the answer is unexpected, or the model is not served.
        """
        url = self._options.url
        status, body = await self._call("GET", "/v1/models", None)
        try:
            models = msgspec.json.decode(body, type=_Models).data if status == _OK else None
        except DECODE_ERRORS:
            models = None
        if status in UNAUTHORIZED:
            raise EndpointUnusable(
                f"{url}: status {status}: {_error_text(body)}", key_remedy(self._options.headers)
            )
        if models is None:
            raise EndpointUnusable(
                f"{url}/v1/models: got status {status} and no list of models: {_error_text(body)}",
                "name the URL of an OpenAI-compatible endpoint",
            )
        model = next((served for served in models if name in {None, served.id}), None)
        if model is None:
            names = ", ".join(served.id for served in models) or "none"
            raise EndpointUnusable(
                f"{url}: --model: got {name!r}, which is not served; served: {names}",
                "name one of these with --model",
            )
        return ServedModel(name=model.id, max_tokens=model.max_model_len)

    async def count_tokens(self, model: str, prompt: str | Sequence[Message]) -> int | None:
        """Tokens of a prompt as the endpoint's `/tokenize` counts them; None if it has none.

        Raises:
            NotRunning: nothing answers.
        """
        key = "prompt" if isinstance(prompt, str) else "messages"
        body = msgspec.json.encode({"model": model, key: prompt})
        status, response_body = await self._call("POST", "/tokenize", body)
        try:
            counted = msgspec.json.decode(response_body, type=_TokenCount)
        except DECODE_ERRORS:
            return None
        return counted.count if status == _OK else None

    async def _call(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """A short call: status and body."""
        import aiohttp

        try:
            async with (
                asyncio.timeout(_CALL_TIMEOUT_S),
                self._session().request(
                    method, self._base_url + path, data=body, headers=_JSON if body else None
                ) as response,
            ):
                return response.status, await response.read()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EndpointUnusable(
                f"the endpoint's URL: got {self._options.url!r}, expected http://HOST:PORT, an IPv6"
                " address in brackets, as http://[::1]:8000",
                "correct the URL",
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise connection_error(error, self._options.url, timeout_s=_CALL_TIMEOUT_S) from error

    def encode(
        self, model: str, request: CompletionRequest, *, keep_text: bool = False
    ) -> EncodedRequest:
        """The request as bytes."""
        api = request.api
        body = {
            "model": model,
            ("messages" if api is Api.CHAT else "prompt"): request.prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = dict(_JSON)
        if request.session_id is not None:
            # A session's name may be any text, a header not.
            headers["X-Session-ID"] = request.session_id.encode(
                "ascii", "xmlcharrefreplace"
            ).decode()
        if request.slo_class is not None:
            headers["x-slo-class"] = request.slo_class
        return EncodedRequest(
            api=api, body=msgspec.json.encode(body), headers=headers, keep_text=keep_text
        )

    async def complete(self, encoded: EncodedRequest) -> CompletionResponse:
        """Stream an answer; failures are part of it."""
        import aiohttp

        result = CompletionResponse(sent_at_s=self._clock())
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._stream(encoded, result)
        except (aiohttp.ClientError, OSError) as error:
            # A TimeoutError is an OSError too, and aiohttp has a subclass for connecting.
            if type(error) is TimeoutError:
                result.fail("timeout", f"not finished within {self._options.timeout_s:g} s")
            else:
                result.fail("connection", f"connection: {type(error).__name__}")
        except (*DECODE_ERRORS, StreamInvalid):
            result.fail("stream", "not the stream of a completion")
        result.ended_at_s = self._clock()
        return result

    async def _stream(self, encoded: EncodedRequest, result: CompletionResponse) -> None:
        async with self._session().post(
            self._base_url + encoded.api.path, data=encoded.body, headers=encoded.headers
        ) as response:
            if response.status != _OK:
                status = response.status
                error_text = _error_text(await response.read())
                result.fail(f"http {status}", f"HTTP {status}: {error_text}")
                return
            reader = EventReader()
            async for piece in response.content.iter_any():
                if not self._process_events(
                    reader.feed(piece), result, keep_text=encoded.keep_text
                ):
                    await _read_to_end(response)
                    break
            else:
                self._process_events(reader.close(), result, keep_text=encoded.keep_text)
        if not result.is_finished:
            result.fail("stream", "the stream ended early")

    def _process_events(
        self, events: list[bytes], result: CompletionResponse, *, keep_text: bool
    ) -> bool:
        """Record the events of one read; returns whether more may follow."""
        now_s = self._clock()
        for data in events:
            if data == _DONE:
                return False
            chunk = self._decoder.decode(data)
            if chunk.error is not None:
                result.fail("stream", f"error in the stream: {_error_message(chunk.error)}")
                return False
            if chunk.choices:
                choice = chunk.choices[0]
                if choice.has_tokens():
                    result.on_tokens(now_s)
                    if keep_text:
                        result.text_pieces.append(choice.answer_text)
                result.is_finished = result.is_finished or choice.finish_reason is not None
            if chunk.usage is not None:
                _record_usage(chunk.usage, result)
        return True

    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "asked before it was entered"
        return self._http


_JSON = {"Content-Type": "application/json"}


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last event, so that the connection can be reused."""
    try:
        async with asyncio.timeout(_STREAM_END_TIMEOUT_S):
            while not response.content.at_eof():
                await response.content.readany()
    except TimeoutError:
        pass  # leaving the response closes the connection


def _record_usage(usage: _Usage, result: CompletionResponse) -> None:
    result.output_tokens = usage.completion_tokens
    result.prompt_tokens = usage.prompt_tokens
    details = usage.prompt_tokens_details
    result.cached_tokens = (details.cached_tokens if details else None) or 0


def _error_text(body: bytes) -> str:
    try:
        error: object = msgspec.json.decode(body)
    except DECODE_ERRORS:
        error = body.decode(errors="replace")
    if isinstance(error, dict):
        error = error.get("error", error)
    return _error_message(error)


def _error_message(error: object) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_MAX_ERROR_CHARACTERS]


class EventReader:
    """Splits bytes into events, and gives the data of each.

    Other fields than `data` are ignored; lines end in LF or CRLF.

    Source: WHATWG HTML, server-sent events.
    """

    def __init__(self) -> None:
        self._partial_line = b""
        self._data_lines: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes.

        Raises:
            StreamInvalid: an event is too long.
        """
        *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
        if len(self._partial_line) > _MAX_EVENT_BYTES:
            raise StreamInvalid(f"an event has more than {_MAX_EVENT_BYTES:,} bytes")
        events: list[bytes] = []
        for line in lines:
            stripped = line[:-1] if line.endswith(b"\r") else line
            if stripped.startswith(b"data:"):
                self._data_lines.append(stripped[6:] if stripped[5:6] == b" " else stripped[5:])
            elif not stripped and self._data_lines:
                events.append(b"\n".join(self._data_lines))
                self._data_lines.clear()
        return [data for data in events if data]

    def close(self) -> list[bytes]:
        """The data of a last event without a blank line, which some servers omit."""
        return self.feed(b"\n\n")
