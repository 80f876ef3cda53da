"""What the client makes of streams whose timing is known, and how it treats connections."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client.client import (
    Api,
    ClientOptions,
    CompletionClient,
    CompletionRequest,
    CompletionResponse,
    EndpointUnusable,
    EventReader,
    Message,
    StreamInvalid,
)
from baton.domain.errors import NotRunning
from baton.domain.names.addresses import format_endpoint
from baton.runtime.process.sockets import create_bound_socket
from tests.fakes.completion_server import (
    SSE_DONE,
    Behaviour,
    CompletionServer,
    ReceivedRequest,
    chunk,
    events,
    token,
    usage,
)
from tests.fakes.machine import require_ipv6

QUESTION = CompletionRequest(prompt=[1, 2, 3], output_tokens=3)
CHAT = CompletionRequest(prompt=[Message(role="user", content="hello")], output_tokens=3)


class Clock:
    """Tells the times it was given, one for each time it is asked; who waits learns of each."""

    def __init__(self, *times_s: float) -> None:
        self._times_s = list(times_s)
        self._told = asyncio.Event()
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        self._told.set()
        return self._times_s[self.count - 1]

    async def asked(self, count: int) -> None:
        while self.count < count:
            self._told.clear()
            await self._told.wait()


def timed(clock: Clock, *events: str) -> Behaviour:
    """Each event is sent after the client has told the time for the one before."""

    async def behave(_: ReceivedRequest) -> AsyncIterator[str]:
        for number, event in enumerate(events, start=1):
            await clock.asked(number)
            yield event

    return behave


async def answer_to(
    question: CompletionRequest,
    behaviour: Behaviour,
    clock: Clock | None = None,
    *,
    keep_text: bool = False,
) -> CompletionResponse:
    server = CompletionServer(behaviour=behaviour)
    async with server.running():
        options = ClientOptions(url=server.url, timeout_s=30)
        client = CompletionClient(options, clock=clock) if clock else CompletionClient(options)
        async with client:
            prepared = client.encode("tiny", question, keep_text=keep_text)
            return await client.complete(prepared)


def said(content: str | None = None, *, last: bool = False, **delta: object) -> str:
    whole = delta if content is None else delta | {"content": content}
    return chunk(choices=[{"delta": whole, "finish_reason": "length" if last else None}])


async def test_the_times_of_an_answer_are_those_at_which_its_pieces_came() -> None:
    clock = Clock(100.0, 100.5, 100.6, 100.9, 101.0, 101.1, 101.2)
    answer = await answer_to(
        QUESTION, timed(clock, token(), token(), token(last=True), usage(5, 2), SSE_DONE), clock
    )
    assert (answer.sent_at_s, answer.first_token_at_s, answer.last_token_at_s) == (
        100.0,
        100.5,
        100.9,
    )
    assert list(answer.gaps_s) == pytest.approx([0.1, 0.3])
    assert (answer.chunks, answer.output_tokens, answer.cached_tokens) == (3, 5, 2)
    assert answer.is_finished
    assert answer.failure is None


async def test_pieces_that_come_in_one_read_have_one_time() -> None:
    clock = Clock(1.0, 2.0, 3.0, 4.0)
    answer = await answer_to(
        QUESTION, timed(clock, token() + token() + token(last=True), usage(3) + SSE_DONE), clock
    )
    assert list(answer.gaps_s) == [0, 0]
    assert answer.last_token_at_s == 2.0


async def test_a_role_and_an_end_are_no_tokens_of_a_chat() -> None:
    clock = Clock(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    role, end = said("", role="assistant"), said(last=True)
    answer = await answer_to(
        CHAT,
        timed(clock, role, said("a"), said(""), end, usage(2), SSE_DONE),
        clock,
        keep_text=True,
    )
    assert (answer.first_token_at_s, answer.last_token_at_s, answer.chunks) == (3.0, 4.0, 2)
    assert answer.is_finished
    assert "".join(answer.text_pieces) == "a"


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0}]},
        {"role": "assistant", "content": "a"},
    ],
)
async def test_the_first_token_of_an_answer_may_be_of_any_kind(delta: dict[str, object]) -> None:
    first = chunk(choices=[{"delta": delta, "finish_reason": None}])
    answer = await answer_to(CHAT, events(first, said("b", last=True), SSE_DONE))
    assert answer.chunks == 2


async def test_the_last_token_of_a_chat_may_come_with_its_end() -> None:
    answer = await answer_to(CHAT, events(said("a"), said("b", last=True), SSE_DONE))
    assert (answer.chunks, answer.is_finished) == (2, True)


async def test_a_chat_is_asked_for_with_its_messages_class_and_session() -> None:
    server = CompletionServer(behaviour=events(said("a", last=True), SSE_DONE))
    question = CompletionRequest(
        prompt=[Message(role="user", content="hello")],
        output_tokens=7,
        session_id="s",
        slo_class="batch",
    )
    async with (
        server.running(),
        CompletionClient(ClientOptions(url=server.url, headers={"X-Team": "a"})) as client,
    ):
        assert question.api is Api.CHAT
        await client.complete(client.encode("tiny", question))
    (asked,) = server.requests
    assert asked.body["messages"] == [{"role": "user", "content": "hello"}]
    assert "prompt" not in asked.body
    assert (asked.headers["x-slo-class"], asked.headers["x-session-id"]) == ("batch", "s")
    assert asked.headers["x-team"] == "a"


async def test_a_stream_without_a_blank_line_at_its_end_is_whole() -> None:
    answer = await answer_to(QUESTION, events(token(), token(last=True).rstrip("\n")))
    assert (answer.is_finished, answer.chunks) == (True, 2)


async def test_usage_in_the_last_piece_is_read() -> None:
    last = chunk(
        choices=[{"text": "b", "finish_reason": "stop"}],
        usage={"prompt_tokens": 9, "completion_tokens": 2},
    )
    answer = await answer_to(QUESTION, events(token(), last, SSE_DONE))
    assert (answer.prompt_tokens, answer.output_tokens, answer.chunks) == (9, 2, 2)


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (events("429 Busy", "{}"), "http 429"),
        (events(token(), chunk(error={"message": "died"})), "stream"),
        (events("data: {oops\n\n"), "stream"),
        (events('data: {"x":' + "[" * 100_000 + "\n\n"), "stream"),
        (events(token(), SSE_DONE), "stream"),
        (events("data: " + "x" * (17 << 20)), "stream"),
    ],
)
async def test_failures_have_a_kind(behaviour: Behaviour, kind: str) -> None:
    answer = await answer_to(QUESTION, behaviour)
    assert (answer.failure_kind, answer.is_finished) == (kind, False)


class Raw:
    """A server that answers each request with the same bytes, on connections that it keeps."""

    def __init__(
        self,
        body: bytes,
        *,
        ends: bool = True,
        status: bytes = b"200 OK",
        end_after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.connections = 0
        self._end_after = end_after
        self._ended: list[asyncio.Event] = []
        self._answer = (
            b"HTTP/1.1 "
            + status
            + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
            + f"{len(body):x}\r\n".encode()
            + body
            + b"\r\n"
            + (b"0\r\n\r\n" if ends and end_after is None else b"")
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await asyncio.gather(*(event.wait() for event in self._ended))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        ended = asyncio.Event()
        self._ended.append(ended)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                _, _, length = head.partition("content-length: ")
                await reader.readexactly(int(length.split("\r\n")[0] or 0) if length else 0)
                writer.write(self._answer)
                await writer.drain()
                if self._end_after is not None:
                    await self._end_after()
                    writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        ended.set()


async def asked_twice(
    raw: Raw, clock: Callable[[], float] = time.monotonic
) -> list[CompletionResponse]:
    async with (
        raw.running() as url,
        CompletionClient(ClientOptions(url=url), clock=clock) as client,
    ):
        prepared = client.encode("tiny", QUESTION)
        return [await client.complete(prepared), await client.complete(prepared)]


async def test_a_connection_is_used_again() -> None:
    raw = Raw((token(last=True) + SSE_DONE).encode())
    answers = await asked_twice(raw)
    assert [answer.is_finished for answer in answers] == [True, True]
    assert raw.connections == 1


async def test_a_connection_whose_stream_ends_a_little_later_is_used_again() -> None:
    clock = Clock(*map(float, range(6)))
    ends = iter((2, 5))
    raw = Raw((token(last=True) + SSE_DONE).encode(), end_after=lambda: clock.asked(next(ends)))
    answers = await asked_twice(raw, clock)
    assert [answer.is_finished for answer in answers] == [True, True]
    assert raw.connections == 1


async def test_a_stream_that_does_not_end_after_its_last_event_is_whole_and_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.bench.client.client._STREAM_END_TIMEOUT_S", 0.01)
    raw = Raw((token(last=True) + SSE_DONE).encode(), ends=False)
    answers = await asked_twice(raw)
    assert [answer.failure for answer in answers] == [None, None]
    assert raw.connections == 2


async def test_tokens_are_counted_by_the_endpoint_where_it_can() -> None:
    server = CompletionServer(behaviour=events("200 OK", '{"count": 7}'))
    async with server.running(), CompletionClient(ClientOptions(url=server.url)) as client:
        assert await client.count_tokens("tiny", "some words") == 7
        assert await client.count_tokens("tiny", [Message(role="user", content="a")]) == 7
        assert [set(request.body) for request in server.requests] == [
            {"model", "prompt"},
            {"model", "messages"},
        ]
        server.behaviour = events("404 Not Found", json.dumps({"detail": "Not Found"}))
        assert await client.count_tokens("tiny", "some words") is None


async def test_a_key_that_is_not_taken_is_said_before_anything_is_sent() -> None:
    raw = Raw(b'{"error": "no such API key"}', status=b"401 No")
    async with raw.running() as url, CompletionClient(ClientOptions(url=url)) as client:
        with pytest.raises(EndpointUnusable, match="status 401") as raised:
            await client.get_model()
    assert "give the API key: --key-file" in raised.value.remedy


async def test_tokens_are_not_counted_where_no_server_listens() -> None:
    async with CompletionClient(ClientOptions(url="http://127.0.0.1:1")) as client:
        with pytest.raises(NotRunning):
            await client.count_tokens("tiny", "a")


@pytest.mark.parametrize(
    "url", ["http://::1:8000", "http://[::1", "::1:8000", "localhost:8000", "ftp://there"]
)
async def test_a_url_that_is_none_is_said_to_be_one_and_not_that_nothing_answers(url: str) -> None:
    async with CompletionClient(ClientOptions(url=url)) as client:
        with pytest.raises(EndpointUnusable, match=r"expected http://HOST:PORT.*\[::1\]:8000"):
            await client.get_model()


async def test_an_endpoint_at_an_address_of_ipv6_is_asked() -> None:
    require_ipv6()
    with create_bound_socket("::1", 0) as free:
        url = format_endpoint("http", "::1", free.getsockname()[1])
    async with CompletionClient(ClientOptions(url=url)) as client:
        with pytest.raises(NotRunning, match="connection refused"):
            await client.get_model()


# ---------- events out of bytes, however they are cut
STREAM = (
    b": a comment\n\n"
    b'data: {"a": 1}\n\n'
    b"event: note\r\nid: 7\r\ndata: two\r\ndata:  lines\r\n\r\n"
    b"data:tight\n\n\n\n"
    b"data:\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"two\n lines", b"tight", b"[DONE]"]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_only_data_is_kept_and_an_event_without_any_is_none() -> None:
    assert read([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_it_does_not_matter_how_a_stream_is_cut(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(STREAM)]
    assert read([STREAM[a:b] for a, b in pairwise(at)]) == EVENTS


def test_an_event_comes_as_soon_as_it_ends_and_not_before() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\n") == []
    assert reader.feed(b"\n") == [b"x"]


def test_a_last_event_without_a_blank_line_is_not_lost() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x") == []
    assert reader.close() == [b"x"]
    assert reader.close() == []


def test_characters_that_other_readers_take_for_line_ends_are_text() -> None:
    text = "data: a\u2028b\x0bc\n\n".encode()
    assert read([text[:9], text[9:]]) == ["a\u2028b\x0bc".encode()]


def test_bytes_without_end_are_no_stream() -> None:
    reader = EventReader()
    with pytest.raises(StreamInvalid, match="more than 16,777,216 bytes"):
        reader.feed(b"data: " + b"x" * (17 << 20))
