"""What hostile clients try on a running endpoint, and that nothing comes of it."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from baton.engine.vllm.frontend.settings import RequestCapabilities
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.gate import ROUTES
from baton.engine.vllm.gate.limits import MAX_NAME_CHARS, FrontendLimits
from baton.runtime.keys.api_keys import KeyRing, mint
from tests.abuse import raw
from tests.abuse.messages import Message, messages
from tests.abuse.routes import Credential, check_route
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MAX_BODY_BYTES, Server, ServerThread
from tests.compat.test_compat_failures import PATHS

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NOW = datetime.now(UTC)
ACME, ACME_KEY = mint("acme", now=NOW)
BETA, BETA_KEY = mint("beta", now=NOW)
OLD, OLD_KEY = mint("acme", now=NOW)
RING = KeyRing([ACME, BETA, replace(OLD, revoked_at=NOW)])
TOKENS = {
    Credential.NONE: None,
    Credential.WRONG: ACME_KEY[:-1] + ("0" if ACME_KEY[-1] != "0" else "1"),
    Credential.REVOKED: OLD_KEY,
    Credential.OTHERS: BETA_KEY,
    Credential.GOOD: ACME_KEY,
}
KEYED = Access(
    look_up=lambda token: RING.look_up(token, NOW),
    anonymous=False,
    isolated=frozenset({"acme", "beta"}),
)


@pytest.fixture
def keyed(echo_server: tuple[ServerThread, EchoFleet]) -> Iterator[ServerThread]:
    """The endpoint, open only to those with a key."""
    thread, _ = echo_server
    thread.reconfigure(access=KEYED)
    yield thread
    thread.reconfigure(access=Access(), limits=FrontendLimits(max_body_bytes=MAX_BODY_BYTES))


def ask(
    server: Server, path: str, headers: dict[str, str] | None = None, **more: object
) -> httpx.Response:
    body = {"model": server.model, **PATHS[path], **more}
    for name in {"max_tokens", "max_output_tokens"} & body.keys() - more.keys():
        body[name] = 2
    return httpx.post(server.base_url + path, json=body, headers=headers, timeout=20)


# Of those that do not end a server waits for more, for as long as it may take.
ENDING = [message for message in messages() if message.is_answered_immediately]


@pytest.mark.parametrize("message", ENDING, ids=lambda message: message.name)
def test_a_message_that_can_be_read_in_two_ways_is_not_served(
    server: Server, fleet: EchoFleet, keyed: ServerThread, message: Message
) -> None:
    data = message.make(ACME_KEY) + raw.closing_request()
    heard = raw.exchange(server.address, data, timeout_s=5)
    assert heard.is_closed, heard
    answers = [answer for answer in heard.responses if not raw.is_closing_response(answer)]
    assert {answer.status for answer in answers} <= message.allowed, heard
    assert len(answers) <= message.max_answers


@pytest.mark.usefixtures("require_echo_server")
def test_every_route_of_vllms_has_a_rule_and_keeps_it(
    server: Server, fleet: EchoFleet, keyed: ServerThread
) -> None:
    """The rules are in tests/abuse/routes.py; what is not listed there is closed."""
    assert keyed.frontend is not None
    assert keyed.frontend._api is not None
    app: Any = keyed.frontend._api.asgi
    routes = {
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", None) or ("GET",)
    }
    assert len(routes) > 30, "vLLM's app has more routes than are opened"
    routes |= {("GET", path) for paths in ROUTES.values() for path in paths}
    with httpx.Client(base_url=server.base_url, timeout=20) as client:
        asked = [check_route(client, route, shown) for route in routes for shown in TOKENS.items()]
    wrong = sorted(reason for reason in asked if reason is not None)
    assert wrong == []


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_template_of_the_client_s_own_is_never_run(
    server: Server, fleet: EchoFleet, path: str, *, stream: bool
) -> None:
    inside = ask(server, path, chat_template_kwargs={"chat_template": TEMPLATE}, stream=stream)
    assert inside.status_code == 400
    assert "chat template" in inside.text.lower()
    outside = ask(server, path, chat_template=TEMPLATE, stream=stream)
    # Where the API has no such field it says nothing, and the model's own template is used.
    if path == "/v1/chat/completions":
        assert outside.status_code == 400
        assert fleet.arrived.empty()


def test_neither_is_one_to_be_counted_with(server: Server) -> None:
    body = {"model": server.model, "messages": [{"role": "user", "content": "x"}]}
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        for more in (
            {"chat_template": TEMPLATE},
            {"chat_template_kwargs": {"chat_template": TEMPLATE}},
        ):
            answer = httpx.post(server.base_url + path, json=body | more)
            plain = httpx.post(server.base_url + path, json=body)
            assert answer.status_code == 400 or answer.json() == plain.json()


def test_tensors_in_place_of_a_prompt_are_refused_unread(server: Server, fleet: EchoFleet) -> None:
    tensor = base64.b64encode(b"PK\x03\x04 no tensor at all").decode()
    prompts: tuple[dict[str, Any], ...] = ({"prompt": "x"}, {"prompt": None}, {"prompt": []})
    for prompt in prompts:
        for embeds in (tensor, [tensor]):
            refused = ask(server, "/v1/completions", prompt_embeds=embeds, **prompt)
            assert refused.status_code == 400, refused.text
            assert "enable-prompt-embeds" in refused.text
    part = [{"role": "user", "content": [{"type": "prompt_embeds", "prompt_embeds": tensor}]}]
    assert ask(server, "/v1/chat/completions", messages=part).status_code == 400
    assert fleet.arrived.empty()


class Bait(http.server.BaseHTTPRequestHandler):
    """A host inside, which nobody outside may have us ask."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(302 if self.path == "/elsewhere" else 200)
        self.send_header("location", "/inside")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Nothing."""


@pytest.fixture
def bait() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("Baited", (Bait,), {"asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}", asked
        served.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "URL"}}),
        ("/v1/chat/completions", {"type": "video_url", "video_url": {"url": "URL"}}),
        ("/v1/chat/completions", {"type": "audio_url", "audio_url": {"url": "URL"}}),
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "URL"}}),
        ("/v1/responses", {"type": "input_image", "image_url": "URL", "detail": "auto"}),
    ],
)
def test_no_request_makes_us_ask_another_host_or_read_a_file(
    server: Server, bait: tuple[str, list[str]], kind: str, part: dict[str, object]
) -> None:
    host, asked = bait
    for url in (f"{host}/inside", "file:///etc/hostname"):
        said = [{"role": "user", "content": [json.loads(json.dumps(part).replace("URL", url))]}]
        more: dict[str, Any] = {"input" if kind == "/v1/responses" else "messages": said}
        answer = ask(server, kind, **more)
        assert 400 <= answer.status_code < 500, answer.text
    assert asked == []


def test_a_model_that_sees_is_fed_from_nowhere_but_named_hosts(
    server: Server, bait: tuple[str, list[str]]
) -> None:
    """What vLLM fetches media with, as it is told by our arguments; the tiny model sees nothing.

    Redirects are off since the endpoint was started, in this process.
    """
    from vllm.multimodal.media import MediaConnector

    from baton.engine.vllm.frontend.llm import parse_server_args

    host, asked = bait

    def fetch(brought: RequestCapabilities, path: str) -> None:
        args = parse_server_args(["--model", "m", *brought.argv()])
        connector = MediaConnector(allowed_media_domains=args.allowed_media_domains)
        with pytest.raises(Exception, match=r".") as failed:
            connector.fetch_image(host + path)
        assert not isinstance(failed.value, AssertionError)

    fetch(RequestCapabilities(), "/inside")
    fetch(RequestCapabilities(media_domains=("media.example",)), "/inside")
    assert asked == []
    fetch(RequestCapabilities(media_domains=("127.0.0.1",)), "/elsewhere")
    assert asked == ["/elsewhere"], "a redirect was followed"


def test_request_capabilities_are_passed_to_vllm() -> None:
    from baton.engine.vllm.frontend.llm import parse_server_args

    nothing = parse_server_args(["--model", "m", *RequestCapabilities().argv()])
    assert not nothing.trust_request_chat_template
    assert not nothing.enable_prompt_embeds
    assert nothing.allowed_media_domains, "no list means any host"
    everything = RequestCapabilities(
        chat_templates=True, media_domains=("a.example", "b.example"), prompt_embeds=True
    )
    args = parse_server_args(["--model", "m", *everything.argv()])
    assert args.trust_request_chat_template
    assert args.enable_prompt_embeds
    assert args.allowed_media_domains == ["a.example", "b.example"]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "role": "assistant", "content": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}],
        },
        {
            "type": "function_call_output",
            "id": "fc_1",
            "call_id": None,
            "name": None,
            "created_by": None,
            "status": "completed",
            "output": [{"type": "input_text", "text": "rain"}],
        },
    ],
    ids=["nothing said", "a refusal", "parts in place of a text"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_cannot_be_read_is_the_clients_mistake(
    server: Server, fleet: EchoFleet, item: dict[str, object], *, stream: bool
) -> None:
    """vLLM's reading of them ends in an IndexError, an AttributeError and an AssertionError."""
    answer = ask(server, "/v1/responses", input=[item], stream=stream)
    assert answer.status_code == 400, answer.text
    assert "cannot have" in answer.json()["error"]["message"]
    assert fleet.arrived.empty()


@pytest.mark.usefixtures("require_echo_server")
@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/messages"])
def test_a_session_is_known_by_its_tenant_too(
    server: Server, fleet: EchoFleet, keyed: ServerThread, path: str
) -> None:
    sessions = []
    for key in (ACME_KEY, BETA_KEY):
        headers = {"x-api-key": key}
        assert ask(server, path, headers, session_id="s").status_code == 200
        assert ask(server, path, headers | {"x-session-id": "s"}).status_code == 200
        assert ask(server, path, headers, session_id="s" * 100_000).status_code == 200
        sessions += [fleet.arrived.get(timeout=5).session_id for _ in range(3)]
    assert sessions[:2] == ["acme/s", "acme/s"]
    assert sessions[3:5] == ["beta/s", "beta/s"]
    assert all(len(session or "") < 200 for session in sessions)
    assert sessions[2] != sessions[5]


SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "x-session-affinity", "session_id")


@pytest.mark.usefixtures("require_echo_server", "keyed")
@pytest.mark.parametrize("path", PATHS)
def test_a_session_is_known_however_a_client_names_it(
    server: Server, fleet: EchoFleet, path: str
) -> None:
    for header in SESSION_HEADERS:
        assert ask(server, path, {"x-api-key": ACME_KEY, header: "s"}).status_code == 200
        assert fleet.arrived.get(timeout=5).session_id == "acme/s", header
    asked = {"prompt_cache_key": "s", "user": "u", "safety_identifier": "u"}
    for key in (ACME_KEY, BETA_KEY):
        for stream in (False, True):
            answer = ask(server, path, {"x-api-key": key}, **asked, stream=stream)
            assert answer.status_code == 200
    sessions = [fleet.arrived.get(timeout=5).session_id for _ in range(4)]
    assert sessions == ["acme/s", "acme/s", "beta/s", "beta/s"]


@pytest.mark.usefixtures("require_echo_server", "keyed")
@pytest.mark.parametrize("path", PATHS)
def test_a_session_that_is_no_name_fails_no_request(
    server: Server, fleet: EchoFleet, path: str
) -> None:
    headers = {"x-api-key": ACME_KEY, "x-claude-code-session-id": "", "session_id": ""}
    answer = ask(server, path, headers, prompt_cache_key="a\nb")
    assert answer.status_code == 200, answer.text
    assert fleet.arrived.get(timeout=5).session_id is None
    # Of another type it is OpenAI's own field on `/v1/responses`, which vLLM checks: 400 there.
    odd = "" if path == "/v1/responses" else ["s"]
    answer = ask(server, path, {"x-api-key": ACME_KEY}, user="u", prompt_cache_key=odd)
    assert answer.status_code == 200, answer.text
    assert fleet.arrived.get(timeout=5).session_id is None


@pytest.mark.usefixtures("require_echo_server")
def test_a_client_sets_neither_priority_nor_engine(server: Server, fleet: EchoFleet) -> None:
    headers = {"x-vllm-priority": "-1000", "x-data-parallel-rank": "3"}
    for path in PATHS:
        assert ask(server, path, headers, priority=-1000).status_code == 200, path
        assert fleet.arrived.get(timeout=5).priority == 0


@pytest.mark.usefixtures("require_echo_server")
def test_the_name_of_a_request_is_short_and_printable(server: Server, fleet: EchoFleet) -> None:
    path = "/v1/completions"
    assert ask(server, path, {"x-request-id": "mine-1"}).json()["id"] == "cmpl-mine-1"
    for odd in ("x" * 129, "a b", 'a"b'):
        given = ask(server, path, {"x-request-id": odd}).json()["id"]
        assert odd not in given
    for _ in range(4):
        assert len(fleet.arrived.get(timeout=5).request_id) < MAX_NAME_CHARS
    for odd in ("x" * 100_000, "a\nb", "\x1b[31m"):
        refused = ask(server, path, request_id=odd)
        assert refused.status_code == 400
        assert "request id" in refused.json()["error"]["message"]
    assert fleet.arrived.empty()


@pytest.mark.usefixtures("require_echo_server")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_search_for_more_than_one_may_ask_for_is_a_bad_request(
    server: Server, fleet: EchoFleet, keyed: ServerThread, path: str
) -> None:
    """It is made of many requests for one token each, all of which are within the limits."""
    keyed.reconfigure(limits=FrontendLimits(max_tokens=3, max_n=2))
    headers = {"x-api-key": ACME_KEY}
    long = ask(server, path, headers, use_beam_search=True, n=2, max_tokens=4)
    assert long.status_code == 400
    assert "at most 3" in long.text
    wide = ask(server, path, headers, use_beam_search=True, n=3, max_tokens=3)
    assert wide.status_code == 400
    assert "at most 2" in wide.text
    assert fleet.arrived.empty()
