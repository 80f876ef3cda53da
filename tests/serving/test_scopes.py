"""Two kinds of secret: API keys open the API, the token opens metrics and console, neither both."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.adapters import ADAPTER_PATHS
from baton.engine.vllm.gate.gate import ROUTES, Gate, allowed_methods
from baton.runtime.keys.api_keys import KeyRing, mint
from baton.serving.http.access import TokenAuthMiddleware

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
