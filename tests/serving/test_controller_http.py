"""What can be seen at the controller's address, and by whom."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from baton.config.schema.observability import (
    ConsoleConfig,
    MetricsConfig,
    ObservabilityConfig,
)
from baton.console.feed import ChatUnavailable
from baton.console.history import History
from baton.domain.commands import RecordSelection
from baton.domain.names.addresses import connectable_host, format_endpoint, parse_address
from baton.serving.controller.http_server import ControllerHttp, guard_app
from baton.serving.http.metrics_endpoint import MetricsRenderer
from baton.telemetry.catalogue import CONFIG_GENERATION
from baton.telemetry.families import Families
from tests.fakes.machine import require_ipv6

ANY_PORT = MetricsConfig(port=0)
OPEN = ObservabilityConfig(metrics=ANY_PORT)
TOKEN = "a-token-that-nobody-guesses"  # noqa: S105 - of this test
NODE = "10.1.2.3"


NO_CHAT = ChatUnavailable(reason="there is no API here")


class Feed:
    """Has nothing to tell."""

    points = History()

    def chat_target(self) -> ChatUnavailable:
        return NO_CHAT

    async def overview(self) -> Mapping[str, object]:
        return {}

    async def links(self) -> Sequence[Mapping[str, object]]:
        return []

    async def requests(self, count: int, order: RecordSelection) -> Sequence[Mapping[str, object]]:
        return []

    async def request(self, request_id: str) -> Sequence[Mapping[str, object]]:
        return []

    async def ticks(self, count: int) -> Sequence[Mapping[str, object]]:
        return []

    async def config(self) -> str:
        return "version: 1\n"


def metrics() -> MetricsRenderer:
    found = Families()
    found.add(CONFIG_GENERATION, 7)
    return MetricsRenderer(found.collect)


def observatory(config: ObservabilityConfig) -> ControllerHttp:
    return ControllerHttp(
        config,
        node=NODE,
        metrics=metrics(),
        targets=lambda address: [{"targets": [address], "labels": {}}],
        feed=Feed(),
        retry_s=0.01,
    )


def client(config: ObservabilityConfig = OPEN) -> httpx.AsyncClient:
    """Of what is served, without a server."""
    transport = httpx.ASGITransport(app=observatory(config).app())
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@asynccontextmanager
async def served(config: ObservabilityConfig = OPEN) -> AsyncIterator[ControllerHttp]:
    made = observatory(config)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def with_token(tmp_path: Path) -> ObservabilityConfig:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return replace(OPEN, token_file=str(path))


# ------------------------------------------------------------------------------ what is there


async def test_metrics_targets_health_and_the_console_are_at_one_address() -> None:
    async with served() as made, httpx.AsyncClient(base_url=f"http://{made.address}") as http:
        assert "baton_config_generation 7.0" in (await http.get("/metrics")).text
        targets = await http.get("/sd")
        assert targets.headers["content-type"] == "application/json"
        assert targets.json() == [{"targets": [made.address], "labels": {}}]
        assert (await http.get("/healthz")).text == "ok\n"
        page = await http.get("/")
        assert "<title>baton</title>" in page.text
        assert made.status() == {
            "url": f"http://{made.address}",
            "metrics": True,
            "console": True,
        }


async def test_nothing_can_be_changed() -> None:
    async with client() as http:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("/metrics", "/sd", "/healthz", "/"):
                answer = await http.request(method, path)
                assert answer.status_code == 405, (method, path)


async def test_a_chat_needs_the_token_as_everything_does(with_token: ObservabilityConfig) -> None:
    async with client(with_token) as http:
        assert (await http.post("/api/chat", json={})).status_code == 401
        assert (await http.get("/api/playground")).status_code == 401
        answer = await http.post("/api/chat", json={}, headers={"authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, answer.json()) == (503, {"reason": NO_CHAT.reason})


async def test_metrics_can_be_had_without_the_console_and_the_other_way_round() -> None:
    async with client(replace(OPEN, console=ConsoleConfig(enabled=False))) as http:
        assert (await http.get("/")).status_code == 404
        assert (await http.get("/metrics")).status_code == 200
    silent = replace(OPEN, metrics=replace(ANY_PORT, enabled=False))
    async with client(silent) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/metrics")).status_code == 404
        assert (await http.get("/sd")).status_code == 404
    assert observatory(silent).status()["metrics"] is False


async def test_where_nothing_is_to_be_seen_nothing_listens() -> None:
    nothing = ObservabilityConfig(
        metrics=MetricsConfig(enabled=False, port=0), console=ConsoleConfig(enabled=False)
    )
    made = observatory(nothing)
    await made.start()
    assert made.address is None
    assert made.status() == {"url": None, "metrics": False, "console": False}
    await made.close()


async def test_a_console_that_cannot_be_shown_leaves_the_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_feed: object) -> None:
        raise RuntimeError("no template")

    monkeypatch.setattr("baton.console.app.console_app", broken)
    async with client() as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/")).status_code == 404
    assert "the console cannot be shown" in caplog.text


async def test_browsers_are_told_to_be_careful_with_every_answer() -> None:
    async with client() as http:
        for path in ("/metrics", "/sd", "/healthz", "/", "/nothing"):
            headers = (await http.get(path)).headers
            assert headers["x-content-type-options"] == "nosniff", path
            assert headers["x-frame-options"] == "DENY", path
            assert headers["referrer-policy"] == "no-referrer", path
            policy = headers.get_list("content-security-policy")
            assert len(policy) == 1, "two policies are both enforced, and no page is left"
            assert policy[0].startswith("default-src 'none'"), path


# ------------------------------------------------------------------------------ for whom


async def test_with_a_token_all_but_the_health_asks_for_it(with_token: ObservabilityConfig) -> None:
    async with client(with_token) as http:
        for path in ("/metrics", "/sd", "/", "/static/x", "/nothing"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/healthz")).status_code == 200
        bearer = {"authorization": f"Bearer {TOKEN}"}
        for path in ("/metrics", "/sd", "/"):
            assert (await http.get(path, headers=bearer)).status_code == 200, path
            assert (await http.get(path, auth=("anybody", TOKEN))).status_code == 200, path
        assert (await http.get("/sd", auth=("anybody", "wrong"))).status_code == 401


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST:80", "127.0.0.1:9", "[::1]:9"]
)
async def test_this_machine_is_asked_by_its_own_names(name: str) -> None:
    async with client() as http:
        assert (await http.get("/sd", headers={"host": name})).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.1.2.3", ""]
)
async def test_a_page_under_another_name_that_leads_here_sees_nothing(name: str) -> None:
    async with client() as http:
        for path in ("/metrics", "/sd", "/", "/healthz"):
            answer = await http.get(path, headers={"host": name})
            assert answer.status_code == 403, path
            assert "baton_" not in answer.text


@pytest.mark.parametrize("name", ["[0:0:0:0:0:0:0:1]:9", "[::ffff:127.0.0.1]", "[::1]"])
async def test_its_own_address_may_be_written_in_any_way(name: str) -> None:
    async with client() as http:
        assert (await http.get("/sd", headers={"host": name})).status_code == 200


@pytest.mark.parametrize("name", ["::1", "[::1", "[::1]x", "[::2]", "[fd00::2]:9"])
async def test_other_addresses_of_ipv6_are_none_of_its_names(name: str) -> None:
    async with client() as http:
        assert (await http.get("/sd", headers={"host": name})).status_code == 403


@pytest.mark.parametrize(
    ("host", "reached"),
    [("::1", "[::1]"), ("::", "[fd00::7]"), ("0.0.0.0", "[fd00::7]")],  # noqa: S104 - meant
)
async def test_its_address_is_one_that_can_be_asked_over_ipv6_too(host: str, reached: str) -> None:
    require_ipv6()
    config = replace(OPEN, metrics=replace(ANY_PORT, host=host))
    made = ControllerHttp(
        config,
        node="fd00::7",
        metrics=metrics(),
        targets=lambda address: [{"targets": [address], "labels": {}}],
        feed=Feed(),
    )
    await made.start()
    try:
        assert made.address is not None
        at = parse_address(made.address)
        assert made.address == f"{reached}:{at.port}"
        assert made.status()["url"] == f"http://{made.address}"
        here = format_endpoint("http", connectable_host(host), at.port)
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(f"{here}/sd")
        assert answer.json() == [{"targets": [made.address], "labels": {}}]
    finally:
        await made.close()


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 403), ("0.0.0.0", 200)])  # noqa: S104 - whether all addresses are
async def test_where_a_token_guards_others_may_use_any_name(host: str, status: int) -> None:
    async def app(_scope: object, _receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    config = replace(OPEN, metrics=replace(ANY_PORT, host=host))
    transport = httpx.ASGITransport(app=guard_app(app, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://metrics.example") as http:
        assert (await http.get("/")).status_code == status


# ------------------------------------------------------------------------------ when it cannot


async def test_a_taken_port_is_reported_with_a_remedy_and_used_once_it_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "observatory_served":
                served.set()

    logger = logging.getLogger("baton.serving.http.side_server")
    listener = Listener()
    logger.addHandler(listener)
    caplog.set_level(logging.INFO, logger.name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = observatory(replace(OPEN, metrics=MetricsConfig(port=port)))
        await made.start()
        assert made.address is None
        assert made.status()["url"] is None
        assert f"127.0.0.1:{port} cannot be listened on" in str(made.status()["trouble"])
        (said,) = [
            other for other in caplog.records if "observatory_not_served" in other.getMessage()
        ]
        assert "observability.metrics.port" in str(said.__dict__)
    try:
        async with asyncio.timeout(5):
            await served.wait()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
    finally:
        logger.removeHandler(listener)
        await made.close()


async def test_closing_it_twice_frees_the_port_once() -> None:
    made = observatory(OPEN)
    await made.start()
    port = int(str(made.address).rpartition(":")[2])
    await made.close()
    await made.close()
    with socket.create_server(("127.0.0.1", port)):
        assert made.address is None


async def test_an_endpoint_at_all_addresses_is_named_by_its_nodes(
    with_token: ObservabilityConfig,
) -> None:
    everywhere = replace(with_token, metrics=replace(ANY_PORT, host="0.0.0.0"))  # noqa: S104 - meant
    async with served(everywhere) as made:
        assert str(made.address).startswith(f"{NODE}:")
