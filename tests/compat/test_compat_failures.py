"""What clients see when the fleet behind an endpoint cannot serve them."""

from __future__ import annotations

import http.client
import json
import time

import anthropic
import httpx
import openai
import pytest
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletionMessageParam

from baton.domain.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailed,
    Evicted,
    NoCapacity,
    NotResumable,
    QueueFull,
    RequestInvalid,
)
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MAX_BODY_BYTES, Server, ServerThread

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("require_echo_server"),
]

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
CLAUDE_HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400},
    "/v1/completions": {"prompt": "hi", "max_tokens": 400},
    "/v1/responses": {"input": "hi", "max_output_tokens": 400},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400},
}
FAILURES: list[tuple[BatonError, int]] = [
    (NoCapacity("r", 2.0, "no replica"), 503),
    (Evicted("r", 1.5, "waited too long"), 503),
    (DeadlineExceeded("r", "no first token within 30 s"), 504),
    (RequestInvalid("r", "the engine refuses it: no such grammar"), 400),
    (EngineFailed("r", "replica d-0 died"), 500),
    (NotResumable("r", "replica d-0 died"), 500),
]


def post(server: Server, path: str, **changes: object) -> httpx.Response:
    body = {"model": server.model, **PATHS[path], **changes}
    return httpx.post(server.base_url + path, json=body, timeout=20)


def error_of(path: str, body: bytes) -> dict[str, object]:
    """The error object, after checking that it has the shape of the path's API."""
    document = json.loads(body)
    error = document["error"]
    assert isinstance(error, dict)
    if path == "/v1/messages":
        assert document["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert {"message", "type", "param", "code"} <= set(error)
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_no_capacity_is_a_503_with_retry_after_before_anything_else(
    server: Server, fleet: EchoFleet, path: str, *, stream: bool
) -> None:
    fleet.rejection = NoCapacity("-", 2.4, "every replica is gone")
    response = post(server, path, stream=stream)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert "every replica is gone" in str(error_of(path, response.content)["message"])
    assert fleet.arrived.empty()


def test_the_sdks_see_no_capacity_as_their_typed_errors(
    client: openai.OpenAI,
    anthropic_client: anthropic.Anthropic,
    *,
    server: Server,
    fleet: EchoFleet,
) -> None:
    fleet.rejection = QueueFull("-", 1.0, "the queue is full")
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model=server.model, messages=HI, stream=True)
    assert refused.value.response.headers["retry-after"] == "1"
    with pytest.raises(anthropic.RateLimitError):
        anthropic_client.messages.create(model=server.model, messages=CLAUDE_HI, max_tokens=4)
    fleet.rejection = NoCapacity("-", 1.0, "every replica is gone")
    with pytest.raises(openai.InternalServerError) as gone:
        client.chat.completions.create(model=server.model, messages=HI, stream=True)
    assert gone.value.status_code == 503
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        anthropic_client.messages.create(model=server.model, messages=CLAUDE_HI, max_tokens=4)
    assert overloaded.value.status_code == 503


def test_requests_without_an_engine_are_answered_without_capacity(
    client: openai.OpenAI,
    anthropic_client: anthropic.Anthropic,
    *,
    server: Server,
    fleet: EchoFleet,
) -> None:
    fleet.rejection = NoCapacity("-", 1.0, "every replica is gone")
    assert client.models.list().data
    assert anthropic_client.messages.count_tokens(
        model=server.model, messages=CLAUDE_HI
    ).input_tokens
    assert httpx.post(f"{server.base_url}/tokenize", json={"prompt": "x"}).status_code == 200


def test_n_choices_ask_for_n_places(server: Server, fleet: EchoFleet) -> None:
    fleet.free_slots = 2
    assert post(server, "/v1/completions", n=2, max_tokens=1).status_code == 200
    for stream in (False, True):
        refused = post(server, "/v1/completions", n=3, max_tokens=1, stream=stream)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
    assert fleet.rejected == [3, 3]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asks", [0, 1])
def test_a_rejection_is_final_before_and_after_the_first_byte(
    server: Server, fleet: EchoFleet, *, path: str, asks: int
) -> None:
    fleet.rejection = QueueFull("-", 1.0, "the queue is full")
    fleet.admits_before_rejection = asks
    for stream in (False, True):
        fleet.rejected, fleet.admits_before_rejection = [], asks
        assert post(server, path, stream=stream).status_code == 429
        assert fleet.rejected == [1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status"), FAILURES, ids=lambda v: type(v).__name__)
def test_a_failure_before_the_first_token_is_a_status(
    server: Server, fleet: EchoFleet, *, path: str, stream: bool, error: BatonError, status: int
) -> None:
    fleet.fail_with = error
    response = post(server, path, stream=stream)
    assert response.status_code == status
    assert error_of(path, response.content)["message"] == str(error)
    assert ("retry-after" in response.headers) == (status == 503)
    assert fleet.open_requests == 0


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_in_mid_stream_is_the_last_event(
    server: Server, fleet: EchoFleet, path: str
) -> None:
    fleet.fail_after_tokens = 5
    fleet.fail_with = NotResumable("r", "replica d-0 died")
    response = post(server, path, stream=True)
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert len(events) > 3
    last = events[-1].removeprefix("event: error\n").removeprefix("data: ")
    assert error_of(path, last.encode())["message"] == "request r: replica d-0 died"
    assert "[DONE]" not in response.text
    assert "completed" not in response.text


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_after_tokens_is_a_status_when_the_client_does_not_stream(
    server: Server, fleet: EchoFleet, path: str
) -> None:
    fleet.fail_after_tokens = 5
    fleet.fail_with = NotResumable("r", "replica d-0 died")
    response = post(server, path)
    assert response.status_code == 500
    assert error_of(path, response.content)["message"] == "request r: replica d-0 died"


def test_the_sdks_raise_on_a_failure_in_mid_stream(
    client: openai.OpenAI,
    anthropic_client: anthropic.Anthropic,
    *,
    server: Server,
    fleet: EchoFleet,
) -> None:
    fleet.fail_after_tokens = 5
    fleet.fail_with = EngineFailed("r", "replica d-0 died")
    chat = client.chat.completions.create(
        model=server.model, messages=HI, stream=True, max_tokens=50
    )
    with pytest.raises(openai.APIError, match="d-0"):
        list(chat)
    response = client.responses.create(
        model=server.model, input="hi", stream=True, max_output_tokens=50
    )
    with pytest.raises(openai.APIError, match="d-0"):
        list(response)
    message = anthropic_client.messages.create(
        model=server.model, messages=CLAUDE_HI, stream=True, max_tokens=50
    )
    with pytest.raises(anthropic.APIStatusError, match="d-0"):
        list(message)


def test_when_one_of_n_choices_fails_the_others_are_aborted(
    server: Server, fleet: EchoFleet
) -> None:
    fleet.fail_only_first = True
    fleet.fail_with = EngineFailed("r", "replica d-0 died")
    response = post(server, "/v1/chat/completions", n=3, stream=True)
    assert response.status_code == 500
    aborted = {fleet.aborted.get(timeout=1) for _ in range(2)}
    assert len(aborted) == 2
    assert fleet.open_requests == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens_first", [False, True], ids=["queued", "streaming"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_aborted_within_a_second(
    server: Server, fleet: EchoFleet, path: str, *, tokens_first: bool, stream: bool
) -> None:
    fleet.is_paused = not tokens_first
    connection = http.client.HTTPConnection(*server.address)
    body = json.dumps({"model": server.model, **PATHS[path], "stream": stream})
    connection.request("POST", path, body, {"content-type": "application/json"})
    request = fleet.arrived.get(timeout=5)
    if tokens_first and stream:
        assert connection.getresponse().read(20)
    connection.sock.close()
    if stream and tokens_first:
        connection.close()
    left_at_s = time.monotonic()
    assert fleet.aborted.get(timeout=2) == request.request_id
    assert time.monotonic() - left_at_s < 1
    assert fleet.open_requests == 0


def test_a_stop_string_ends_the_request_in_the_fleet(
    client: openai.OpenAI, server: Server, fleet: EchoFleet
) -> None:
    text = client.completions.create(model=server.model, prompt="x", max_tokens=9).choices[0].text
    client.completions.create(model=server.model, prompt="x", max_tokens=900, stop=text[2:4])
    assert fleet.aborted.get(timeout=1)


def test_health_follows_the_fleet(server: Server, fleet: EchoFleet) -> None:
    assert httpx.get(f"{server.base_url}/health").status_code == 200
    fleet.is_healthy = False
    assert httpx.get(f"{server.base_url}/health").status_code == 503


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/openapi.json",
        "/version",
        "/ping",
        "/load",
        "/invocations",
        "/inference/v1/generate",
        "/v1/embeddings",
        "/v1/responses/resp_1",
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "//v1/chat/completions",
        "/x/../v1/chat/completions",
        "/v1/chat%2fcompletions",
        "/v1/%63hat/completions",
        "/metrics/x",
        "/V1/models",
    ],
)
def test_a_path_that_is_not_listed_is_not_there(
    server: Server, fleet: EchoFleet, path: str
) -> None:
    connection = http.client.HTTPConnection(*server.address)
    body = json.dumps({"model": server.model, "messages": [], "prompt": "x"})
    for method in ("GET", "POST"):
        # http.client sends the path as it is; friendlier clients would tidy it.
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 404
        assert json.loads(response.read())["error"]["type"] == "NotFoundError"
    connection.close()
    assert fleet.arrived.empty()


def test_tokenize_and_metrics_are_served(server: Server) -> None:
    tokens = httpx.post(f"{server.base_url}/tokenize", json={"prompt": "hello"}).json()["tokens"]
    text = httpx.post(f"{server.base_url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("hello")
    metrics = httpx.get(f"{server.base_url}/metrics")
    assert metrics.status_code == 200
    assert "http_requests_total" in metrics.text
    assert "vllm:" not in metrics.text


def test_a_websocket_is_refused(server: Server) -> None:
    response = httpx.get(
        f"{server.base_url}/v1/realtime",
        headers={
            "connection": "upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
        },
    )
    assert response.status_code in {403, 404}


@pytest.mark.parametrize("path", PATHS)
def test_a_body_over_the_limit_is_a_413(server: Server, fleet: EchoFleet, path: str) -> None:
    response = httpx.post(
        server.base_url + path,
        content=b" " * (MAX_BODY_BYTES + 1),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 413
    assert error_of(path, response.content)
    assert fleet.arrived.empty()


def test_a_long_prompt_is_tokenized_beside_the_streams(server: Server, fleet: EchoFleet) -> None:
    """The stand-in steps every 2 ms in the same loop: its longest pause is what streams feel."""
    fleet.longest_step_gap_s = 0.0
    prompt = "the quick brown fox " * (MAX_BODY_BYTES // 21)
    started_s = time.monotonic()
    response = httpx.post(f"{server.base_url}/tokenize", json={"prompt": prompt}, timeout=30)
    took_s = time.monotonic() - started_s
    assert response.status_code == 200
    assert fleet.longest_step_gap_s < max(0.1, took_s / 2)


def test_nothing_is_left_open(
    server: Server, echo_server: tuple[ServerThread, EchoFleet], fleet: EchoFleet
) -> None:
    """Runs last in this file: all of the above have ended in the seam too."""
    frontend = echo_server[0].frontend
    assert frontend is not None
    # What happened before is handled once a later request is answered.
    assert post(server, "/v1/completions", max_tokens=1).status_code == 200
    assert frontend.open_requests == 0
    assert fleet.open_requests == 0
