"""Bad requests of many kinds, on every API, streamed and not: a status, and no internals."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import ADAPTER, Server

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("require_echo_server"),
]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, object]] = {
    CHAT: {"messages": HI, "max_tokens": 4},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 4},
    RESPONSES: {"input": "hi", "max_output_tokens": 4},
    MESSAGES: {"messages": HI, "max_tokens": 4},
}
NONSENSE = {"type": "nonsense"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": NONSENSE}}
FORMAT = {"type": "json_schema", "name": "x", "schema": NONSENSE}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
LONG = "word " * 5000


def each(status: int, changes: dict[str, object]) -> list[tuple[str, dict[str, object], int]]:
    """The same mistake on every API."""
    return [(path, changes, status) for path in GOOD]


BAD: list[tuple[str, dict[str, object], int]] = [
    (CHAT, {"response_format": SCHEMA}, 400),
    (COMPLETIONS, {"response_format": SCHEMA}, 400),
    (RESPONSES, {"text": {"format": FORMAT}}, 400),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": NONSENSE}}}, 400),
    (CHAT, {"response_format": NONSENSE}, 400),
    (CHAT, {"structured_outputs": {"regex": "(((("}}, 400),
    (COMPLETIONS, {"structured_outputs": {"regex": "(((("}}, 400),
    (RESPONSES, {"structured_outputs": {"regex": "(((("}}, 400),
    (CHAT, {"structured_outputs": {"grammar": "nonsense ::="}}, 400),
    (CHAT, {"structured_outputs": {"choice": []}}, 400),
    (CHAT, {"structured_outputs": {"json": "{nonsense"}}, 400),
    (CHAT, {"logit_bias": {"999999999": 1}}, 400),
    (COMPLETIONS, {"logit_bias": {"999999999": 1}}, 400),
    (CHAT, {"stop_token_ids": [2**70]}, 400),
    (COMPLETIONS, {"prompt": [999_999_999]}, 400),
    (COMPLETIONS, {"allowed_token_ids": []}, 400),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, 400),
    (COMPLETIONS, {"logprobs": 99}, 400),
    (CHAT, {"thinking_token_budget": 3}, 400),
    *each(400, {"temperature": -1}),
    *each(400, {"temperature": "hot"}),
    *each(404, {"model": "nope"}),
    *each(400, {"model": 5}),
    (CHAT, {"messages": "x"}, 400),
    (CHAT, {"messages": [1]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, 400),
    (CHAT, {"max_tokens": 0}, 400),
    (CHAT, {"n": -1}, 400),
    (CHAT, {"tools": TOOLS, "tool_choice": "required"}, 400),
    (COMPLETIONS, {"prompt": {}}, 400),
    (COMPLETIONS, {"prompt": LONG}, 400),
    (RESPONSES, {"input": 3}, 400),
    (RESPONSES, {"input": LONG}, 400),
    (RESPONSES, {"max_output_tokens": 0}, 400),
    (RESPONSES, {"previous_response_id": "resp_x"}, 404),
    (MESSAGES, {"messages": 4}, 400),
    (MESSAGES, {"messages": [{"role": "user", "content": LONG}]}, 400),
    (MESSAGES, {"max_tokens": 0}, 400),
    (MESSAGES, {"stop_sequences": [""]}, 400),
]  # fmt: skip
INTERNALS = re.compile(
    r"pydantic|validation error|input_value|input_type|'loc'|Traceback|site-packages|\.py\b"
    r"|ValueError\(|[a-z]Param\b|[a-z]Request\b|[a-z]Response\b|function-wrap| at 0x"
)


def post(server: Server, path: str, **changes: object) -> httpx.Response:
    body = {"model": server.model, **GOOD[path], **changes}
    return httpx.post(server.base_url + path, json=body, timeout=20)


def shaped(path: str, answer: httpx.Response) -> dict[str, Any]:
    """The error, after checking that it has the shape of the path's API and nothing else."""
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    error: dict[str, Any] = document["error"]
    if path.startswith(MESSAGES):
        assert sorted(document) == ["error", "type"]
        assert sorted(error) == ["message", "type"]
        assert error["type"].endswith("_error")
    else:
        assert sorted(document) == ["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert error["code"] == answer.status_code
        assert re.fullmatch("[A-Za-z]+Error", error["type"])
    assert INTERNALS.search(answer.text) is None, answer.text
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_has_a_status_in_its_apis_shape_and_says_nothing_internal(
    server: Server, fleet: EchoFleet, *, stream: bool
) -> None:
    for path, changes, status in BAD:
        answer = post(server, path, stream=stream, **changes)
        assert answer.status_code == status, (path, changes, answer.text[:500])
        error = shaped(path, answer)
        assert error["message"], (path, changes)
        assert "InternalServerError" not in answer.text
    assert fleet.arrived.empty()


def test_a_bad_request_is_refused_with_the_same_words_streamed_or_not(server: Server) -> None:
    for path, changes, _status in BAD:
        whole, stream = (post(server, path, stream=is_good, **changes) for is_good in (False, True))
        assert whole.json() == stream.json(), (path, changes)


@pytest.mark.parametrize("path", [*GOOD, f"{MESSAGES}/count_tokens", "/tokenize"])
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"[]", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"{}", "application/json"),
        (b"{}", "text/plain"),
        (
            b'{"model": "tiny", "messages": [1], "input": [1], "max_tokens": "x"}',
            "application/json",
        ),
    ],
)
def test_a_body_that_is_no_request_is_a_bad_request(
    server: Server, path: str, content: bytes, kind: str
) -> None:
    answer = httpx.post(
        server.base_url + path, content=content, headers={"content-type": kind}, timeout=20
    )
    assert answer.status_code == 400
    assert shaped(path, answer)["message"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, {"logprobs": True, "top_logprobs": 1}), (COMPLETIONS, {"logprobs": 1})],
)
@pytest.mark.usefixtures("fleet")
def test_a_stream_that_vllms_handler_breaks_off_is_an_error_without_its_reason(
    server: Server, path: str, asked: dict[str, object]
) -> None:
    """The stand-in tells no log probabilities, over which handlers stumble."""
    answer = post(server, path, stream=True, **asked)
    if answer.status_code == 200:
        *_, last, _end = answer.text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 500
        shaped(path, answer)
    assert re.search(f"IndexError|NoneType|{INTERNALS.pattern}", answer.text) is None


def test_the_sdks_find_one_model(
    client: openai.OpenAI, anthropic_client: anthropic.Anthropic, server: Server
) -> None:
    for name in (server.model, ADAPTER):
        assert client.models.retrieve(name).id == name
        assert anthropic_client.models.retrieve(name).id == name
    assert [row.id for row in anthropic_client.models.list()] == [
        row.id for row in client.models.list()
    ]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/nope")
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.models.retrieve("nope")
    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.messages.create(model=server.model, messages=[], max_tokens=0)
