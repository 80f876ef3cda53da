"""The gate before vLLM's Rust frontend, with a real HAProxy and an echo behind it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.gate.errors import Dialect, error_type
from baton.engine.vllm.gate.model_list import ModelRow
from baton.runtime.keys.api_keys import ApiKey, KeyRing, mint
from baton.serving.front import gate_process as rust_gate_process
from baton.serving.front.data_path import find_haproxy
from baton.serving.front.gate_config import GateSettings
from baton.serving.front.gate_maps import (
    class_entries,
    key_entries,
    shed_entries,
    state_entries,
)
from baton.serving.front.gate_process import GateProcess
from tests.fakes.echo_backend import echo_backend

HAPROXY = find_haproxy(os.environ)
NOW = datetime(2026, 11, 1, tzinfo=UTC)
CHAT = "/v1/chat/completions"
MAX_BODY_BYTES = 300_000

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="no executable haproxy was found")


@pytest.fixture
def settings(folder: Path) -> GateSettings:
    return GateSettings(
        bind="127.0.0.1:0",
        frontend_socket=folder / "http",
        folder=folder,
        routes=("chat", "models", "health"),
        max_body_bytes=MAX_BODY_BYTES,
        models=(
            ModelRow(name="org/tiny", root="/m/tiny", max_len_tokens=512),
            ModelRow(name='a "50%" $name', root="/a", parent="org/tiny"),
        ),
    )


class Running:
    """A gate, its keys and a client of it."""

    def __init__(self, gate: GateProcess, base_url: str, anonymous: str | None) -> None:
        self.gate = gate
        self._anonymous = anonymous
        self.http = httpx.AsyncClient(base_url=base_url, timeout=20, trust_env=False)
        self._keys: list[ApiKey] = []

    async def key(self, tenant: str, *, expires_at: datetime | None = None) -> str:
        key, token = mint(tenant, now=NOW - timedelta(days=9), expires_at=expires_at)
        self._keys.append(key)
        await self.tell()
        return token

    async def revoke_all(self) -> None:
        self._keys = [replace(key, revoked_at=NOW) for key in self._keys]
        await self.tell()

    async def tell(self) -> None:
        handles = {"acme": "h-acme", "other": "h-other"}
        await self.gate.set_keys(key_entries(KeyRing(self._keys).by_digest(NOW), handles))

    async def let_in(
        self, *, healthy: bool = False, keys: bool = True, anonymous: str | None = None
    ) -> None:
        state = state_entries(healthy=healthy, anonymous=anonymous or self._anonymous, keys=keys)
        await self.gate.set_state(state)

    async def post(self, *headers: tuple[str, str], body: bytes = b"{}") -> httpx.Response:
        return await self.http.post(CHAT, content=body, headers=list(headers))


def bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


def seen(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    headers: dict[str, str] = answer.json()["headers"]
    return headers


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


async def run(settings: GateSettings, anonymous: str | None = None) -> AsyncIterator[Running]:
    assert HAPROXY is not None
    with socket.create_server(("127.0.0.1", 0)) as listener, echo_backend(settings.frontend_socket):
        listen = replace(settings, bind=f"fd@{listener.fileno()}")
        gate = GateProcess(HAPROXY, listen)
        await gate.start(listeners=[listener.fileno()])
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = Running(gate, base_url, anonymous)
        await running.let_in()
        await gate.set_classes(class_entries([("h-nobody", "gold"), ("h-nobody", "batch")]))
        try:
            yield running
        finally:
            await running.http.aclose()
            await gate.close()


@pytest.fixture
async def closed(settings: GateSettings) -> AsyncIterator[Running]:
    """A gate that lets nobody in without a key."""
    async for running in run(settings):
        yield running


@pytest.fixture
async def opened(settings: GateSettings) -> AsyncIterator[Running]:
    """A gate that lets everybody in, and knows keys."""
    async for running in run(settings, "h-nobody"):
        yield running


# ---------------------------------------------------------------- routes


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/chat", "/v1/%63hat/completions", "/metrics", "/v1/chat/completions/", "/docs"],
)
async def test_paths_that_are_not_listed_do_not_exist(opened: Running, path: str) -> None:
    answer = await opened.http.get(path)
    assert error(answer) == (404, "not found")
    assert answer.headers["content-type"] == "application/json"


ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("HEAD", "/v1/models", "GET"),
        ("DELETE", "/v1/models/org/tiny", "GET"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
async def test_a_path_has_its_own_methods_and_names_them(
    opened: Running, method: str, path: str, allowed: str
) -> None:
    answer = await opened.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        assert answer.json()["error"]["type"] == "MethodNotAllowedError"
        shaped = await opened.http.request(method, path, headers=ANTHROPIC)
        assert shaped.json()["error"]["type"] == "invalid_request_error"


async def test_methods_are_no_concern_of_those_without_a_key(closed: Running) -> None:
    assert (await closed.http.get(CHAT)).status_code == 401


@pytest.mark.parametrize("name", ["org/tiny", "org%2Ftiny"])
async def test_one_model_is_told_by_its_name(opened: Running, name: str) -> None:
    row = (await opened.http.get(f"/v1/models/{name}")).json()
    assert isinstance(row.pop("created"), int)
    assert row == {
        "id": "org/tiny",
        "object": "model",
        "owned_by": "vllm",
        "root": "/m/tiny",
        "parent": None,
        "max_model_len": 512,
    }
    row = (await opened.http.get(f"/v1/models/{name}", headers=ANTHROPIC)).json()
    assert datetime.fromisoformat(row.pop("created_at")).year > 2025
    assert row == {
        "type": "model",
        "id": "org/tiny",
        "display_name": "org/tiny",
        "max_input_tokens": 512,
    }


async def test_a_models_name_may_have_any_characters(opened: Running) -> None:
    answer = await opened.http.get("/v1/models/a%20%2250%25%22%20$name")
    assert answer.json()["id"] == 'a "50%" $name'


@pytest.mark.parametrize("name", ["nope", "org", "org/tiny/more", "org/tiny/", "../chat", ""])
async def test_a_model_that_is_not_served_is_not_found(opened: Running, name: str) -> None:
    for headers, kind in (({}, "NotFoundError"), (ANTHROPIC, "not_found_error")):
        answer = await opened.http.get(f"/v1/models/{name}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, kind)


async def test_one_model_is_told_to_those_with_a_key(closed: Running) -> None:
    assert (await closed.http.get("/v1/models/org/tiny")).status_code == 401
    token = await closed.key("acme")
    asked = await closed.http.get("/v1/models/org/tiny", headers=dict([bearer(token)]))
    assert asked.status_code == 200


async def test_anthropics_clients_get_their_own_list(opened: Running) -> None:
    assert "path" in (await opened.http.get("/v1/models")).json()  # the frontend's own
    page = (await opened.http.get("/v1/models?limit=1000", headers=ANTHROPIC)).json()
    ids = [row["id"] for row in page["data"]]
    assert ids == ["org/tiny", 'a "50%" $name']
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[1], False)


async def test_errors_have_the_shape_of_the_clients_api(closed: Running) -> None:
    token = await closed.key("acme")
    await closed.gate.set_shed(shed_entries({("h-acme", None): 3.0}))
    cases = {
        401: (CHAT, {}),
        404: ("/nope", {}),
        413: (CHAT, {"authorization": f"Bearer {token}"}),
        429: (CHAT, {"authorization": f"Bearer {token}"}),
    }
    for status, (path, headers) in cases.items():
        body = b"x" * (MAX_BODY_BYTES + 1 if status == 413 else 0)
        openai = await closed.http.post(path, headers=headers, content=body)
        assert openai.status_code == status
        assert openai.json()["error"]["code"] == status
        assert "type" not in openai.json()
        said = await closed.http.post(path, headers={**headers, **ANTHROPIC}, content=body)
        assert said.status_code == status
        assert said.json()["type"] == "error"
        assert sorted(said.json()["error"]) == ["message", "type"]
        assert said.json()["error"]["message"] == openai.json()["error"]["message"]
        assert said.json()["error"]["type"] == error_type(status, Dialect.ANTHROPIC)
        assert said.headers.get("retry-after") == openai.headers.get("retry-after")
    assert (await closed.http.get("/v1/messages/batches")).json()["type"] == "error"


async def test_a_head_that_is_too_large_is_refused_with_a_reason(opened: Running) -> None:
    many = {f"x-{n}": "1" for n in range(150)}
    for headers in (many, {"x": "y" * 40_000}):
        assert error(await opened.http.get("/v1/models", headers=headers))[0] == 431


@pytest.mark.parametrize(
    "line",
    [b"host: a b\r\n", b"host: a/b\r\n", b"host: @\r\n", b"host: a:b\r\n", b"host: \r\n", b""],
)
async def test_a_request_without_a_host_is_refused(opened: Running, line: bytes) -> None:
    port = opened.http.base_url.port
    assert port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/models HTTP/1.1\r\n" + line + b"\r\n")
    head = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    assert b" 400 " in head


async def test_health_is_that_of_the_fleet_and_asks_for_no_key(closed: Running) -> None:
    assert (await closed.http.get("/health")).status_code == 503
    await closed.let_in(healthy=True)
    assert (await closed.http.get("/health")).status_code == 200
    await closed.let_in()
    assert (await closed.http.get("/health")).status_code == 503


# ---------------------------------------------------------------- keys


async def test_a_key_is_wanted(closed: Running) -> None:
    answer = await closed.post()
    assert answer.status_code == 401
    assert "expected an API key" in error(answer)[1]
    assert answer.headers["www-authenticate"] == 'Bearer realm="baton"'


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_key_is_known_for_its_tenants_and_goes_no_further(
    closed: Running, scheme: str
) -> None:
    token = await closed.key("acme")
    headers = seen(await closed.post(("authorization", f"{scheme} {token}"), ("cookie", "a=b")))
    assert headers["x-request-id"].endswith("~h-acme~")
    assert not {"authorization", "x-api-key", "cookie"} & headers.keys()
    assert token not in str(headers)


async def test_the_other_header_does_as_well(closed: Running) -> None:
    token = await closed.key("acme")
    headers = seen(await closed.post(("x-api-key", token)))
    assert headers["x-request-id"].endswith("~h-acme~")
    assert "x-api-key" not in headers


async def test_the_same_key_twice_is_one_key(closed: Running) -> None:
    token = await closed.key("acme")
    assert (
        "~h-acme~" in seen(await closed.post(bearer(token), ("x-api-key", token)))["x-request-id"]
    )


async def test_two_different_keys_are_refused(closed: Running) -> None:
    one, other = await closed.key("acme"), await closed.key("other")
    for headers in (
        [bearer(one), ("x-api-key", other)],
        [bearer(one), bearer(other)],
        [("x-api-key", one), ("x-api-key", other)],
    ):
        status, message = error(await closed.post(*headers))
        assert (status, message) == (401, "several different API keys were sent, expected one")


@pytest.mark.parametrize("token", ["none", "bt_abc_def", "", "%s", "a b", "!revoked", "h-acme"])
async def test_a_key_that_is_not_known_is_refused(closed: Running, token: str) -> None:
    await closed.key("acme")
    assert (await closed.post(("x-api-key", token))).status_code == 401


async def test_a_key_that_has_expired_or_was_revoked_is_told_so(closed: Running) -> None:
    old = await closed.key("acme", expires_at=NOW)
    assert error(await closed.post(bearer(old))) == (401, "this API key is expired")
    good = await closed.key("acme")
    seen(await closed.post(bearer(good)))
    await closed.revoke_all()
    assert error(await closed.post(bearer(good))) == (401, "this API key is revoked")


async def test_where_anonymous_access_is_allowed_unknown_keys_are_ignored(
    opened: Running,
) -> None:
    assert seen(await opened.post())["x-request-id"].endswith("~h-nobody~")
    assert seen(await opened.post(bearer("none")))["x-request-id"].endswith("~h-nobody~")
    assert (await opened.post(bearer("bt_abc_def"))).status_code == 401
    token = await opened.key("acme")
    both = await opened.post(bearer("none"), ("x-api-key", token))
    assert seen(both)["x-request-id"].endswith("~h-acme~")


async def test_accepted_callers_can_change(closed: Running) -> None:
    token = await closed.key("acme")
    await closed.let_in(keys=False, anonymous="h-nobody")
    assert seen(await closed.post(bearer(token)))["x-request-id"].endswith("~h-nobody~")
    await closed.let_in(keys=False)
    assert (await closed.post(bearer(token))).status_code == 401
    await closed.let_in()
    assert seen(await closed.post(bearer(token)))["x-request-id"].endswith("~h-acme~")


async def test_before_the_first_state_no_caller_is_accepted(closed: Running) -> None:
    token = await closed.key("acme")
    await closed.gate.set_state({})
    assert (await closed.post(bearer(token))).status_code == 401
    assert (await closed.post()).status_code == 401


async def test_a_gate_that_could_not_be_told_forgets_rather_than_believes(closed: Running) -> None:
    token = await closed.key("acme")
    closed.gate._written_entries[closed.gate._settings.key_map] = None
    await closed.revoke_all()
    assert (await closed.post(bearer(token))).status_code == 401
    assert "~h-acme~" in seen(await closed.post(bearer(await closed.key("acme"))))["x-request-id"]


# ---------------------------------------------------------------- what goes on


async def test_a_class_goes_on_in_the_id_and_not_as_a_header(opened: Running) -> None:
    headers = seen(await opened.post(("x-slo-class", "gold")))
    assert headers["x-request-id"].endswith("~h-nobody~gold")
    assert "x-slo-class" not in headers


SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "x-session-affinity", "session_id")


def session(answer: httpx.Response) -> str:
    """The word for the session in what the frontend was told."""
    last = seen(answer)["x-request-id"].rsplit("~", 1)[1]
    slo_class, mark, word = last.partition("+")
    assert slo_class in {"", "gold"}
    assert bool(mark) == bool(word)
    return word


def keyed_body(key: object, filler: int = 0) -> bytes:
    return json.dumps({"a": "x" * filler, "prompt_cache_key": key}).encode()


async def test_a_session_goes_on_as_a_digest_whichever_way_a_client_names_it(
    opened: Running,
) -> None:
    found = {session(await opened.post((header, "chat-7"))) for header in SESSION_HEADERS}
    found.add(session(await opened.post(body=keyed_body("chat-7"))))
    assert found == {hashlib.sha256(b"chat-7").hexdigest()[:16]}
    assert session(await opened.post(("session_id", "chat-8"))) not in found
    gold = seen(await opened.post(("x-slo-class", "gold"), ("x-session-id", "chat-7")))
    assert gold["x-request-id"].endswith(f"~h-nobody~gold+{found.pop()}")


async def test_a_header_counts_before_the_body_and_the_first_of_them_before_others(
    opened: Running,
) -> None:
    (alone,) = {session(await opened.post((SESSION_HEADERS[0], "first")))}
    others = [(header, "other") for header in SESSION_HEADERS[1:]]
    first = (SESSION_HEADERS[0], "first")
    assert session(await opened.post(*others, first, body=keyed_body("b"))) == alone


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"prompt_cache_key": ', b'{"prompt_cache_key": ""}', b"\xff\x00", b"[1]"]
)
async def test_a_request_without_a_session_is_forwarded_without_one(
    opened: Running, body: bytes
) -> None:
    answer = await opened.post((SESSION_HEADERS[1], ""), body=body)
    assert session(answer) == ""
    assert answer.json()["bytes"] == len(body)


async def test_a_long_body_is_passed_on_and_read_as_far_as_a_buffer_holds_it(
    opened: Running,
) -> None:
    long = keyed_body("s", 200_000)
    answer = await opened.post(body=long)
    assert answer.json()["bytes"] == len(long)
    early = b'{"prompt_cache_key": "s", "a": "' + b"x" * 200_000 + b'"}'
    answer = await opened.post(body=early)
    assert answer.json()["bytes"] == len(early)
    named = session(await opened.post(("x-session-id", "s")))
    assert session(answer) == named
    for before, is_read in ((60_000, True), (66_000, False)):  # a buffer of 64 KiB
        late = b'{"a": "' + b"x" * before + b'", "prompt_cache_key": "s"}'
        assert (session(await opened.post(body=late)) == named) is is_read


async def test_a_sessions_name_may_be_anything_a_header_may_be(opened: Running) -> None:
    for name in ("~h-acme~", "a+b", "%[env(HOME)]", "x" * 4000, '"; \\'):
        word = session(await opened.post((SESSION_HEADERS[1], name)))
        assert word == hashlib.sha256(name.encode()).hexdigest()[:16]


async def test_a_class_that_a_tenant_may_not_ask_for_is_refused(opened: Running) -> None:
    answer = await opened.post(("x-slo-class", "silver"))
    assert error(answer) == (403, "this SLO class is none that this tenant may ask for")
    token = await opened.key("acme")
    for _ in range(2):
        answer = await opened.post(bearer(token), ("x-slo-class", "gold"))
        assert answer.status_code == 403, "others may"
    await opened.gate.set_classes(class_entries([("h-acme", "gold")]))
    seen(await opened.post(bearer(token), ("x-slo-class", "gold")))
    assert (await opened.post(("x-slo-class", "gold"))).status_code == 403


@pytest.mark.parametrize("name", ["a b", "~h-acme~", "x" * 65, "-a"])
async def test_an_invalid_name_of_a_class_is_refused(opened: Running, name: str) -> None:
    answer = await opened.post(("x-slo-class", name))
    assert answer.status_code == 400
    assert "x-slo-class is no name" in error(answer)[1]


async def test_several_classes_are_refused(opened: Running) -> None:
    answer = await opened.post(("x-slo-class", "a"), ("x-slo-class", "b"))
    assert error(answer) == (400, "several x-slo-class headers differ, expected one")


async def test_a_clients_name_for_its_request_is_kept(opened: Running) -> None:
    assert (
        seen(await opened.post(("x-request-id", "abc/1=2")))["x-request-id"] == "abc/1=2~h-nobody~"
    )


@pytest.mark.parametrize(
    "names", [["x~h-acme~"], ["a b"], ["x" * 129], [""], ["%[env(HOME)]"], ["a", "b"]]
)
async def test_an_invalid_request_id_is_replaced(opened: Running, names: list[str]) -> None:
    found = seen(await opened.post(*[("x-request-id", name) for name in names]))["x-request-id"]
    assert found.endswith("~h-nobody~")
    assert found.count("~") == 2
    assert len(found.partition("~")[0]) == 36


@pytest.mark.parametrize(
    "header", ["x-data-parallel-rank", "x-vllm-priority", "x-baton-anything", "traceparent"]
)
async def test_headers_that_are_ours_to_say_go_no_further(opened: Running, header: str) -> None:
    assert header not in seen(await opened.post((header, "1"), (header.upper(), "2")))


async def test_a_session_goes_on(opened: Running) -> None:
    assert seen(await opened.post(("x-session-id", "s")))["x-session-id"] == "s"


# ---------------------------------------------------------------- bodies


async def test_a_body_that_says_that_it_is_too_large_is_refused(opened: Running) -> None:
    answer = await opened.post(body=b"x" * (MAX_BODY_BYTES + 1))
    assert error(answer) == (413, f"the request body is larger than {MAX_BODY_BYTES} bytes")


async def test_a_body_as_large_as_may_be_goes_through(opened: Running) -> None:
    answer = await opened.post(body=b"x" * MAX_BODY_BYTES)
    assert answer.json()["bytes"] == MAX_BODY_BYTES


# ---------------------------------------------------------------- admission


async def test_a_rejected_caller_gets_a_retry_time(opened: Running) -> None:
    token = await opened.key("acme")
    await opened.gate.set_shed(shed_entries({("h-acme", None): 2.2}))
    answer = await opened.post(bearer(token))
    assert error(answer) == (429, "more of these requests are not taken for now; retry in 3 s")
    assert answer.json()["error"]["type"] == "RateLimitError"
    assert answer.headers["retry-after"] == "3"
    seen(await opened.post())
    models = await opened.http.get("/v1/models", headers=[bearer(token)])
    assert models.status_code == 200
    await opened.gate.set_shed({})
    seen(await opened.post(bearer(token)))


@pytest.mark.parametrize(
    ("refused", "seconds", "headers", "told"),
    [("batch", 5.0, [("x-slo-class", "batch")], "5"), ("", 0.4, [], "1")],
    ids=["one class", "those who ask for none"],
)
async def test_one_class_can_be_refused_alone(
    opened: Running, refused: str, seconds: float, headers: list[tuple[str, str]], told: str
) -> None:
    await opened.gate.set_shed(shed_entries({("h-nobody", refused): seconds}))
    answer = await opened.post(*headers)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, told)
    seen(await opened.post(("x-slo-class", "gold")))
    if refused:
        seen(await opened.post())


# ---------------------------------------------------------------- the process


async def test_a_stream_without_output_for_longer_than_the_body_timeout_continues(
    settings: GateSettings,
) -> None:
    async for running in run(replace(settings, client_idle_timeout_s=1.0), "h"):
        seen(await running.post(("x-pause-s", "2.5")))


@pytest.mark.parametrize(
    ("headers", "kind"), [({}, "ServiceUnavailableError"), (ANTHROPIC, "overloaded_error")]
)
async def test_when_the_frontend_is_gone_clients_are_told_to_come_back(
    opened: Running, folder: Path, headers: dict[str, str], kind: str
) -> None:
    (folder / "http").unlink()
    answer = await opened.post(*headers.items())
    assert error(answer) == (503, "this frontend is going away; try again")
    assert answer.json()["error"]["type"] == kind
    assert answer.headers["retry-after"] == "1"


async def test_a_gate_that_died_is_broken(closed: Running) -> None:
    assert not closed.gate.broken
    assert closed.gate._process is not None
    assert closed.gate._process.pid is not None
    os.kill(closed.gate._process.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        await closed.gate._process._exit_code  # type: ignore[misc]  # it was started
    assert closed.gate.broken


async def test_a_gate_that_drains_lets_streams_end_and_is_not_broken(opened: Running) -> None:
    slow = asyncio.create_task(opened.post(("x-pause-s", "1")))
    await asyncio.sleep(0.3)
    draining = asyncio.create_task(opened.gate.drain())
    await asyncio.sleep(0.3)
    assert not draining.done()
    seen(await slow)
    await asyncio.wait_for(draining, 20)
    assert not opened.gate.broken
    async with httpx.AsyncClient(trust_env=False) as other:
        with pytest.raises(httpx.TransportError):
            await other.get(opened.http.base_url)


async def test_a_gate_that_is_late_to_answer_drains_until_streams_have_ended(
    settings: GateSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rust_gate_process, "_QUERY_TIMEOUT_S", 0.1)
    asked: list[str] = []
    under_way = 1

    async def haproxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode().strip())
        if len(asked) in {1, 3}:
            await reader.read()  # it says nothing until who asks has left
        elif asked[-1] == "show stat":
            writer.write(f"# pxname,svname,scur\nrust,BACKEND,{under_way}\n".encode())
        writer.close()

    gate = GateProcess("haproxy", settings)
    monkeypatch.setattr(gate, "_process", SimpleNamespace(is_running=True))
    async with await asyncio.start_unix_server(haproxy, str(settings.admin_socket)):
        draining = asyncio.create_task(gate.drain())
        async with asyncio.timeout(20):
            while len(asked) < 6:  # noqa: ASYNC110 - HAProxy has no event for it
                await asyncio.sleep(0.01)
        assert not draining.done(), "a stream is under way"
        under_way = 0
        await asyncio.wait_for(draining, 20)
    assert asked[:2] == ["shutdown frontend gate"] * 2
    assert set(asked[2:]) == {"show stat"}


async def test_serve_is_told_that_its_replica_is_there(closed: Running) -> None:
    assert (await closed.http.get("/-/healthz")).text == "success"


async def test_why_a_gate_does_not_start_is_said_in_its_own_words(settings: GateSettings) -> None:
    assert HAPROXY is not None
    gate = GateProcess(HAPROXY, replace(settings, bind="127.0.0.1:99999"))
    with pytest.raises(EngineStartFailed, match="99999"):
        await gate.start()


async def test_no_other_user_may_read_its_configuration(closed: Running, folder: Path) -> None:
    await closed.key("acme")
    for name in ("gate.cfg", "gate.sock", "gate.log", "keys.map"):
        assert (folder / name).stat().st_mode & 0o077 == 0
