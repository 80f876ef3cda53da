"""Arguments of vLLM's API server, each doing behind the gate what it does without one."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.domain.errors import EngineFailed
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.gate.access import Access
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MODEL, ServerThread, serve

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("require_echo_server"),
]
ORIGIN = "https://app.example"
TEMPLATE = "{% for m in messages %}[{{ m.content }}|{{ greeting }}]{% endfor %}"
ARGUMENTS: dict[str, object] = {
    "sse_keep_alive_interval": 1,
    "allowed_origins": [ORIGIN],
    "allow_credentials": True,
    "chat_template": TEMPLATE,
    "default_chat_template_kwargs": {"greeting": "hello"},
    "enable_force_include_usage": True,
    "enable_prompt_tokens_details": True,
    "enable_request_id_headers": True,
    "fingerprint_mode": "custom",
    "fingerprint_value": "ours",
    "response_role": "helper",
    "max_logprobs": 2,
    "override_generation_config": {"temperature": 0.5},
    "enable_log_requests": True,
    "enable_log_outputs": True,
    "renderer_num_workers": 2,
    "middleware": ["tests.compat.test_compat_arguments.Marked"],
}
HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


class Marked:
    """A layer of an operator's own."""

    def __init__(self, app: Any) -> None:  # noqa: ANN401
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        async def marking(message: Any) -> None:  # noqa: ANN401
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marked", b"1")]
            await send(message)

        await self._app(scope, receive, marking)


@pytest.fixture(scope="module")
def started(model_dir: Path) -> Iterator[tuple[ServerThread, EchoFleet]]:
    fleet = EchoFleet()
    settings = FrontendSettings(model=str(model_dir), served_model_name=MODEL, extra=ARGUMENTS)
    with pytest.MonkeyPatch.context() as patched:
        # As where `vllm serve` has run: keys are the gate's here.
        patched.setenv("VLLM_API_KEY", "a-key-of-vllms")
        with serve(settings, fleet) as thread:
            yield thread, fleet


@pytest.fixture
def fleet(started: tuple[ServerThread, EchoFleet]) -> Iterator[EchoFleet]:
    _, echo = started
    echo.reset()
    yield echo
    echo.reset()


@pytest.fixture
def http(started: tuple[ServerThread, EchoFleet]) -> Iterator[httpx.Client]:
    thread, _ = started
    with httpx.Client(base_url=thread.base_url, timeout=20) as client:
        yield client


def body(**changes: object) -> dict[str, object]:
    return {"model": MODEL, "messages": HI, "max_tokens": 4, **changes}


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_stream_that_waits_is_kept_alive_from_its_first_interval_on(
    http: httpx.Client, fleet: EchoFleet
) -> None:
    fleet.is_paused = True
    begun_s = time.monotonic()
    with http.stream("POST", CHAT, json=body(stream=True)) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        assert time.monotonic() - begun_s < 8 * 1.0, "not held back for eight of them"
        assert ": keep-alive" in (next(lines), next(lines))
        fleet.is_paused = False
        rest = "\n".join(lines)
    assert rest.endswith("[DONE]\n")
    assert len(events(rest)) > 2


def test_a_failure_after_the_first_keep_alive_is_sent_in_the_stream(
    http: httpx.Client, fleet: EchoFleet
) -> None:
    fleet.is_paused = True
    with http.stream("POST", CHAT, json=body(stream=True)) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        fleet.fail_with = EngineFailed("r", "replica d-0 died")
        fleet.is_paused = False
        rest = "\n".join(lines)
    (error,) = (event["error"] for event in events(rest))
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert "[DONE]" not in rest


def test_a_failure_before_the_first_keep_alive_has_a_status(
    http: httpx.Client, fleet: EchoFleet
) -> None:
    fleet.fail_with = EngineFailed("r", "replica d-0 died")
    assert http.post(CHAT, json=body(stream=True)).status_code == 500


@pytest.mark.usefixtures("fleet")
def test_browsers_of_an_origin_that_may_ask_are_told_so_before_they_have_a_key(
    started: tuple[ServerThread, EchoFleet], http: httpx.Client
) -> None:
    thread, _ = started
    asks = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    thread.reconfigure(access=Access(anonymous=False))
    try:
        preflight = http.options(CHAT, headers=asks)
        refused = http.post(CHAT, json=body(), headers={"origin": ORIGIN})
        others = http.options(CHAT, headers={**asks, "origin": "https://evil.example"})
    finally:
        thread.reconfigure(access=Access())
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    assert others.status_code == 400
    assert "access-control-allow-origin" not in others.headers
    served = http.post(CHAT, json=body(), headers={"origin": ORIGIN})
    assert served.status_code == 200
    assert served.headers.get_list("access-control-allow-origin") == [ORIGIN]


def test_answers_look_as_the_arguments_say(http: httpx.Client, fleet: EchoFleet) -> None:
    answer = http.post(CHAT, json=body(), headers={"x-request-id": "mine"})
    document = answer.json()
    assert document["system_fingerprint"] == "ours"
    assert document["choices"][0]["message"]["role"] == "helper"
    assert "prompt_tokens_details" in document["usage"]
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-marked"] == "1"
    asked = fleet.arrived.get(timeout=5)
    assert asked.prompt_token_ids
    prompt = http.post("/detokenize", json={"model": MODEL, "tokens": asked.prompt_token_ids})
    assert "[hi|hello]" in prompt.json()["prompt"]


def test_streams_look_as_the_arguments_say(http: httpx.Client, fleet: EchoFleet) -> None:
    assert fleet.open_requests == 0
    answer = http.post(CHAT, json=body(stream=True))
    *_, last = events(answer.text)
    assert last["usage"]["completion_tokens"] == 4
    assert events(answer.text)[0]["choices"][0]["delta"]["role"] == "helper"
    assert answer.headers["x-marked"] == "1"


def test_more_log_probabilities_than_the_argument_allows_are_refused(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=body(logprobs=True, top_logprobs=3))
    assert answer.status_code == 400
    assert "max allowed: 2" in answer.json()["error"]["message"]


def test_requests_and_outputs_are_logged_where_that_is_asked_for(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    vllms = logging.getLogger("vllm")
    vllms.addHandler(caplog.handler)
    try:
        http.post(CHAT, json=body(), headers={"x-request-id": "logged"})
    finally:
        vllms.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if "logged" in record.getMessage()]
    assert any(text.startswith("Received request") for text in said)
    assert any(text.startswith("Generated response") for text in said)
