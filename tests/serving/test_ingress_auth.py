"""The front door of an ingress: it follows the configuration and the key files."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.config import DeploymentConfig
from baton.domain.errors import ConfigInvalid
from baton.engine.vllm.frontend.settings import RequestCapabilities
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.adapters import ADAPTER_PATHS
from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.gate.gate import ROUTES, Gate, allowed_methods
from baton.engine.vllm.wire.identity import Caller
from baton.runtime.keys.api_keys import KeyRing, mint
from baton.runtime.keys.key_files import edit_key_file
from baton.serving.http.access import TokenAuthMiddleware
from baton.serving.ingress import auth as front_door
from baton.serving.ingress.auth import IngressAuth, frontend_limits, request_capabilities
from tests.serving.configs import simulated


def with_keys(path: Path, *sets: str) -> DeploymentConfig:
    return simulated(f"tenants.acme.keys_file={path}", *sets)


def new_key(path: Path, tenant: str = "acme") -> str:
    with edit_key_file(path, create=True) as document:
        key, token = mint(tenant, now=datetime.now(UTC))
        document.add(key)
    return token


def revoke(path: Path, token: str) -> None:
    with edit_key_file(path) as document:
        document.revoke(token.split("_")[1], datetime.now(UTC))


def caller(access: Access, token: str | None) -> Caller | Problem:
    return access.identify_caller([] if token is None else [(b"x-api-key", token.encode())])


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - it comes from a thread that reads a file
            await asyncio.sleep(0)


def written(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(str(vars(record)) for record in caplog.records)


def test_limits_of_one_request_are_as_configured() -> None:
    limits = frontend_limits(
        simulated(
            "admission.max_n=3",
            "admission.max_body=64KiB",
            "admission.max_tokens=9",
            "admission.default_max_tokens=7",
            "admission.max_messages=5",
        )
    )
    assert (limits.max_n, limits.max_body_bytes, limits.max_messages) == (3, 65536, 5)
    assert (limits.max_tokens, limits.default_max_tokens) == (9, 7)


def test_requests_have_no_capabilities_by_default() -> None:
    assert request_capabilities(simulated()) == RequestCapabilities()
    told = request_capabilities(
        simulated(
            "server.allow.chat_templates=true",
            "server.allow.media_domains=[media.example]",
            "server.allow.prompt_embeds=true",
        )
    )
    assert told == RequestCapabilities(
        chat_templates=True, media_domains=("media.example",), prompt_embeds=True
    )


async def test_without_tenants_every_request_is_accepted() -> None:
    door = IngressAuth(simulated())
    await door.start()
    access = door.access(simulated())
    assert caller(access, None) == caller(access, "bt_x_y") == Caller()
    await door.close()
    await door.close()


async def test_with_keys_a_tenant_is_known_by_them_and_has_a_cache_of_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "acme.keys"
    token = new_key(path)
    for sets, scope in (((), "acme"), (("tenants.acme.cache=shared",), None)):
        wanted = with_keys(path, *sets)
        door = IngressAuth(wanted)
        await door.start()
        access = door.access(wanted)
        assert caller(access, token) == Caller("acme", None, scope)
        assert isinstance(caller(access, None), Problem)
        await door.close()


async def test_callers_without_a_key_are_let_in_where_that_is_said(tmp_path: Path) -> None:
    wanted = with_keys(tmp_path / "none", "tenants.default.anonymous=true")
    assert caller(IngressAuth(wanted).access(wanted), None) == Caller()


async def test_keys_are_followed_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front_door, "_POLL_S", 0.0)
    caplog.set_level(logging.INFO)
    path = tmp_path / "acme.keys"
    wanted = with_keys(path)
    door = IngressAuth(wanted)
    await door.start()
    access = door.access(wanted)
    token = new_key(path)
    await until(lambda: isinstance(caller(access, token), Caller))
    path.write_text(path.read_text() + "nonsense\n")
    await until(lambda: "acme.keys:2" in written(caplog))
    assert isinstance(caller(access, token), Caller)
    path.write_text(path.read_text().removesuffix("nonsense\n"))
    revoke(path, token)
    await until(lambda: isinstance(caller(access, token), Problem))
    await door.close()
    assert token.rpartition("_")[2] not in written(caplog)
    assert "nonsense" not in written(caplog)


async def test_another_configuration_counts_at_once(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.keys" for name in ("acme", "beta")}
    tokens = {name: new_key(path, name) for name, path in paths.items()}
    door = IngressAuth(with_keys(paths["acme"]))
    await door.start()
    new = simulated(f"tenants.beta.keys_file={paths['beta']}")
    door.check(new)
    await door.reconfigure(new)
    access = door.access(new)
    assert caller(access, tokens["beta"]) == Caller("beta", None, "beta")
    assert isinstance(caller(access, tokens["acme"]), Problem)
    await door.close()


def test_key_files_that_cannot_be_read_are_found_before_they_count(tmp_path: Path) -> None:
    bad = tmp_path / "bad.keys"
    bad.write_text("nonsense\n")
    door = IngressAuth(simulated())
    with pytest.raises(ConfigInvalid, match=r"bad\.keys:1"):
        door.check(with_keys(bad))
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        door.check(with_keys(tmp_path / "none"))


async def test_a_disk_that_hangs_is_said_and_takes_no_more_than_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that nobody writes to: whoever opens it waits."""
    monkeypatch.setattr(front_door, "_READ_DEADLINE_S", 0.01)
    path = tmp_path / "acme.keys"
    os.mkfifo(path)
    wanted = with_keys(path)
    door = IngressAuth(wanted)
    await door.start()
    threads = threading.active_count()
    for _ in range(3):
        await door.reconfigure(wanted)
    assert threading.active_count() == threads
    assert caplog.text.count("key_files_slow") == 4
    await door.close()
    with path.open("wb"):
        pass  # the read that waits finds the end of the file


async def test_a_configuration_may_come_while_key_files_are_being_read(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    new_key(first)
    token = new_key(second)
    door = IngressAuth(with_keys(first))
    reading = asyncio.gather(*(door._poll() for _ in range(3)))
    await asyncio.sleep(0)  # all of them wait for one and the same read
    await door.reconfigure(with_keys(second))
    await reading
    assert isinstance(caller(door.access(with_keys(second)), token), Caller)


# -------------------------------------------------------------------- scopes of keys


NOW = datetime.now(UTC)
KEY, API_KEY = mint("acme", now=NOW)
RING = KeyRing([KEY])
TOKEN = "a-token-that-nobody-guesses"  # noqa: S105 - of this test
CONSOLE_PATHS = ("/", "/metrics", "/sd", "/healthz", "/api/overview", "/api/config", "/console")


async def reached(_scope: object, _receive: object, send: Any) -> None:  # noqa: ANN401
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"reached", "more_body": False})


def api() -> Gate:
    return Gate(
        reached,
        routes=tuple(ROUTES),
        healthy=lambda: True,
        admit=lambda _n, _caller: None,
        access=Access(look_up=lambda token: RING.look_up(token, NOW), anonymous=False),
    )


def console() -> TokenAuthMiddleware:
    return TokenAuthMiddleware(reached, lambda: TOKEN)


async def asked(app: Any, path: str, headers: dict[str, str]) -> int:  # noqa: ANN401
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        method = allowed_methods(path)[0]
        return (await client.request(method, path, json={}, headers=headers)).status_code


def as_every_client_shows_it(secret: str) -> list[dict[str, str]]:
    return [{"authorization": f"Bearer {secret}"}, {"x-api-key": secret}]


@pytest.mark.parametrize("path", [path for paths in ROUTES.values() for path in paths])
async def test_the_consoles_token_opens_no_route_of_the_api(path: str) -> None:
    wanted = 200 if path == "/health" else 401
    assert await asked(api(), path, {}) == wanted
    for headers in as_every_client_shows_it(TOKEN):
        assert await asked(api(), path, headers) == wanted
    opened = 403 if path in ADAPTER_PATHS else 200  # it may not administer
    for headers in as_every_client_shows_it(API_KEY):
        assert await asked(api(), path, headers) == opened


@pytest.mark.parametrize("path", CONSOLE_PATHS)
async def test_no_api_key_opens_anything_of_the_console(path: str) -> None:
    for headers in ({}, *as_every_client_shows_it(API_KEY)):
        assert await asked(console(), path, headers) == 401
    assert await asked(console(), path, {"authorization": f"Bearer {TOKEN}"}) == 200
