"""A client of an OpenAI-compatible endpoint that streams completions and notes when tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

import httpx
import msgspec

from baton.domain.errors import NotRunning, OperatorError

_ANSWER_WITHIN_S = 10.0
"""For the list of models, and for a connection to be made."""

_SHOWN_CHARACTERS = 160


class EndpointUnusable(OperatorError):
    """An endpoint answers, but not with what is needed of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that an endpoint says it serves."""

    name: str
    max_tokens: int | None = None
    """Of prompt and output together; None when the endpoint does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One completion that is asked for."""

    prompt_token_ids: Sequence[int]
    output_tokens: int
    session_id: str | None = None


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of a question, as far as it came; times are of the monotonic clock."""

    first_at_s: float | None = None
    last_at_s: float | None = None
    ended_at_s: float = 0.0
    worst_gap_s: float = 0.0
    chunks: int = 0
    output_tokens: int | None = None
    """As the endpoint counted them; None when it did not say."""
    cached_tokens: int = 0
    finished: bool = False
    failure: str | None = None
    """Why it did not finish, in words that are the same for the same cause."""

    def tokens_came(self, now_s: float) -> None:
        """A chunk with tokens has arrived."""
        if self.last_at_s is None:
            self.first_at_s = now_s
        else:
            self.worst_gap_s = max(self.worst_gap_s, now_s - self.last_at_s)
        self.last_at_s = now_s
        self.chunks += 1


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: object = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


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
    """Asks an endpoint; use it as a context manager.

    Prompts are token ids, and outputs have the length that is asked for: `ignore_eos` is vLLM's.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._http = httpx.AsyncClient(
            base_url=options.url.rstrip("/").removesuffix("/v1"),
            headers=dict(options.headers),
            # Deadlines are ours; and a proxy between would be measured too.
            timeout=httpx.Timeout(None, connect=_ANSWER_WITHIN_S),
            limits=httpx.Limits(
                max_connections=options.connections, max_keepalive_connections=options.connections
            ),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        """Open no connection yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def model(self, name: str | None = None) -> ServedModel:
        """The model of that name, or the first that is served.

        Raises:
            NotRunning: nothing answers.
            EndpointUnusable: it answers something else, or does not serve the model.
        """
        url = self._options.url
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                response = await self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise NotRunning(
                f"nothing answers at {url}: {type(error).__name__} {error}".rstrip(),
                "start a deployment with 'baton up -c FILE', or correct --url",
            ) from error
        models = _models(response, url)
        found = next((one for one in models if name in {None, one.id}), None)
        if found is None:
            served = ", ".join(one.id for one in models) or "none"
            raise EndpointUnusable(
                f"{url} serves no model {name!r}, only {served}", "correct --model"
            )
        return ServedModel(name=found.id, max_tokens=found.max_model_len)

    async def ask(self, model: str, question: Question) -> Answer:
        """Stream an answer; what goes wrong is in it."""
        answer = Answer()
        try:
            async with asyncio.timeout(self._options.deadline_s):
                await self._stream(model, question, answer)
        except TimeoutError:
            answer.failure = f"not finished within {self._options.deadline_s:g} s"
        except httpx.HTTPError as error:
            answer.failure = f"connection: {type(error).__name__}"
        except (msgspec.DecodeError, UnicodeDecodeError):
            answer.failure = "not the stream of a completion"
        answer.ended_at_s = time.monotonic()
        return answer

    async def _stream(self, model: str, question: Question, answer: Answer) -> None:
        body = {
            "model": model,
            "prompt": question.prompt_token_ids,
            "max_tokens": question.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json"}
        if question.session_id is not None:
            # Any text is a session's name, but not a header.
            headers["X-Session-ID"] = question.session_id.encode(
                "ascii", "xmlcharrefreplace"
            ).decode()
        async with self._http.stream(
            "POST", "/v1/completions", content=msgspec.json.encode(body), headers=headers
        ) as response:
            if response.status_code != httpx.codes.OK:
                answer.failure = _refusal(response.status_code, await response.aread())
                return
            # A generator, though httpx calls it an iterator only.
            whole = cast("AsyncGenerator[str]", response.aiter_lines())
            async with aclosing(whole) as lines:
                async for line in lines:
                    if line.startswith("data:") and not self._take(line[5:].strip(), answer):
                        break
        if not answer.finished and answer.failure is None:
            answer.failure = "the stream ended early"

    def _take(self, data: str, answer: Answer) -> bool:
        """Note what one event of the stream says; returns whether there may be more."""
        if data == "[DONE]":
            return False
        chunk = self._decoder.decode(data)
        if chunk.error is not None:
            answer.failure = f"error in the stream: {_message(chunk.error)}"
            return False
        if chunk.choices:
            answer.tokens_came(time.monotonic())
            answer.finished = answer.finished or chunk.choices[0].finish_reason is not None
        if chunk.usage is not None:
            answer.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            answer.cached_tokens = (details.cached_tokens if details else None) or 0
        return True


def _models(response: httpx.Response, url: str) -> list[_Model]:
    try:
        if response.status_code == httpx.codes.OK:
            return msgspec.json.decode(response.content, type=_Models).data
    except msgspec.DecodeError:
        pass
    raise EndpointUnusable(
        f"{url}/v1/models answered {response.status_code} and no list of models",
        "name the URL of an OpenAI-compatible endpoint",
    )


def _refusal(status: int, body: bytes) -> str:
    try:
        said: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = body.decode(errors="replace")
    if isinstance(said, dict):
        said = said.get("error", said)
    return f"HTTP {status}: {_message(said)}"


def _message(error: object) -> str:
    said = error.get("message", error) if isinstance(error, dict) else error
    return str(said)[:_SHOWN_CHARACTERS]
