"""A client of an OpenAI-compatible endpoint that streams answers and notes when tokens come.

Theory of operation: one session keeps connections for reuse. A question is made into bytes before
it is due, so that sending it costs no more than writing them. While an answer comes each read gets
one time, and all events in it have that time. What goes wrong with one answer is in that answer;
nothing is tried again, for a second try would hide what the first one met. Times are those of the
monotonic clock, in seconds.
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

from baton.bench.client.chunks import Chunk, Usage
from baton.bench.client.sse import BadStream, EventReader
from baton.domain.errors import NotRunning, OperatorError

if TYPE_CHECKING:  # imported where it is used: keeps the command line fast
    import aiohttp

_ANSWER_WITHIN_S = 10.0
"""For the list of models, for counting tokens, and for a connection to be made."""
_END_WITHIN_S = 1.0
"""For a stream's end after its last event; a connection that does not end is not used again."""
_KEEP_ALIVE_S = 4.0
"""How long an idle connection is kept: less than servers do (uvicorn: 5 s), so that none is closed
while a request is on its way."""

_SHOWN_CHARACTERS = 160
_OK = 200
_DONE = b"[DONE]"
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading somebody's JSON raises; the last: it is nested deeply, if only in parts unread."""


class EndpointUnusable(OperatorError):
    """An endpoint answers, but not with what is needed of it."""


class Api(StrEnum):
    """Which of an endpoint's interfaces is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Where it is."""
        return "/v1/completions" if self is Api.COMPLETIONS else "/v1/chat/completions"


class Message(TypedDict):
    """One of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that an endpoint says it serves."""

    name: str
    max_tokens: int | None = None
    """Of prompt and output together; None when the endpoint does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One answer that is asked for."""

    prompt: Sequence[int] | str | Sequence[Message]
    """Token ids or text for completions, messages for chat."""
    output_tokens: int
    session_id: str | None = None
    slo_class: str | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt of a chat; nothing for a completion's."""
        if isinstance(self.prompt, str):
            return ()
        return tuple(one for one in self.prompt if not isinstance(one, int))

    @property
    def api(self) -> Api:
        """The interface that takes such a prompt."""
        chat = not isinstance(self.prompt, str) and isinstance(next(iter(self.prompt), None), dict)
        return Api.CHAT if chat else Api.COMPLETIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A question as bytes."""

    api: Api
    body: bytes
    headers: Mapping[str, str]
    keep_text: bool = False


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of a question, as far as it came."""

    sent_at_s: float = 0.0
    first_at_s: float | None = None
    last_at_s: float | None = None
    ended_at_s: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Between one piece of the answer and the next, in order."""
    chunks: int = 0
    output_tokens: int | None = None
    """As the endpoint counted them; None when it did not say."""
    prompt_tokens: int | None = None
    """Likewise."""
    cached_tokens: int = 0
    finished: bool = False
    failure: str | None = None
    """Why it did not finish, in words that are the same for the same cause."""
    kind: str | None = None
    """Of the failure: `timeout`, `connection`, `http 429`, `stream`."""
    text: list[str] = field(default_factory=list)
    """Its pieces, where they are kept."""

    def tokens_came(self, now_s: float) -> None:
        """A piece with tokens has arrived."""
        if self.last_at_s is None:
            self.first_at_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_at_s)
        self.last_at_s = now_s
        self.chunks += 1

    def fail(self, kind: str, failure: str) -> None:
        """Note why it did not finish; the first cause counts."""
        if self.failure is None:
            self.kind, self.failure = kind, failure


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Counted(msgspec.Struct):
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How to talk to an endpoint."""

    url: str
    """Without `/v1`, though that does no harm."""
    deadline_s: float = 600.0
    """For one answer, until its last token."""
    connections: int = 1024
    headers: Mapping[str, str] = field(default_factory=dict)


class CompletionClient:
    """Asks an endpoint; use it as a context manager, in an event loop.

    Outputs have the length that is asked for: `ignore_eos` is vLLM's.
    """

    def __init__(
        self, options: ClientOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._options = options
        self._base = options.url.rstrip("/").removesuffix("/v1")
        self._decoder = msgspec.json.Decoder(Chunk)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open no connection yet."""
        import aiohttp

        self._http = aiohttp.ClientSession(
            # A proxy between would be measured too: none is taken from the environment.
            trust_env=False,
            headers=dict(self._options.headers),
            # Deadlines are ours.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_WITHIN_S),
            connector=aiohttp.TCPConnector(
                limit=self._options.connections, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=300
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

    async def model(self, name: str | None = None) -> ServedModel:
        """The model of that name, or the first that is served.

        Raises:
            NotRunning: nothing answers.
            EndpointUnusable: it answers something else, or does not serve the model.
        """
        url = self._options.url
        status, body = await self._call("GET", "/v1/models", None)
        try:
            models = msgspec.json.decode(body, type=_Models).data if status == _OK else None
        except UNREADABLE:
            models = None
        if models is None:
            raise EndpointUnusable(
                f"{url}/v1/models answered {status} and no list of models: {_refusal(body)}",
                "name the URL of an OpenAI-compatible endpoint; where it wants a key, give one",
            )
        found = next((one for one in models if name in {None, one.id}), None)
        if found is None:
            served = ", ".join(one.id for one in models) or "none"
            raise EndpointUnusable(
                f"{url} serves no model {name!r}, only {served}", "correct --model"
            )
        return ServedModel(name=found.id, max_tokens=found.max_model_len)

    async def count_tokens(self, model: str, prompt: str | Sequence[Message]) -> int | None:
        """Tokens of a prompt as the endpoint's `/tokenize` counts them; None where there is none.

        Raises:
            NotRunning: nothing answers.
        """
        what = "prompt" if isinstance(prompt, str) else "messages"
        body = msgspec.json.encode({"model": model, what: prompt})
        status, said = await self._call("POST", "/tokenize", body)
        try:
            return msgspec.json.decode(said, type=_Counted).count if status == _OK else None
        except UNREADABLE:
            return None

    async def _call(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """A short call: status and body.

        Raises:
            NotRunning: nothing answers.
            EndpointUnusable: its URL is none.
        """
        import aiohttp

        try:
            async with (
                asyncio.timeout(_ANSWER_WITHIN_S),
                self._session().request(
                    method, self._base + path, data=body, headers=_JSON if body else None
                ) as response,
            ):
                return response.status, await response.read()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EndpointUnusable(
                f"the endpoint's URL: got {self._options.url!r}, wanted http://HOST:PORT, an IPv6"
                " address in brackets, as http://[::1]:8000",
                "correct the URL",
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NotRunning(
                f"nothing answers at {self._options.url}: {type(error).__name__} {error}".rstrip(),
                "start a deployment with 'baton up -c FILE', or correct the URL",
            ) from error

    def prepare(self, model: str, question: Question, *, keep_text: bool = False) -> Prepared:
        """A question as it will be sent."""
        api = question.api
        body = {
            "model": model,
            ("messages" if api is Api.CHAT else "prompt"): question.prompt,
            "max_tokens": question.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = dict(_JSON)
        if question.session_id is not None:
            # Any text is a session's name, but not a header.
            headers["X-Session-ID"] = question.session_id.encode(
                "ascii", "xmlcharrefreplace"
            ).decode()
        if question.slo_class is not None:
            headers["x-slo-class"] = question.slo_class
        return Prepared(
            api=api, body=msgspec.json.encode(body), headers=headers, keep_text=keep_text
        )

    async def ask(self, prepared: Prepared) -> Answer:
        """Stream an answer; what goes wrong is in it."""
        import aiohttp

        answer = Answer(sent_at_s=self._clock())
        try:
            async with asyncio.timeout(self._options.deadline_s):
                await self._stream(prepared, answer)
        except (aiohttp.ClientError, OSError) as error:
            # A deadline is an OSError too, and so is one of aiohttp's for a connection to be made.
            if type(error) is TimeoutError:
                answer.fail("timeout", f"not finished within {self._options.deadline_s:g} s")
            else:
                answer.fail("connection", f"connection: {type(error).__name__}")
        except (*UNREADABLE, BadStream):
            answer.fail("stream", "not the stream of a completion")
        answer.ended_at_s = self._clock()
        return answer

    async def _stream(self, prepared: Prepared, answer: Answer) -> None:
        async with self._session().post(
            self._base + prepared.api.path, data=prepared.body, headers=prepared.headers
        ) as response:
            if response.status != _OK:
                status = response.status
                said = _refusal(await response.read())
                answer.fail(f"http {status}", f"HTTP {status}: {said}")
                return
            reader = EventReader()
            async for piece in response.content.iter_any():
                if not self._take(reader.feed(piece), answer, keep_text=prepared.keep_text):
                    await _read_to_end(response)
                    break
            else:
                self._take(reader.close(), answer, keep_text=prepared.keep_text)
        if not answer.finished:
            answer.fail("stream", "the stream ended early")

    def _take(self, events: list[bytes], answer: Answer, *, keep_text: bool) -> bool:
        """Note what the events of one read say; returns whether there may be more."""
        now_s = self._clock()
        for data in events:
            if data == _DONE:
                return False
            chunk = self._decoder.decode(data)
            if chunk.error is not None:
                answer.fail("stream", f"error in the stream: {_message(chunk.error)}")
                return False
            if chunk.choices:
                choice = chunk.choices[0]
                if choice.brings_tokens():
                    answer.tokens_came(now_s)
                    if keep_text:
                        answer.text.append(choice.said)
                answer.finished = answer.finished or choice.finish_reason is not None
            if chunk.usage is not None:
                _count(chunk.usage, answer)
        return True

    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "asked before it was entered"
        return self._http


_JSON = {"Content-Type": "application/json"}


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last event, so that the connection can be used again."""
    try:
        async with asyncio.timeout(_END_WITHIN_S):
            while not response.content.at_eof():
                await response.content.readany()
    except TimeoutError:
        pass  # leaving the response closes the connection


def _count(usage: Usage, answer: Answer) -> None:
    answer.output_tokens = usage.completion_tokens
    answer.prompt_tokens = usage.prompt_tokens
    details = usage.prompt_tokens_details
    answer.cached_tokens = (details.cached_tokens if details else None) or 0


def _refusal(body: bytes) -> str:
    try:
        said: object = msgspec.json.decode(body)
    except UNREADABLE:
        said = body.decode(errors="replace")
    if isinstance(said, dict):
        said = said.get("error", said)
    return _message(said)


def _message(error: object) -> str:
    said = error.get("message", error) if isinstance(error, dict) else error
    return str(said)[:_SHOWN_CHARACTERS]
