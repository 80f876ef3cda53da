"""A plain stream says the same by its short cut as without it, and no other stream takes one."""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import EngineFailed
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.gate.errors import INTERNAL, Dialect
from baton.engine.vllm.gate.gate import Exchange, Message

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineGenerateError

    from baton.engine.vllm.fast_path import stream_bypass as straight_requests
    from baton.engine.vllm.fast_path.stream_bypass import (
        Chunk,
        ChunkTemplate,
        StreamBypass,
        find_template,
        is_bypassable,
    )
    from tests.compat.echo_fleet import EchoFleet
    from tests.compat.endpoint import MODEL, ServerThread, serve

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
AROUND = st.binary(max_size=12).map(lambda some: b"<" + some.replace(b'"', b"'") + b">")
TOKENS = 12
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "how are you"}]}
PROMPT: dict[str, object] = {"prompt": "once upon a time there was"}
ROUTES = ("completions", "chat")
PATHS = {"chat/completions": CHAT, "completions": PROMPT}


# ------------------------------------------------------------------ forms


@given(AROUND, AROUND, TEXT, TEXT, TEXT)
def test_two_chunks_tell_what_the_third_looks_like(
    before: bytes, after: bytes, one: str, other: str, third: str
) -> None:
    form = ChunkTemplate(before, after)
    found = find_template(Chunk(one, form.render(one)), Chunk(other, form.render(other)))
    if one == other:
        assert found is None
    else:
        assert found is not None
        assert found.render(third) == before + msgspec.json.encode(third) + after


@given(AROUND, AROUND, AROUND, TEXT, TEXT)
def test_chunks_that_differ_in_more_than_their_text_have_no_form(
    before: bytes, after: bytes, other_after: bytes, one: str, other: str
) -> None:
    said = Chunk(other, ChunkTemplate(before, after + b"1" + other_after).render(other))
    assert find_template(Chunk(one, ChunkTemplate(before, after).render(one)), said) is None


def test_a_text_that_could_be_in_two_places_has_no_form() -> None:
    assert find_template(Chunk("a", b'"a" "a"'), Chunk("b", b'"a" "b"')) is not None
    assert find_template(Chunk("a", b'"a" "a"'), Chunk("a", b'"a" "a"')) is None
    assert find_template(Chunk("x", b'{"id":"y"}'), Chunk("y", b'{"id":"y"}')) is None


# ------------------------------------------------------------------ beside vLLM's own way


@pytest.fixture(scope="module")
def fleet() -> EchoFleet:
    return EchoFleet()


@pytest.fixture(scope="module")
def server(model: Path, fleet: EchoFleet) -> Iterator[ServerThread]:
    settings = FrontendSettings(model=str(model), served_model_name=MODEL, routes=tuple(ROUTES))
    with serve(settings, fleet) as running:
        yield running


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that go by a short cut."""
    texts: list[str] = []
    send = StreamBypass._send

    def spy(self: StreamBypass, text: str) -> None:
        texts.append(text)
        send(self, text)

    monkeypatch.setattr(StreamBypass, "_send", spy)
    return texts


def ask(server: ServerThread, path: str, body: Mapping[str, object]) -> str:
    """What a client reads, but for the time."""
    whole = {"model": MODEL, "max_tokens": TOKENS, "stream": True, **body}
    url, headers = f"{server.base_url}/v1/{path}", {"x-request-id": "the-same"}
    answer = httpx.post(url, json=whole, headers=headers, timeout=20)
    assert answer.status_code == 200, answer.text
    return re.sub(r'"created":\d+', '"created":0', answer.text)


def without_bypass(
    server: ServerThread, path: str, body: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(straight_requests, "is_bypassable", lambda _request, _app: False)
        return ask(server, path, body)


PLAIN: dict[str, dict[str, object]] = {
    "as it is": {},
    "with its usage": {"stream_options": {"include_usage": True}},
    "with a seed and a temperature": {"seed": 3, "temperature": 0.7},
    "that ends on a word": {"stop": ["zzzzz"]},
    "that ends on tokens": {"stop_token_ids": [5], "ignore_eos": True},
    "with special tokens": {"skip_special_tokens": False},
}


@pytest.mark.parametrize("more", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("path", PATHS)
def test_the_middle_of_a_plain_stream_takes_the_short_cut_and_says_the_same(
    server: ServerThread,
    taken: list[str],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    more: dict[str, object],
) -> None:
    body = {**PATHS[path], **more}
    wanted = without_bypass(server, path, body, monkeypatch)
    assert not taken
    assert ask(server, path, body) == wanted
    # Two to learn the form (more where texts repeat), and the last.
    assert TOKENS - 5 <= len(taken) <= TOKENS - 3


OTHERS: dict[str, tuple[str, dict[str, object]]] = {
    "probabilities": ("completions", {"logprobs": 1}),
    "probabilities of none": ("completions", {"logprobs": 0}),
    "probabilities in a chat": ("chat/completions", {"logprobs": True, "top_logprobs": 1}),
    "an echo": ("completions", {"echo": True}),
    "ids": ("completions", {"return_token_ids": True}),
    "ids in a chat": ("chat/completions", {"return_token_ids": True}),
    "two answers": ("completions", {"n": 2}),
    "two answers in a chat": ("chat/completions", {"n": 2}),
    "two prompts": ("completions", {"prompt": ["one", "and two"]}),
    "usage all along": (
        "completions",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "usage all along in a chat": (
        "chat/completions",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
}


@pytest.mark.parametrize(("path", "more"), OTHERS.values(), ids=OTHERS)
def test_a_stream_with_more_than_text_is_formatted_by_vllm(
    server: ServerThread, taken: list[str], path: str, more: dict[str, object]
) -> None:
    whole = {"model": MODEL, "max_tokens": TOKENS, "stream": True, **PATHS[path], **more}
    answer = httpx.post(f"{server.base_url}/v1/{path}", json=whole, timeout=20)
    # The stand-in tells no probabilities, over which vLLM's handler of completions stumbles.
    assert answer.status_code == (500 if path == "completions" and "logprobs" in more else 200)
    assert not taken


@pytest.mark.parametrize(
    ("chat", "args", "plain"),
    [
        ({}, {}, True),
        ({"parser_cls": object}, {}, False),
        ({"enable_log_outputs": True}, {}, False),
        ({"enable_force_include_usage": True}, {}, False),
        ({"parser_cls": KeyError}, {}, False),
        ({}, {"sse_keep_alive_interval": 5}, False),
    ],
    ids=["passes on", "parses", "logs", "tells usage", "is not known", "keeps alive"],
)
def test_the_bypass_depends_on_the_handlers_use_of_texts(
    chat: dict[str, object],
    args: dict[str, object],
    plain: bool,  # noqa: FBT001 - of the table
) -> None:
    told = {"parser_cls": None, "enable_log_outputs": False, "enable_force_include_usage": False}
    handler = SimpleNamespace(**(told | chat))
    if handler.parser_cls is KeyError:
        del handler.parser_cls
    app = SimpleNamespace(openai_serving_chat=handler, args=SimpleNamespace(**args))
    assert is_bypassable(ChatCompletionRequest(model=MODEL, stream=True, **CHAT), app) is plain


def test_a_prompt_of_ids_is_one_prompt_and_lists_of_prompts_are_several() -> None:
    handler = SimpleNamespace(enable_force_include_usage=False)
    app = SimpleNamespace(openai_serving_completion=handler)
    for prompt, plain in (([1, 2], True), ("a", True), (["a", "b"], False), ([[1], [2]], False)):
        request = CompletionRequest(model=MODEL, stream=True, prompt=prompt)
        assert is_bypassable(request, app) is plain
        assert not is_bypassable(CompletionRequest(model=MODEL, prompt=prompt), app)
        assert not is_bypassable(request, SimpleNamespace())


@pytest.mark.parametrize("path", PATHS)
def test_usage_counts_what_went_by_the_short_cut(
    server: ServerThread, taken: list[str], path: str
) -> None:
    told = ask(server, path, {**PATHS[path], "stream_options": {"include_usage": True}})
    *_, last, done, _ = told.split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == TOKENS
    assert taken


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_word_that_comes_by_the_short_cut_is_found_and_not_shown(
    server: ServerThread, taken: list[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    texts = [text for text in said(ask(server, path, PATHS[path])) if text.strip()]
    body = {**PATHS[path], "stop": [texts[-2]]}
    wanted = without_bypass(server, path, body, monkeypatch)
    taken.clear()
    assert ask(server, path, body) == wanted
    assert taken
    assert '"finish_reason":"stop"' in wanted


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_fails_after_its_short_cut_ends_with_the_error(
    server: ServerThread, fleet: EchoFleet, taken: list[str], path: str
) -> None:
    fleet.fail_with, fleet.fail_after_tokens = EngineFailed("it", "gone"), 8
    try:
        told = ask(server, path, PATHS[path])
    finally:
        fleet.reset()
    assert len(said(told)) == 8 + (path != "completions")
    assert taken
    assert '"error"' in told.rstrip().split("\n\n")[-1]


def test_a_client_that_leaves_in_the_middle_has_its_request_aborted(
    server: ServerThread, fleet: EchoFleet, taken: list[str]
) -> None:
    body = {"model": MODEL, "max_tokens": 900, "stream": True, **PROMPT}
    url = f"{server.base_url}/v1/completions"
    with httpx.Client(timeout=20) as client, client.stream("POST", url, json=body) as answer:
        lines = answer.iter_lines()
        while len(taken) < 3:
            next(lines)
    assert fleet.aborted.get(timeout=10)
    assert fleet.open_requests == 0


def said(told: str) -> list[str]:
    """The texts of a stream's chunks."""
    texts = []
    for line in told.split("\n\n"):
        if not line.startswith("data: {") or '"choices"' not in line:
            continue
        choices = json.loads(line.removeprefix("data: "))["choices"]
        texts += [
            choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices
        ]
    return texts


# ------------------------------------------------------------------ clients that do not keep up


class Client:
    """Takes what is sent to it at once, or once it is told to; notes it when it has it."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.failure: BaseException | None = None
        self.broken: asyncio.Future[None] | None = None

    async def send(self, message: Message) -> None:
        if self.failure is not None:
            raise self.failure
        if self.broken is not None:
            try:
                await self.broken
            except ConnectionResetError:
                self.got.append(b"reset")
            return
        if not self.reads.is_set():
            await self.reads.wait()
        self.got.append(message.get("body", b""))


class State:
    """As vLLM's output processor keeps it, as far as a short cut looks."""

    def __init__(self) -> None:
        self.text = ""
        self.queue = SimpleNamespace(output=None, put=self._put)
        self.parent_req = None
        self.output_kind = RequestOutputKind.DELTA
        self.stream_interval = 1
        self.streaming_input = False
        self.sampling_mask_chunks: list[object] = []
        self.logprobs_processor = SimpleNamespace(num_logprobs=None, num_prompt_logprobs=None)
        self.detokenizer = SimpleNamespace(get_next_output_text=lambda _ended, _delta: self.text)

    def _put(self, output: object) -> None:
        self.queue.output = output

    def make_request_output(
        self,
        new_token_ids: list[int],
        _pooling: object,
        finish_reason: str | None,
        _stop: object,
        _kv: object = None,
        _ec: object = None,
        error: object = None,
    ) -> RequestOutput:
        assert error is None
        made = CompletionOutput(0, self.text, new_token_ids, None, None, finish_reason)
        return RequestOutput("it", "p", [1], None, [made], finish_reason is not None)


class Stream:
    """A request whose first two outputs have gone vLLM's way."""

    def __init__(self, client: Client) -> None:
        self.client, self.state = client, State()
        self.exchange = Exchange(Dialect.OPENAI, client.send, generates=True)
        self.exchange.has_output = True
        self.cut = StreamBypass(self.exchange)
        self.cut.attach(self.state)

    async def begin(self) -> Stream:
        await self.exchange.send({"type": "http.response.start", "status": 200, "headers": []})
        for text in ("a", "b"):
            await self.ordinary(self.produce(text))
        return self

    def produce(self, text: str, *, finish: str | None = None) -> RequestOutput | None:
        """What vLLM's output processor does with one token; what is left for the stream's task."""
        self.state.text = text
        output = self.state.make_request_output([ord(text)], None, finish, None, None, None)
        if output is not None:
            self.state.queue.put(output)
        return output

    async def ordinary(self, output: RequestOutput | None, *, also: bytes = b"") -> None:
        """What the stream's task does with an output; `also` is one more chunk that it makes."""
        assert output is not None
        assert self.state.queue.output is output
        self.state.queue.output = None
        self.cut.on_output(output)
        if self.cut.unsent is not None:
            await self.cut.unsent
        if also:
            self.cut.on_chunk(also)
        chunk = b"<%s>" % msgspec.json.encode(output.outputs[0].text)
        self.cut.on_chunk(chunk)
        body = {"type": "http.response.body", "body": chunk, "more_body": True}
        await self.exchange.send(body)
        self.cut.on_idle()

    @property
    def told(self) -> bytes:
        return b"".join(self.client.got)


async def test_tokens_that_were_sent_are_counted_with_the_next_output() -> None:
    stream = await Stream(Client()).begin()
    assert stream.produce("c") is None
    assert stream.produce("d") is None
    assert stream.told == b'<"a"><"b"><"c"><"d">'
    last = stream.produce("e", finish="length")
    assert last is not None
    assert last.outputs[0].token_ids == [ord("c"), ord("d"), ord("e")]
    assert last.outputs[0].text == "e"


async def test_an_output_during_a_task_waits_for_it() -> None:
    stream = await Stream(Client()).begin()
    stream.cut.on_output(stream.state.make_request_output([1], None, "stop", None))
    assert stream.produce("c") is not None


async def test_later_tokens_do_not_overtake_an_unfetched_output() -> None:
    stream = await Stream(Client()).begin()
    stream.state.queue.put(object())
    assert stream.produce("c") is not None
    assert stream.told == b'<"a"><"b">'


async def test_a_client_that_does_not_read_has_the_rest_in_order_and_vllms_way() -> None:
    stream = await Stream(Client()).begin()
    stream.client.reads.clear()
    assert stream.produce("c") is None
    left = stream.produce("d")
    assert left is not None
    task = asyncio.create_task(stream.ordinary(left))
    await asyncio.sleep(0)
    assert stream.told == b'<"a"><"b">'
    stream.client.reads.set()
    await asyncio.wait_for(task, 5)
    assert left.outputs[0].token_ids == [ord("c"), ord("d")]
    assert stream.produce("e") is None
    assert stream.told == b'<"a"><"b"><"c"><"d"><"e">'
    last = stream.produce("f", finish="length")
    assert last is not None
    assert last.outputs[0].token_ids == [ord("e"), ord("f")], "each is counted once"


async def test_a_request_that_ends_lets_go_of_a_client_that_does_not_read() -> None:
    stream = await Stream(Client()).begin()
    stream.client.reads.clear()
    assert stream.produce("c") is None
    unsent = stream.cut.unsent
    assert unsent is not None
    stream.cut.close()
    await asyncio.wait([unsent], timeout=5)
    assert unsent.cancelled()
    assert stream.produce("d") is not None
    assert "make_request_output" not in vars(stream.state)


@pytest.mark.parametrize("failure", [RuntimeError("closed"), asyncio.CancelledError()], ids=repr)
async def test_an_error_of_a_server_ends_its_own_stream_only(failure: BaseException) -> None:
    stream = await Stream(Client()).begin()
    stream.client.failure = failure
    assert stream.produce("c") is None
    assert isinstance(stream.state.queue.output, EngineGenerateError)
    assert stream.produce("d") is not None


async def test_a_text_that_is_no_text_ends_its_own_stream_only() -> None:
    stream = await Stream(Client()).begin()
    assert stream.produce("\ud800") is None
    assert isinstance(stream.state.queue.output, EngineGenerateError)


async def test_the_wait_for_a_slow_client_may_fail() -> None:
    """As a server's own coroutine sees it: it may go on, or raise."""
    stream = await Stream(Client()).begin()
    stream.client.reads.clear()
    stream.client.broken = asyncio.get_running_loop().create_future()
    assert stream.produce("c") is None
    stream.client.broken.set_exception(ConnectionResetError)
    assert stream.cut.unsent is not None
    await asyncio.wait_for(stream.cut.unsent, 5)
    assert stream.told.endswith(b'<"b">reset')


async def test_an_output_without_a_chunk_does_not_open_it_before_all_was_sent() -> None:
    stream = await Stream(Client()).begin()
    stream.client.reads.clear()
    assert stream.produce("c") is None
    stream.cut.on_idle()
    assert stream.produce("d") is not None
    stream.cut.close()


async def test_a_request_that_is_to_end_with_an_error_sends_nothing_more_by_it() -> None:
    stream = await Stream(Client()).begin()
    stream.exchange.problem = INTERNAL
    assert stream.produce("c") is not None
    assert stream.told == b'<"a"><"b">'


async def test_a_second_answer_of_the_same_request_ends_the_short_cut() -> None:
    stream = await Stream(Client()).begin()
    stream.cut.attach(State())
    assert stream.produce("c") is not None


async def test_a_stream_with_two_chunks_for_an_output_takes_no_short_cut() -> None:
    stream = Stream(Client())
    await stream.exchange.send({"type": "http.response.start", "status": 200, "headers": []})
    for text in ("a", "b", "c"):
        output = stream.produce(text)
        await stream.ordinary(output, also=b"more")
    assert stream.produce("d") is not None


async def test_a_stream_without_a_template_is_not_inspected_again_and_again() -> None:
    stream = Stream(Client())
    await stream.exchange.send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(20):
        await stream.ordinary(stream.produce("a"))
    await stream.ordinary(stream.produce("b"))
    assert stream.produce("c") is not None
