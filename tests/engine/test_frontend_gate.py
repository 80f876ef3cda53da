"""The gate over a small ASGI app; what it does to vLLM's is in tests/compat."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Self
from urllib.parse import quote

import pytest
from pydantic import ValidationError

from baton.domain.errors import BatonError, EngineFailed, NoCapacity
from baton.domain.names.trace_context import TraceContext
from baton.domain.tenant import DEFAULT_TENANT
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.errors import Dialect, Problem, error_type
from baton.engine.vllm.gate.gate import CURRENT_EXCHANGE, AsgiApp, Gate, Message, Scope
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.engine.vllm.wire.identity import Caller
from baton.runtime.keys.api_keys import InvalidKey, ValidKey

with warnings.catch_warnings():
    # The vendors' modules warn while they are imported.
    warnings.simplefilter("ignore")
    from vllm.exceptions import VLLMValidationError

CHAT = "/v1/chat/completions"
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


def chunk(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Client:
    """One request through a gate; `said` is what came back so far."""

    def __init__(self, path: str = CHAT, *, raw_path: bytes | None = None, **scope: Any) -> None:  # noqa: ANN401
        self.said: list[Message] = []
        self.body: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode() if raw_path is None else raw_path,
            "headers": [],
            **scope,
        }

    async def receive(self) -> Message:
        if self.body:
            return self.body.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        self.said.append(message)

    async def ask(self, app: AsgiApp) -> Self:
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.said[0]["status"])

    @property
    def text(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.said)


def gate(
    app: AsgiApp,
    *,
    routes: Iterable[str] = ("chat", "responses", "models", "health"),
    admit: Callable[[int, Caller], BatonError | None] = lambda _n, _caller: None,
    healthy: Callable[[], bool] = lambda: True,
    access: Access | None = None,
) -> Gate:
    return Gate(
        app,
        routes=tuple(routes),
        limits=FrontendLimits(max_body_bytes=100),
        healthy=healthy,
        admit=admit,
        access=access,
    )


async def answer(send: Any, text: bytes = b"", *, status: int = 200) -> None:  # noqa: ANN401
    """Send a whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send(chunk(text, more=False))


def answers(text: bytes) -> AsgiApp:
    """An app that answers everything with a text."""

    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        await answer(send, text)

    return app


async def never(_scope: Scope, _receive: object, _send: object) -> None:
    raise AssertionError("the app was reached")


def current() -> Any:  # noqa: ANN401
    exchange = CURRENT_EXCHANGE.get()
    assert exchange is not None
    return exchange


@pytest.mark.parametrize(
    ("path", "raw_path"),
    [
        ("/v1/chat/completions", b"/v1/chat%2fcompletions"),
        ("/v1/chat/completions", b"/v1/%63hat/completions"),
        ("/v1/chat/completions", b"//v1/chat/completions"),
        ("/v1/chat/completions/", b"/v1/chat/completions/"),
        ("/v1/completions", b"/v1/completions"),
        ("/", b"/"),
    ],
)
async def test_only_a_listed_path_spelt_exactly_reaches_the_app(path: str, raw_path: bytes) -> None:
    client = await Client(path, raw_path=raw_path).ask(gate(never))
    assert client.status == 404
    assert json.loads(client.text)["error"]["code"] == 404


async def test_a_server_that_gives_no_raw_path_is_served() -> None:
    client = Client("/v1/models", method="GET")
    del client.scope["raw_path"]
    await client.ask(gate(answers(b"ok")))
    assert client.text == b"ok"
    assert CURRENT_EXCHANGE.get() is None


async def test_the_app_listens_for_disconnects_on_every_http_version() -> None:
    """From ASGI 2.4 on, Starlette would notice that a client has left only when it next sends."""
    seen: list[str] = []

    async def app(scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        seen.append(scope["asgi"]["spec_version"])
        await answer(send)

    await Client(asgi={"version": "3.0", "spec_version": "2.5"}).ask(gate(app))
    assert seen == ["2.3"]


async def test_nothing_is_sent_before_the_first_token_and_everything_at_once_after() -> None:
    held: list[int] = []
    client = Client("/v1/responses")

    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        await send(START)
        await send(chunk(b"created"))
        held.append(len(client.said))
        current().has_output = True
        await send(chunk(b"token"))
        held.append(len(client.said))
        await send(chunk(b"token"))
        held.append(len(client.said))
        await send(chunk(b"", more=False))

    await client.ask(gate(app))
    assert held == [0, 3, 4]
    assert client.text == b"createdtokentoken"


async def test_a_stream_that_only_says_preliminaries_is_let_go_in_the_end() -> None:
    client = Client()

    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        await send(START)
        for _ in range(20):
            await send(chunk(b"event: created\n\n"))
        assert client.said
        await send(chunk(b"", more=False))

    await client.ask(gate(app))
    assert client.text.count(b"created") == 20


async def test_a_word_that_keeps_a_connection_goes_out_at_once_with_the_status() -> None:
    client = Client()
    heard: list[bytes] = []

    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        await send(START)
        await send(chunk(b": keep-alive\n\n"))
        heard.append(client.text)
        await send(chunk(b": keep-alive\n\n"))
        heard.append(client.text)
        current().problem = Problem(status=504, message="too late")
        await send(chunk(b"data: its own error\n\n"))
        await send(chunk(b"data: [DONE]\n\n", more=False))

    await client.ask(gate(app))
    assert heard == [b": keep-alive\n\n" * count for count in (1, 2)]
    assert client.status == 200
    last = client.text.removeprefix(b": keep-alive\n\n" * 2)
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 504


async def test_an_answer_without_a_stream_is_not_delayed_by_keep_alives() -> None:
    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(chunk(b":"))
        current().problem = Problem(status=504, message="too late")
        await send(chunk(b"", more=False))

    client = await Client().ask(gate(app))
    assert client.status == 504


@pytest.mark.parametrize("flowing", [False, True])
async def test_an_error_of_the_handlers_own_is_told_without_what_it_says(*, flowing: bool) -> None:
    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        current().has_output = flowing
        await send(START)
        await send(chunk(b"event: message_start\ndata: {}\n\n"))
        await send(chunk(b'event: error\ndata: {"error": "2 validation errors for Chunk"}\n\n'))
        await send(chunk(b"event: message_stop\ndata: {}\n\n", more=False))

    client = await Client("/v1/messages").ask(gate(app, routes=("messages",)))
    assert b"validation" not in client.text
    if flowing:
        *_, last, rest = client.text.split(b"\n\n")
        assert (client.status, rest) == (200, b"")
        document = json.loads(last.removeprefix(b"event: error\ndata: "))
    else:
        assert client.status == 500
        document = json.loads(client.text)
    assert document["type"] == "error"
    assert document["error"]["type"] == "api_error"


ANTHROPIC = [(b"anthropic-version", b"2023-06-01")]


@pytest.mark.parametrize(
    ("path", "scope", "status"),
    [
        ("/nope", {"headers": ANTHROPIC}, 404),
        ("/v1/messages/batches", {}, 404),
        ("/v1/messages", {"method": "GET"}, 405),
        ("/v1/models", {"headers": ANTHROPIC}, 405),
        ("/v1/models/nope", {"headers": ANTHROPIC, "method": "GET"}, 404),
        ("/v1/messages", {"headers": [(b"content-length", b"999")]}, 413),
        ("/v1/messages", {"headers": [(b"x", b"1")] * 150}, 431),
        (CHAT, {"headers": [*ANTHROPIC, (b"x-slo-class", b"!")]}, 400),
    ],
)
async def test_anthropics_clients_get_anthropics_errors(
    path: str, scope: dict[str, Any], status: int
) -> None:
    client = await Client(path, **scope).ask(gate(models(), routes=("messages", "models", "chat")))
    assert client.status == status
    document = json.loads(client.text)
    assert (document["type"], sorted(document["error"])) == ("error", ["message", "type"])


def models(*names: str) -> AsgiApp:
    """An app that lists these models as vLLM does."""

    async def app(scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        assert (scope["method"], scope["path"]) == ("GET", "/v1/models")
        rows = [
            {"id": name, "object": "model", "created": 1_700_000_000, "max_model_len": 64}
            for name in names
        ]
        data = json.dumps({"object": "list", "data": rows}).encode()
        headers = [(b"content-length", b"%d" % len(data)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(chunk(data, more=False))

    return app


NAMES = ("tiny", "org/tiny", "a b", "../chat", "50%")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("escape", ["", "/"])
async def test_one_model_is_told_by_its_name_with_slashes_or_escaped(
    name: str, escape: str
) -> None:
    raw = f"/v1/models/{quote(name, safe=escape)}".encode()
    asked: dict[str, Any] = {"method": "GET", "raw_path": raw}
    client = await Client(f"/v1/models/{name}", **asked).ask(gate(models(*NAMES)))
    assert (client.status, json.loads(client.text)["id"]) == (200, name)
    assert json.loads(client.text)["object"] == "model"
    claude = Client(f"/v1/models/{name}", headers=ANTHROPIC, **asked)
    await claude.ask(gate(models(*NAMES)))
    assert json.loads(claude.text) == {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "2023-11-14T22:13:20Z",
        "max_input_tokens": 64,
    }


@pytest.mark.parametrize("name", ["nope", "tiny/", "", "Tiny", "x" * 5000])
async def test_a_model_that_is_not_served_is_not_found(name: str) -> None:
    client = await Client(f"/v1/models/{name}", method="GET").ask(gate(models(*NAMES)))
    assert client.status == 404
    assert json.loads(client.text)["error"]["type"] == "NotFoundError"
    assert len(client.text) < 1000


async def test_one_model_is_there_only_where_the_list_is() -> None:
    client = await Client("/v1/models/tiny", method="GET").ask(gate(never, routes=("chat",)))
    assert client.status == 404


async def test_one_model_is_told_to_those_with_a_key() -> None:
    client = await Client("/v1/models/tiny", method="GET").ask(gate(never, access=KEYED))
    assert client.status == 401


async def test_anthropics_clients_get_their_own_list_of_models() -> None:
    client = await Client("/v1/models", method="GET", headers=ANTHROPIC).ask(gate(models("a", "b")))
    page = json.loads(client.text)
    assert [row["id"] for row in page["data"]] == ["a", "b"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, b"POST"),
        ("OPTIONS", CHAT, b"POST"),
        ("POST", "/v1/models", b"GET"),
        ("DELETE", "/v1/models/tiny", b"GET"),
        ("POST", "/health", b"GET, HEAD"),
        ("X" * 500, CHAT, b"POST"),
    ],
)
async def test_a_path_has_its_own_methods_and_names_them(
    method: str, path: str, allowed: bytes
) -> None:
    client = await Client(path, method=method).ask(gate(never))
    assert client.status == 405
    assert (b"allow", allowed) in client.said[0]["headers"]
    assert json.loads(client.text)["error"]["type"] == "MethodNotAllowedError"
    assert len(client.text) < 300


@pytest.mark.parametrize("status", [402, 405, 409, 418, 422, 499])
def test_no_error_of_a_client_is_called_a_servers(status: int) -> None:
    assert "Server" not in error_type(status, Dialect.OPENAI)
    assert error_type(status, Dialect.ANTHROPIC) != "api_error"


async def test_a_problem_replaces_the_apps_answer_before_tokens_flow() -> None:
    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        await send(START)
        await send(chunk(b"created"))
        current().problem = Problem(status=504, message="too late")
        await send(chunk(b"data: its own error"))
        await send(chunk(b"", more=False))

    client = await Client().ask(gate(app))
    assert client.status == 504
    assert json.loads(client.text)["error"]["message"] == "too late"


@pytest.mark.parametrize("raises", [False, True])
async def test_a_problem_in_mid_stream_is_one_last_event(*, raises: bool) -> None:
    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        current().has_output = True
        await send(START)
        await send(chunk(b"data: 1\n\n"))
        current().problem = Problem.from_error(EngineFailed("r", "died"))
        if raises:
            raise RuntimeError("a handler that stumbles")
        await send(chunk(b"data: its own error\n\n"))
        await send(chunk(b"data: [DONE]\n\n", more=False))

    client = await Client().ask(gate(app))
    assert client.status == 200
    first, last, _ = client.text.split(b"\n\n")
    assert first == b"data: 1"
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "request r: died"
    assert client.said[-1]["more_body"] is False


async def test_an_app_that_breaks_is_a_500_and_is_still_reported_to_the_server() -> None:
    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        await send(START)
        await send(chunk(b"created"))
        raise RuntimeError("broken")

    client = Client()
    with pytest.raises(RuntimeError, match="broken"):
        await client.ask(gate(app))
    assert client.status == 500
    assert json.loads(client.text)["error"]["code"] == 500


@pytest.mark.parametrize(
    "error",
    [AssertionError, AttributeError, KeyError, TypeError, ValueError, RecursionError],
)
async def test_an_app_that_stumbles_over_a_body_is_told_nonsense(error: type[Exception]) -> None:
    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        await answer(send, b"Internal Server Error", status=500)
        raise error("'list' object has no attribute 'get'")

    client = await Client().ask(gate(app))
    assert client.status == 400
    assert "cannot have" in json.loads(client.text)["error"]["message"]


async def test_an_invalid_request_found_after_the_start_is_a_client_error() -> None:
    for error, told in (
        (VLLMValidationError("stop_token_ids: out of the vocabulary"), "out of the vocabulary"),
        (ValidationError.from_exception_data("background", []), "cannot have"),
    ):

        async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
            current().submitted = True
            await send(START)
            raise RuntimeError("response already started") from error  # noqa: B023 - called here

        client = await Client().ask(gate(app))
        assert client.status == 400
        assert told in json.loads(client.text)["error"]["message"]


async def test_after_the_fleet_was_asked_a_failure_is_an_internal_error() -> None:
    async def app(_scope: Scope, _receive: object, _send: object) -> None:
        current().submitted = True
        raise TypeError("ours")

    client = Client()
    with pytest.raises(TypeError, match="ours"):
        await client.ask(gate(app))
    assert client.status == 500


async def test_a_refused_request_never_reaches_the_app() -> None:
    client = Client()
    await client.ask(gate(never, admit=lambda _n, _caller: NoCapacity("-", 0.2, "no replica")))
    assert client.status == 503
    assert (b"retry-after", b"1") in client.said[0]["headers"]


async def test_models_are_listed_even_when_the_fleet_takes_nothing() -> None:
    client = Client("/v1/models", method="GET")
    full = NoCapacity("-", 1.0, "no replica")
    await client.ask(gate(answers(b"[]"), admit=lambda _n, _caller: full))
    assert client.status == 200


@pytest.mark.parametrize(("healthy", "status"), [(True, 200), (False, 503)])
async def test_health_is_answered_by_the_gate(*, healthy: bool, status: int) -> None:
    client = await Client("/health", method="GET").ask(gate(never, healthy=lambda: healthy))
    assert client.status == status


async def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    client = Client(headers=[(b"content-length", b"101"), (b"expect", b"100-continue")])
    await client.ask(gate(never))
    assert client.status == 413
    assert len(client.body) == 1
    assert (b"connection", b"close") in client.said[0]["headers"]


async def test_a_client_that_is_refused_while_it_writes_may_finish_writing() -> None:
    """Cut off in the middle, it would see a broken connection instead of the answer."""
    client = Client(headers=[(b"content-length", b"150")])
    client.body = [
        {"type": "http.request", "body": b"x" * 50, "more_body": more}
        for more in (True, True, False)
    ]
    await client.ask(gate(never))
    assert client.status == 413
    assert client.body == []


async def test_a_refused_client_that_writes_without_end_is_not_read_without_end() -> None:
    client = Client(headers=[(b"content-length", b"100000")])
    client.body = [{"type": "http.request", "body": b"x" * 50, "more_body": True}] * 100
    await client.ask(gate(never))
    assert client.status == 413
    assert len(client.body) > 90


@pytest.mark.parametrize(("size", "status"), [(100, 200), (101, 413)])
async def test_the_limit_counts_what_arrives(size: int, status: int) -> None:
    async def app(_scope: Scope, receive: Any, send: Any) -> None:  # noqa: ANN401
        try:
            while (await receive())["more_body"]:
                pass
        except Exception:  # noqa: BLE001 - as frameworks do
            await answer(send, b"bad body", status=400)
            return
        await answer(send)

    client = Client()
    client.body = [
        {"type": "http.request", "body": b"x" * (size - 50), "more_body": True},
        {"type": "http.request", "body": b"x" * 50, "more_body": False},
    ]
    await client.ask(gate(app))
    assert client.status == status


async def test_a_head_that_can_be_read_in_two_ways_ends_at_the_gate() -> None:
    for path in (CHAT, "/health", "/v1/nowhere"):
        client = Client(path, headers=[(b"host", b"a"), (b"host", b"b")])
        await client.ask(gate(never))
        assert client.status == 400
        assert (b"connection", b"close") in client.said[0]["headers"]


async def test_a_body_that_drips_in_is_given_up_and_the_connection_with_it() -> None:
    async def app(_scope: Scope, receive: Any, send: Any) -> None:  # noqa: ANN401
        try:
            while (await receive())["more_body"]:
                pass
        except Exception:  # noqa: BLE001 - as frameworks do
            await answer(send, b"bad body", status=400)

    door = gate(app)
    door.limits = FrontendLimits(max_body_s=0.01)
    client = Client()
    client.body = [{"type": "http.request", "body": b"{", "more_body": True}]
    async with asyncio.timeout(5):
        await client.ask(door)
    assert client.status == 408
    assert json.loads(client.text)["error"]["type"] == "RequestTimeoutError"
    assert (b"connection", b"close") in client.said[0]["headers"]


async def test_once_its_body_is_there_a_request_may_take_as_long_as_it_likes() -> None:
    async def app(_scope: Scope, receive: Any, send: Any) -> None:  # noqa: ANN401
        await receive()
        gone = asyncio.create_task(receive())
        done, _ = await asyncio.wait([gone], timeout=0.03)
        gone.cancel()
        await answer(send, status=500 if done else 200)

    door = gate(app)
    door.limits = FrontendLimits(max_body_s=0.01)
    client = await Client().ask(door)
    assert client.status == 200


async def test_requests_do_not_see_each_others_exchange() -> None:
    both = asyncio.Barrier(2)

    async def app(scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        if scope["path"] == CHAT:
            current().problem = Problem(status=503, message="mine")
        await both.wait()
        await answer(send, b"fine")

    failing, fine = Client(), Client("/v1/models", method="GET")
    door = gate(app)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(failing.ask(door))
        group.create_task(fine.ask(door))
    assert failing.status == 503
    assert fine.text == b"fine"


def test_a_problem_survives_the_ride_on_an_output() -> None:
    problem = Problem.from_error(NoCapacity("r", 2.5, 'quoted "why"'))
    assert Problem.unpack(problem.pack()) == problem
    assert Problem.unpack(None).status == 500


@pytest.mark.parametrize("dialect", Dialect)
def test_an_error_event_is_one_event(dialect: Dialect) -> None:
    event = Problem(status=503, message="two\n\nlines").event(dialect)
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1


def look_up(shown: str) -> ValidKey | InvalidKey:
    return ValidKey(key_id="k", tenant="acme") if shown == "good" else InvalidKey()


KEYED = Access(look_up=look_up, anonymous=False, isolated=frozenset({"acme"}))


async def test_without_a_good_key_neither_the_app_nor_the_body_is_reached() -> None:
    for headers in ([], [(b"x-api-key", b"bad")]):
        client = await Client(headers=headers).ask(gate(never, access=KEYED))
        assert client.status == 401
        assert len(client.body) == 1
    health = await Client("/health", method="GET").ask(gate(never, access=KEYED))
    assert health.status == 200


async def test_the_app_sees_the_caller_but_not_the_key() -> None:
    seen: list[object] = []
    asked: list[Caller] = []

    async def app(scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        seen.extend([scope["headers"], tuple(current().caller)])
        await answer(send)

    def admit(_n: int, caller: Caller) -> None:
        asked.append(caller)

    headers = [(b"host", b"x"), (b"authorization", b"Bearer good"), (b"x-slo-class", b"batch")]
    await Client(headers=headers).ask(gate(app, access=KEYED, admit=admit))
    assert seen == [[(b"host", b"x")], ("acme", "batch", "acme")]
    await Client(headers=headers).ask(gate(app, admit=admit))
    assert asked == [Caller("acme", "batch", "acme"), Caller(DEFAULT_TENANT, "batch")]


PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def traced_as(path: str, headers: list[tuple[bytes, bytes]], access: Access) -> TraceContext:
    """The trace of a request on its way through the app, which sees no header of it."""
    seen: list[TraceContext | None] = []

    async def app(scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        assert [name for name, _ in scope["headers"]] == [b"host"]
        seen.append(current().trace)
        await answer(send)

    await Client(path, headers=[(b"host", b"x"), *headers]).ask(gate(app, access=access))
    (trace,) = seen
    assert trace is not None
    return trace


async def test_a_request_belongs_to_its_callers_trace_even_where_none_is_begun() -> None:
    headers = [(b"Traceparent", PARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    trace = await traced_as("/v1/chat/completions", headers, Access())
    assert trace.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert trace[1:] == ("b7ad6b7169203331", True, "a=1,b=2", "chat")


async def test_a_trace_begins_at_the_gate_where_no_caller_says_one() -> None:
    begins = Access(trace_sample_fraction=0.0)
    first = await traced_as("/v1/chat/completions", [], begins)
    twice = [(b"traceparent", PARENT), (b"traceparent", PARENT)]
    second = await traced_as("/v1/chat/completions", twice, begins)
    assert first.trace_id != second.trace_id
    assert first[1:] == second[1:] == ("", False, "", "chat")
    assert (await traced_as("/v1/chat/completions", [], Access(trace_sample_fraction=1.0))).sampled


async def test_access_and_limits_may_be_replaced_while_requests_come() -> None:
    door = gate(answers(b""))
    door.access = KEYED
    refused = await Client().ask(door)
    assert refused.status == 401
    door.access, door.limits = Access(), FrontendLimits(max_body_bytes=1)
    large = Client(headers=[(b"content-length", b"2"), (b"expect", b"100-continue")])
    await large.ask(door)
    assert large.status == 413


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (CHAT, {"detail": "no JSON"}, {"message": "no JSON", "code": 400}),
        (CHAT, {"error": {"message": "m", "param": "n"}}, {"message": "m", "param": "n"}),
        (CHAT, {"other": 1}, {"message": "bad request", "type": "BadRequestError", "code": 400}),
        (
            CHAT,
            {"error": {"message": "m", "type": "Bad Request", "param": None, "code": 400}},
            {"message": "m", "type": "BadRequestError"},
        ),
        ("/v1/messages", {"detail": "no"}, {"type": "invalid_request_error", "message": "no"}),
        (
            "/v1/messages",
            {"error": {"message": "m", "type": "BadRequestError"}},
            {"type": "invalid_request_error", "message": "m"},
        ),
        (
            "/v1/messages",
            {"type": "error", "error": {"type": "BadRequestError", "message": "m"}},
            {"type": "invalid_request_error", "message": "m"},
        ),
        (
            "/v1/messages",
            {"type": "error", "error": {"type": "api_error", "message": "m"}},
            {"type": "invalid_request_error", "message": "m"},
        ),
        (
            "/v1/messages",
            {"type": "error", "error": {"type": "not_found_error", "message": "m", "x": 1}},
            {"type": "not_found_error", "message": "m", "x": 1},
        ),
    ],
)
async def test_the_apps_own_errors_get_the_shape_of_the_api(
    path: str, body: dict[str, object], wanted: dict[str, object]
) -> None:
    async def app(_scope: Scope, _receive: object, send: Any) -> None:  # noqa: ANN401
        data = json.dumps(body).encode()
        headers = [(b"content-length", b"%d" % len(data)), (b"x-kept", b"1")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send(chunk(data[:5]))
        await send(chunk(data[5:], more=False))

    client = await Client(path).ask(gate(app, routes=("chat", "messages")))
    assert client.status == 400
    headers = dict(client.said[0]["headers"])
    assert int(headers[b"content-length"]) == len(client.text)
    assert headers[b"x-kept"] == b"1"
    document = json.loads(client.text)
    assert wanted.items() <= document["error"].items()
    assert (document.get("type") == "error") == (path == "/v1/messages")
