"""What one request may ask for, and how refusals look to each API's own clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import cast

import anthropic
import httpx
import openai
import pytest
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletionMessageParam

from baton.domain.errors import (
    BatonError,
    Evicted,
    NoCapacity,
    NotAllowed,
    PromptTooLong,
    QueueFull,
    RateLimited,
    SloUnattainable,
)
from baton.engine.vllm.frontend.app import VllmFrontend
from baton.engine.vllm.gate.limits import FrontendLimits
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MAX_BODY_BYTES, MAX_LEN_TOKENS, Server, ServerThread
from tests.compat.test_compat_failures import PATHS, error_of, post

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
CLAUDE_HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
BODY = FrontendLimits(max_body_bytes=MAX_BODY_BYTES)
ROOMY = 8 * 1024 * 1024
SetLimits = Callable[[FrontendLimits], None]


@pytest.fixture
def limit(
    require_echo_server: None, echo_server: tuple[ServerThread, EchoFleet]
) -> Iterator[SetLimits]:
    thread, _ = echo_server
    yield lambda limits: thread.reconfigure(limits=limits)
    thread.reconfigure(limits=BODY)


def send(server: Server, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(server.base_url + path, content=body, headers=headers, timeout=20)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_beyond_the_limit_are_a_bad_request_and_so_are_prompts(
    server: Server, fleet: EchoFleet, limit: SetLimits, *, stream: bool
) -> None:
    limit(FrontendLimits(max_n=2))
    chat, text = "/v1/chat/completions", "/v1/completions"
    for path, changes in ((chat, {"n": 3}), (text, {"n": 3}), (text, {"prompt": ["a", "b", "c"]})):
        refused = post(server, path, stream=stream, max_tokens=1, **changes)
        assert refused.status_code == 400
        assert "at most 2" in str(error_of(path, refused.content)["message"])
    assert fleet.arrived.empty()
    assert post(server, text, stream=stream, max_tokens=1, n=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_where_engines_tell_no_log_probabilities_they_are_refused(
    server: Server, fleet: EchoFleet, limit: SetLimits, *, stream: bool
) -> None:
    limit(FrontendLimits(logprobs=False))
    chat, text = "/v1/chat/completions", "/v1/completions"
    for path, changes in ((chat, {"logprobs": True}), (text, {"logprobs": 1})):
        refused = post(server, path, stream=stream, max_tokens=1, **changes)
        assert refused.status_code == 400
        assert "log probabilities" in str(error_of(path, refused.content)["message"])
    assert fleet.arrived.empty()
    assert post(server, text, stream=stream, max_tokens=1).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_number_that_no_engine_can_be_told_is_a_bad_request(
    server: Server, fleet: EchoFleet, *, path: str
) -> None:
    frontend = cast(VllmFrontend, fleet.frontend)
    assert frontend._llm is not None
    kept = frontend._llm.output_processor.request_states
    before = set(kept)
    refused = post(server, path, stream=False, top_k=10**40)
    assert set(kept) <= before, "what nobody waits for is kept"
    assert refused.status_code == 400
    assert "64 bits" in str(error_of(path, refused.content)["message"])
    assert fleet.arrived.empty()
    assert post(server, path, stream=False).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_limit_are_a_bad_request(
    server: Server, fleet: EchoFleet, limit: SetLimits, *, path: str, stream: bool
) -> None:
    limit(FrontendLimits(max_tokens=3))
    key = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    refused = post(server, path, stream=stream, **{key: 4})
    assert refused.status_code == 400
    assert "at most 3" in str(error_of(path, refused.content)["message"])
    assert fleet.arrived.empty()
    assert post(server, path, stream=stream, **{key: 3}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_request_without_max_tokens_gets_the_default(
    server: Server, fleet: EchoFleet, limit: SetLimits, path: str
) -> None:
    def given_tokens() -> int:
        body = {k: v for k, v in PATHS[path].items() if "tokens" not in k}
        send(server, path, json.dumps({"model": server.model, **body}).encode())
        return fleet.arrived.get(timeout=5).max_tokens

    fleet.fail_with = NoCapacity("r", 1.0, "answered at once: only what arrived counts here")
    limit(FrontendLimits(default_max_tokens=7))
    assert given_tokens() == 7
    limit(FrontendLimits(default_max_tokens=7, max_tokens=5))
    assert given_tokens() == 5
    limit(FrontendLimits(default_max_tokens=MAX_LEN_TOKENS * 2))
    to_the_end = given_tokens()
    limit(BODY)
    assert MAX_LEN_TOKENS - 100 < given_tokens() == to_the_end < MAX_LEN_TOKENS


def test_an_explicit_max_tokens_overrides_the_default(
    server: Server, fleet: EchoFleet, limit: SetLimits
) -> None:
    fleet.fail_with = NoCapacity("r", 1.0, "answered at once: only what arrived counts here")
    limit(FrontendLimits(default_max_tokens=7))
    for path in PATHS:
        post(server, path)
        assert fleet.arrived.get(timeout=5).max_tokens == 400


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens", "/tokenize"])
def test_a_hundred_thousand_messages_are_refused_while_streams_go_on(
    server: Server, fleet: EchoFleet, limit: SetLimits, path: str
) -> None:
    """Without the limit, vLLM's handlers hold all streams up for seconds."""
    limit(FrontendLimits(max_body_bytes=ROOMY))
    key = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
    one = "a" if key == "prompt" else {"role": "user", "content": "a"}
    body = json.dumps({"model": server.model, "max_tokens": 2, key: [one] * 100_000}).encode()
    fleet.longest_step_gap_s = 0.0
    refused = send(server, path, body)
    assert refused.status_code == 400
    assert error_of(path.removesuffix("/count_tokens"), refused.content)["message"]
    assert fleet.arrived.empty()
    # Five times what it takes here; without the limit it is 0.8 to 6.3 s.
    assert fleet.longest_step_gap_s < 0.5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("depth", [900, 10_000, 100_000])
def test_a_deeply_nested_body_is_a_bad_request_in_the_words_of_the_api(
    server: Server, fleet: EchoFleet, *, path: str, depth: int
) -> None:
    key = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
    nested = "[" * depth + "]" * depth
    body = f'{{"model": "{server.model}", "max_tokens": 2, "{key}": {nested}}}'
    refused = send(server, path, body.encode())
    assert refused.status_code == 400
    error = error_of(path, refused.content)
    assert error["message"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
    assert httpx.get(f"{server.base_url}/health").status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"{", b"\xff\xfe\xff", b"[]", b'{"max_tokens": 1e400}', b"null"])
def test_an_unreadable_body_is_a_bad_request_in_the_words_of_the_api(
    server: Server, path: str, body: bytes
) -> None:
    refused = send(server, path, body)
    assert refused.status_code == 400
    assert error_of(path, refused.content)["message"]


REFUSALS: list[tuple[BatonError, int, type[openai.APIStatusError], str]] = [
    (SloUnattainable("r", 2.2, "late"), 429, openai.RateLimitError, "rate_limit_error"),
    (RateLimited("r", 2.2, "used up"), 429, openai.RateLimitError, "rate_limit_error"),
    (QueueFull("r", 2.2, "full"), 429, openai.RateLimitError, "rate_limit_error"),
    (Evicted("r", 2.2, "waited"), 503, openai.InternalServerError, "overloaded_error"),
    (NoCapacity("r", 2.2, "none"), 503, openai.InternalServerError, "overloaded_error"),
    (NotAllowed("r", "no such class"), 403, openai.PermissionDeniedError, "permission_error"),
    (PromptTooLong("r", "long"), 400, openai.BadRequestError, "invalid_request_error"),
]


@pytest.mark.parametrize(
    ("late", "stream"), [(False, True), (True, False)], ids=["at the gate", "in the fleet"]
)
@pytest.mark.parametrize(
    ("error", "status", "raised", "kind"), REFUSALS, ids=[type(row[0]).__name__ for row in REFUSALS]
)
def test_the_sdks_raise_the_right_error_for_every_refusal(  # noqa: PLR0913 - each is a case
    client: openai.OpenAI,
    anthropic_client: anthropic.Anthropic,
    *,
    server: Server,
    limit: SetLimits,
    fleet: EchoFleet,
    error: BatonError,
    status: int,
    raised: type[openai.APIStatusError],
    kind: str,
    stream: bool,
    late: bool,
) -> None:
    if late:
        fleet.fail_with = error
    else:
        fleet.rejection = error

    def asks() -> Iterator[Callable[[], object]]:
        model = server.model
        yield lambda: client.chat.completions.create(
            model=model, messages=HI, max_tokens=4, stream=stream
        )
        yield lambda: client.responses.create(model=model, input="hi", stream=stream)
        yield lambda: client.completions.create(model=model, prompt="hi", stream=stream)

    for ask in asks():
        with pytest.raises(raised) as refused:
            ask()
        check(refused.value, status)
    with pytest.raises(anthropic.APIStatusError) as refused_too:
        anthropic_client.messages.create(
            model=server.model, messages=CLAUDE_HI, max_tokens=4, stream=stream
        )
    check(refused_too.value, status)
    own = {503: anthropic.InternalServerError}.get(status, getattr(anthropic, raised.__name__))
    assert isinstance(refused_too.value, own)
    assert refused_too.value.body == {
        "type": "error",
        "error": {"type": kind, "message": str(error)},
    }


def check(error: openai.APIStatusError | anthropic.APIStatusError, status: int) -> None:
    assert error.status_code == status
    retry_after = error.response.headers.get("retry-after")
    assert retry_after == ("3" if status in {429, 503} else None)
