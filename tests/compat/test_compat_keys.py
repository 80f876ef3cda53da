"""Who is let in by a running endpoint, as whom, and what becomes of keys and prompts in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletionMessageParam

from baton.domain.errors import NoCapacity, SloUnattainable
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.adapters import ADAPTER_PATHS
from baton.engine.vllm.gate.gate import ROUTES
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.runtime.keys.api_keys import ApiKey, InvalidKey, ValidKey, mint
from baton.runtime.keys.key_files import KeyFiles, edit_key_file
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MAX_BODY_BYTES, Server, ServerThread
from tests.compat.test_compat_failures import PATHS, error_of

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NOW = datetime.now(UTC)
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
CLAUDE_HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
EVERY_PATH = [path for paths in ROUTES.values() for path in paths]
GENERATING = list(PATHS)


class Keys:
    """A key file, what is in it, and an endpoint that lets in whoever has a key of it."""

    def __init__(self, folder: Path, thread: ServerThread) -> None:
        self.path = folder / "all.keys"
        self.tokens: dict[str, str] = {}
        self._thread = thread
        with edit_key_file(self.path, create=True) as document:
            for name, key, token in _made():
                document.add(key)
                self.tokens[name] = token
        self.files = KeyFiles({"acme": self.path, "beta": self.path, "shared": self.path})
        self.files.poll()
        self.access = Access(
            look_up=self._look_up, anonymous=False, isolated=frozenset({"acme", "beta"})
        )
        thread.reconfigure(access=self.access)

    def _look_up(self, token: str) -> ValidKey | InvalidKey:
        return self.files.ring.look_up(token, NOW)

    def revoke(self, name: str) -> None:
        with edit_key_file(self.path) as document:
            document.revoke(self.tokens[name].split("_")[1], NOW)
        self.files.poll()

    def limit(self, limits: FrontendLimits) -> None:
        self._thread.reconfigure(limits=limits)


def _made() -> Iterator[tuple[str, ApiKey, str]]:
    for name in ("acme", "beta", "shared"):
        yield (name, *mint(name, now=NOW))
    key, token = mint("acme", now=NOW)
    yield "revoked", replace(key, revoked_at=NOW), token
    key, token = mint("acme", now=NOW)
    yield "expired", replace(key, expires_at=NOW - timedelta(days=1)), token


@pytest.fixture
def keys(
    require_echo_server: None, echo_server: tuple[ServerThread, EchoFleet], tmp_path: Path
) -> Iterator[Keys]:
    thread, _ = echo_server
    yield Keys(tmp_path, thread)
    thread.reconfigure(access=Access(), limits=FrontendLimits(max_body_bytes=MAX_BODY_BYTES))


def ask(server: Server, path: str, token: str | None, **headers: str) -> httpx.Response:
    """One request to any route, good but perhaps for its key."""
    named = {} if token is None else {"authorization": f"Bearer {token}"}
    bodies = PATHS | {
        "/v1/messages/count_tokens": {"messages": CLAUDE_HI},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [300]},
    }
    url = server.base_url + path
    if path in ADAPTER_PATHS:
        return httpx.post(url, json={"lora_name": "x"}, headers=named | headers)
    if path not in bodies:
        return httpx.get(url, headers=named | headers)
    body = {"model": server.model, **bodies[path]}
    for name in ("max_tokens", "max_output_tokens"):
        if name in body:
            body[name] = 2
    return httpx.post(url, json=body, headers=named | headers)


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("shown", ["none", "wrong", "revoked", "expired", "beta", "acme"])
def test_every_route_but_health_is_for_those_with_a_good_key(
    server: Server, fleet: EchoFleet, keys: Keys, *, path: str, shown: str
) -> None:
    token = {"none": None, "wrong": "bt_wrong_wrong"}.get(shown, keys.tokens.get(shown))
    response = ask(server, path, token)
    if path == "/health" or shown in {"beta", "acme"}:
        # Loading adapters is for keys that may administer; `test_compat_adapters` has those.
        assert response.status_code == (403 if path in ADAPTER_PATHS else 200)
        if path in GENERATING:
            assert fleet.arrived.get(timeout=5).tenant == shown
        return
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    error = error_of("/v1/messages" if path.startswith("/v1/messages") else path, response.content)
    assert error["type"] in {"authentication_error", "AuthenticationError"}
    assert fleet.arrived.empty()


def test_the_sdks_raise_their_authentication_errors(server: Server, keys: Keys) -> None:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="wrong", max_retries=0) as sdk:
        with pytest.raises(openai.AuthenticationError):
            sdk.chat.completions.create(model=server.model, messages=HI, max_tokens=2)
        with pytest.raises(openai.AuthenticationError):
            sdk.models.list()
    with (
        anthropic.Anthropic(base_url=server.base_url, api_key="wrong", max_retries=0) as claude,
        pytest.raises(anthropic.AuthenticationError),
    ):
        claude.messages.create(model=server.model, messages=CLAUDE_HI, max_tokens=2)


def test_the_sdks_are_let_in_each_by_its_own_header(
    server: Server, fleet: EchoFleet, keys: Keys
) -> None:
    token = keys.tokens["acme"]
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=token, max_retries=0) as sdk:
        sdk.chat.completions.create(
            model=server.model,
            messages=HI,
            max_tokens=2,
            extra_headers={"x-slo-class": "batch"},
        )
    with anthropic.Anthropic(base_url=server.base_url, api_key=token, max_retries=0) as claude:
        claude.messages.create(model=server.model, messages=CLAUDE_HI, max_tokens=2)
    first, second = (fleet.arrived.get(timeout=5) for _ in range(2))
    assert (first.tenant, first.slo_class) == ("acme", "batch")
    assert (second.tenant, second.slo_class) == ("acme", None)


def test_a_revoked_key_is_rejected(server: Server, keys: Keys) -> None:
    token = keys.tokens["acme"]
    assert ask(server, "/v1/models", token).status_code == 200
    keys.revoke("acme")
    refused = ask(server, "/v1/models", token)
    assert refused.status_code == 401
    assert "revoked" in refused.json()["error"]["message"]


def test_an_unlisted_path_is_absent_for_every_caller(server: Server, keys: Keys) -> None:
    for token in (None, keys.tokens["acme"]):
        assert ask(server, "/version", token).status_code == 404


def test_the_limits_of_a_tenant_are_asked_for_before_its_request_is_read(
    server: Server, fleet: EchoFleet, keys: Keys
) -> None:
    fleet.rejected_tenants = frozenset({"acme"})
    for path in GENERATING:
        refused = ask(server, path, keys.tokens["acme"])
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "3"
        assert "used up" in str(error_of(path, refused.content)["message"])
        assert ask(server, path, keys.tokens["beta"]).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_request_carries_its_caller(
    server: Server, fleet: EchoFleet, keys: Keys, *, path: str, stream: bool
) -> None:
    body = {"model": server.model, **PATHS[path], "stream": stream}
    body |= {"max_output_tokens": 2} if "max_output_tokens" in body else {"max_tokens": 2}
    headers = {"x-api-key": keys.tokens["acme"], "x-slo-class": "batch"}
    assert httpx.post(server.base_url + path, json=body, headers=headers).status_code == 200
    request = fleet.arrived.get(timeout=5)
    assert (request.tenant, request.slo_class) == ("acme", "batch")
    assert request.cache_salt == "baton:tenant:acme"
    assert b"baton_caller" not in request.payload


def test_every_answer_of_a_request_with_several_is_of_its_caller(
    server: Server, fleet: EchoFleet, keys: Keys
) -> None:
    body = {"model": server.model, "prompt": ["a", "b"], "n": 3, "max_tokens": 1, "seed": 5}
    headers = {"authorization": f"Bearer {keys.tokens['beta']}"}
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body, headers=headers)
    assert len(answer.json()["choices"]) == 6
    requests = [fleet.arrived.get(timeout=5) for _ in range(6)]
    assert {request.tenant for request in requests} == {"beta"}
    assert {request.cache_salt for request in requests} == {"baton:tenant:beta"}


def test_a_caller_cannot_impersonate_another(server: Server, fleet: EchoFleet, keys: Keys) -> None:
    body = {
        "model": server.model,
        "prompt": "x",
        "max_tokens": 1,
        "cache_salt": "baton:tenant:acme",
        "vllm_xargs": {"baton_caller": ["acme", "premium", "acme"], "other": 1},
    }
    headers = {
        "authorization": f"Bearer {keys.tokens['shared']}",
        "x-baton-tenant": "acme",
        "x-tenant": "acme",
    }
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    request = fleet.arrived.get(timeout=5)
    assert (request.tenant, request.slo_class) == ("shared", None)
    assert request.cache_salt == "baton:shared:baton:tenant:acme"
    assert b"premium" not in request.payload


def test_isolated_tenants_share_no_salt_and_a_client_s_own_stays_inside_its_tenant_s(
    server: Server, fleet: EchoFleet, keys: Keys
) -> None:
    salts = {}
    for name in ("acme", "beta", "shared"):
        for salt in (None, "mine"):
            body = {"model": server.model, "prompt": "x", "max_tokens": 1, "cache_salt": salt}
            headers = {"x-api-key": keys.tokens[name]}
            httpx.post(f"{server.base_url}/v1/completions", json=body, headers=headers)
            salts[name, salt] = fleet.arrived.get(timeout=5).cache_salt
    assert len(set(salts.values())) == 6
    assert salts["shared", None] is None
    assert salts["shared", "mine"] == "mine"
    assert salts["acme", "mine"] == "baton:tenant:acme:mine"


class Everything(logging.Handler):
    """All that anybody logs, as it would be written."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> Iterator[Everything]:
    """At the levels that a deployment writes."""
    handler = Everything()
    names = [None, "vllm", "uvicorn", "uvicorn.error", "uvicorn.access"]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


CANARY = "canary7f3a9"


@pytest.mark.parametrize("path", GENERATING)
def test_neither_a_key_nor_a_prompt_is_ever_in_a_log_or_in_an_answer_about_another(
    server: Server, fleet: EchoFleet, keys: Keys, *, path: str, log: Everything
) -> None:
    """Good requests, refused ones, and every way to be a bad one."""
    good, wrong = keys.tokens["acme"], f"bt_{CANARY}_{CANARY}"
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    said: object = [{"role": "user", "content": CANARY}] if field == "messages" else CANARY
    small = {"model": server.model, field: said, "max_tokens": 2, "max_output_tokens": 2}
    bodies: list[tuple[object, BaseException | None]] = [
        (small, None),
        (small, SloUnattainable("r", 1.0, "late")),
        (small | {"stream": True}, SloUnattainable("r", 1.0, "late")),
        (small | {"temperature": CANARY}, None),
        (small | {"temperature": 99}, None),
        (small | {field: {"x": CANARY}}, None),
        (small | {field: [{"role": CANARY, "content": [{"type": CANARY}]}]}, None),
        (small | {field: f"{CANARY} " * 9000}, None),
        (small | {"model": CANARY}, None),
        (small | {"tools": [{"type": "function", "function": {"name": CANARY}}]}, None),
        (small | {"tool_choice": CANARY}, None),
    ]
    for body, failure in bodies:
        fleet.fail_with = failure if isinstance(failure, SloUnattainable) else None
        for token in (good, wrong):
            headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            answer = httpx.post(
                server.base_url + path, content=json.dumps(body), headers=headers, timeout=20
            )
            if token == wrong:
                assert CANARY not in answer.text
            assert good.rpartition("_")[2] not in answer.text
    surrogate = json.dumps(small | {field: CANARY + "\ud800"})
    headers = {"authorization": f"Bearer {good}", "content-type": "application/json"}
    assert httpx.post(server.base_url + path, content=surrogate, headers=headers).status_code == 400
    written = "\n".join(log.lines)
    assert CANARY not in written
    assert good.rpartition("_")[2] not in written


def test_a_refusal_is_no_event_for_the_log(
    server: Server, fleet: EchoFleet, keys: Keys, log: Everything
) -> None:
    fleet.fail_with = NoCapacity("r", 1.0, "busy")
    for path in GENERATING:
        assert ask(server, path, keys.tokens["acme"]).status_code == 503
    assert [line for line in log.lines if "httpx" not in line and "httpcore" not in line] == []
