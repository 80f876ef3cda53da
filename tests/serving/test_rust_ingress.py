"""An ingress in Rust mode: HAProxy, vLLM's Rust frontend and a fleet, with no Python between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from baton.config import load_config
from baton.config.schema.deployment import DeploymentConfig
from baton.control.queue.admission_controller import SheddingClass
from baton.domain.commands import Delivery
from baton.domain.errors import EngineStartFailed, RateLimited, Rejected
from baton.domain.request import FinishReason, Request
from baton.engine.vllm.frontend.rust_frontend import RustFrontend, find_rust_frontend
from baton.engine.vllm.frontend.settings import FrontendHooks, FrontendSettings
from baton.runtime.keys.api_keys import mint
from baton.runtime.keys.key_files import edit_key_file
from baton.runtime.process.clock import MonotonicClock
from baton.serving.front.data_path import find_haproxy
from baton.serving.ingress.auth import IngressAuth, frontend_limits
from baton.serving.ingress.rust_ingress import (
    RustIngress,
    find_real_haproxy,
    gate_settings,
    open_routes,
)
from tests.engine.test_rust_frontend import FACTS
from tests.fakes.frontends import open_hooks
from tests.fakes.tiny_model import tiny_model

with warnings.catch_warnings():
    # The vendors' modules warn while they are imported.
    warnings.simplefilter("ignore")

NOW = datetime(2026, 11, 1, tzinfo=UTC)
CONFIG = """
version: 1
model: {{source: {model}, max_len: 512}}
pools: {{main: {{role: mixed}}}}
tenants: {{acme: {{keys_file: {keys}}}, default: {{anonymous: true}}}}
slo:
  default: {{ttft: 1s}}
  classes: {{gold: {{ttft: 500ms}}, rush: {{ttft: 1s, priority: 5}}}}
server: {{api_server: rust, listener: {front}, port: {port}}}
"""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Fleet:
    """Answers every request with one token after another; refuses the tenants that it is told."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.refused: dict[str, Rejected] = {}
        self.shedding: list[SheddingClass] = []
        self.frontend: RustFrontend | None = None

    def hooks(self) -> FrontendHooks:
        return open_hooks(self._answer, lambda _ids: None)

    def _answer(self, request: Request) -> None:
        self.requests.append(request)
        assert self.frontend is not None
        for index in range(request.max_tokens):
            last = index == request.max_tokens - 1
            finish = FinishReason.LENGTH if last else None
            self.frontend.deliver([Delivery(request.request_id, (300 + index,), finish)])


class Running:
    def __init__(self, ingress: RustIngress, fleet: Fleet, url: str, keys: Path) -> None:
        self.ingress, self.fleet, self.keys = ingress, fleet, keys
        self.http = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False)

    async def chat(self, **headers: str) -> httpx.Response:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post("/v1/chat/completions", json=CHAT, headers=told)

    async def until(self, status: int, **headers: str) -> httpx.Response:
        """What it answers once it answers so."""
        async with asyncio.timeout(20):
            while True:
                answer = await self.chat(**headers)
                if answer.status_code == status:
                    return answer
                await asyncio.sleep(0.05)

    def key(self) -> str:
        key, token = mint("acme", now=NOW)
        with edit_key_file(self.keys, create=True) as document:
            document.add(key)
        return token

    def revoke_all(self) -> None:
        with edit_key_file(self.keys) as document:
            for key in document.keys:
                document.revoke(key.key_id, NOW)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> DeploymentConfig:
    return configured(tmp_path, model)


def configured(
    tmp_path: Path, model: Path, *, front: str = "ray-serve", port: int = 8000
) -> DeploymentConfig:
    path = tmp_path / "baton.yaml"
    keys = tmp_path / "keys"
    path.write_text(CONFIG.format(model=model, keys=keys, front=front, port=port))
    keys.touch(mode=0o600)
    return load_config([path], env={}).config


@pytest.fixture
async def running(config: DeploymentConfig, tmp_path: Path) -> AsyncIterator[Running]:
    async with an_ingress(config, tmp_path / "keys") as made:
        yield made


@asynccontextmanager
async def an_ingress(
    config: DeploymentConfig, keys: Path, *, deployment: str | None = None
) -> AsyncIterator[Running]:
    try:
        find_rust_frontend(os.environ)
    except EngineStartFailed as missing:
        pytest.skip(str(missing))
    if find_haproxy(os.environ) is None:
        pytest.skip("no executable haproxy was found")
    fleet = Fleet()
    settings = FrontendSettings(
        model=config.models[config.model_name].source,
        served_model_name="tiny",
        routes=open_routes(config),
        limits=frontend_limits(config),
    )
    fleet.frontend = RustFrontend(settings, FACTS, hooks=fleet.hooks(), clock=MonotonicClock())
    door = IngressAuth(config)
    await door.start()
    ingress = RustIngress(
        fleet.frontend,
        door,
        config=lambda: config,
        refusal=fleet.refused.get,
        shedding=lambda: fleet.shedding,
        deployment=deployment,
    )
    await ingress.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await ingress.open(listener)
            port = config.server.port if deployment else listener.getsockname()[1]
            made = Running(ingress, fleet, f"http://127.0.0.1:{port}", keys)
            yield made
            await made.http.aclose()
    finally:
        await ingress.close()
        await door.close()


async def test_tokens_come_from_the_fleet_to_every_client(running: Running) -> None:
    answer = await running.until(200, x_request_id="why", x_slo_class="gold")
    assert answer.json()["usage"]["completion_tokens"] == 3
    request = running.fleet.requests[-1]
    assert (request.tenant, request.slo_class) == ("default", "gold")
    assert request.request_id.startswith("chatcmpl-why~")
    assert (await running.http.get("/health")).status_code == 200
    assert (await running.http.get("/v1/responses")).status_code == 404


async def test_a_key_is_good_soon_after_it_was_made_and_not_after_it_was_revoked(
    running: Running,
) -> None:
    token = await asyncio.to_thread(running.key)
    await running.until(200, authorization=f"Bearer {token}")
    assert running.fleet.requests[-1].tenant == "acme"
    await asyncio.to_thread(running.revoke_all)
    answer = await running.until(401, authorization=f"Bearer {token}")
    assert answer.json()["error"]["message"] == "this API key is revoked"


async def test_a_tenant_is_rejected_before_its_body_is_read(
    running: Running,
) -> None:
    token = await asyncio.to_thread(running.key)
    await running.until(200, x_api_key=token)
    running.fleet.refused["acme"] = RateLimited("-", 2.2, "it has used up its requests")
    answer = await running.until(429, x_api_key=token)
    assert answer.headers["retry-after"] == "3"
    assert (await running.chat()).status_code == 200
    running.fleet.refused.clear()
    await running.until(200, x_api_key=token)


async def test_a_class_that_would_be_late_is_refused_and_others_are_not(running: Running) -> None:
    running.fleet.shedding = [
        SheddingClass("default", "default", is_default=True, retry_after_s=1.2)
    ]
    for headers in ({}, {"x_slo_class": "default"}):
        answer = await running.until(429, **headers)
        assert answer.headers["retry-after"] == "2"
    assert (await running.chat(x_slo_class="gold")).status_code == 200
    token = await asyncio.to_thread(running.key)
    await running.until(200, x_api_key=token)
    running.fleet.shedding = []
    await running.until(200)


async def test_a_class_of_higher_priority_than_ones_own_is_refused(running: Running) -> None:
    await running.until(200)
    assert (await running.chat(x_slo_class="rush")).status_code == 403
    assert (await running.chat(x_slo_class="nobody-has-it")).status_code == 403
    assert not any(request.slo_class == "rush" for request in running.fleet.requests)


async def test_when_the_program_dies_the_ingress_is_broken_and_says_so(running: Running) -> None:
    assert not running.ingress.broken
    assert running.fleet.frontend is not None
    assert running.fleet.frontend.pid is not None
    os.kill(running.fleet.frontend.pid, signal.SIGKILL)
    answer = await running.until(503)
    assert answer.json()["error"]["message"] == "this frontend is going away; try again"
    assert running.ingress.broken


async def test_it_drains(running: Running) -> None:
    await running.until(200)
    await asyncio.wait_for(running.ingress.drain(), 10)
    async with httpx.AsyncClient(trust_env=False) as other:
        with pytest.raises(httpx.TransportError):
            await other.get(running.http.base_url)


async def test_where_its_gate_is_the_front_clients_come_to_the_public_port(
    tmp_path: Path, model: Path
) -> None:
    config = configured(tmp_path, model, front="ingress", port=free_port())
    async with an_ingress(config, tmp_path / "keys", deployment="session_1/baton") as made:
        assert (await made.chat()).status_code == 200, "from the first connection on"
        async with an_ingress(config, tmp_path / "keys", deployment="session_1/baton") as other:
            await asyncio.wait_for(made.ingress.drain(), 10)
            assert (await other.chat()).status_code == 200
            assert len(other.fleet.requests) == 1


async def test_an_ingress_does_not_open_at_a_public_port_of_another_program(
    tmp_path: Path, model: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = configured(tmp_path, model, front="ingress", port=taken.getsockname()[1])
        with pytest.raises(EngineStartFailed, match=f":{config.server.port}: the port is in use"):
            async with an_ingress(config, tmp_path / "keys", deployment="session_1/baton"):
                pytest.fail("it opened")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_haproxy_itself_is_found_behind_what_stands_in_for_it(tmp_path: Path) -> None:
    real, guard = tmp_path / "real", tmp_path / "haproxy"
    for path in (real, guard):
        path.write_text("#!/bin/sh\n")
        path.chmod(0o700)
    environ = {"RAY_SERVE_HAPROXY_BINARY_PATH": str(guard)}
    assert find_real_haproxy(environ) == str(guard)
    (tmp_path / "front.json").write_text(json.dumps({"haproxy": str(real)}))
    assert find_real_haproxy(environ) == str(real)


def test_routes_that_the_frontend_does_not_have_are_closed(config: DeploymentConfig) -> None:
    found = open_routes(config)
    assert "chat" in found
    assert not {"messages", "responses"} & set(found)


def test_a_gate_holds_the_longest_stream_and_the_largest_body_that_are_configured(
    config: DeploymentConfig,
) -> None:
    timeouts = replace(config.admission.timeouts, total_s=3600.0)
    admission = replace(config.admission, timeouts=timeouts, max_body_bytes=5000)
    said = replace(config, admission=admission)
    settings = gate_settings(said, bind="fd@3", frontend_socket=Path("/run/x/http"))
    assert (settings.max_stream_s, settings.max_body_bytes) == (3600.0, 5000)
    assert settings.folder == Path("/run/x")
