"""LoRA adapters as clients meet them: models of their own names."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import anthropic
import httpx
import openai
import pytest

from baton.control.fleet.adapter_registry import RuntimeAdapter
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.adapters import LOAD_PATH, UNLOAD_PATH, AdapterRequest
from baton.engine.vllm.gate.errors import Problem
from baton.runtime.keys.api_keys import KeyRing, mint
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import ADAPTER, MAX_BODY_BYTES, Server, ServerThread

NOW = datetime(2026, 11, 1, tzinfo=UTC)
OPS, OPS_KEY = mint("ops", now=NOW, is_admin=True)
USER, USER_KEY = mint("acme", now=NOW)
KEYED = Access(look_up=lambda token: KeyRing([OPS, USER]).look_up(token, NOW), anonymous=True)
WANTED = {"lora_name": "sql", "lora_path": "/adapters/sql"}
SQL = RuntimeAdapter(name="sql", model="tiny", source="/adapters/sql", tenant="ops", number=7)

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.usefixtures("require_echo_server")
def test_an_adapter_is_asked_for_by_its_name_in_place_of_the_model(
    client: openai.OpenAI, server: Server, fleet: EchoFleet
) -> None:
    for name, adapter in ((ADAPTER, ADAPTER), (server.model, None)):
        answer = client.completions.create(model=name, prompt="hi", max_tokens=2)
        assert answer.model == name
        assert fleet.arrived.get(timeout=5).adapter == adapter


@pytest.mark.usefixtures("require_echo_server")
def test_an_adapter_is_served_on_every_api(
    anthropic_client: anthropic.Anthropic, client: openai.OpenAI, fleet: EchoFleet
) -> None:
    anthropic_client.messages.create(
        model=ADAPTER, max_tokens=2, messages=[{"role": "user", "content": "hi"}]
    )
    client.responses.create(model=ADAPTER, input="hi", max_output_tokens=2)
    client.chat.completions.create(
        model=ADAPTER, max_tokens=2, messages=[{"role": "user", "content": "hi"}]
    )
    assert [fleet.arrived.get(timeout=5).adapter for _ in range(3)] == [ADAPTER] * 3


def test_an_adapter_that_is_not_configured_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny-eve"):
        client.completions.create(model="tiny-eve", prompt="hi", max_tokens=2)


class ScriptedAdapters:
    """Keeps what it is asked, and answers as it is told to."""

    def __init__(self) -> None:
        self.asked: list[AdapterRequest] = []
        self.problem: Problem | None = None

    async def __call__(self, order: AdapterRequest) -> Problem | None:
        self.asked.append(order)
        return self.problem


@pytest.fixture
def adapters(echo_server: tuple[ServerThread, EchoFleet]) -> Iterator[ScriptedAdapters]:
    """The endpoint with keys, and whoever loads adapters behind it."""
    thread, _ = echo_server
    found = ScriptedAdapters()
    thread.reconfigure(access=KEYED)
    thread.administer(found)
    yield found
    thread.reconfigure(access=Access())
    thread.administer(None)


def post(server: Server, path: str, body: object, key: str | None = OPS_KEY) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(server.base_url + path, json=body, headers=headers, timeout=20)


@pytest.mark.usefixtures("require_echo_server")
def test_vllms_requests_to_load_and_unload_are_taken_and_answered_in_its_words(
    server: Server, adapters: ScriptedAdapters
) -> None:
    loaded = post(server, LOAD_PATH, WANTED | {"load_inplace": True, "other": 1})
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    unloaded = post(server, UNLOAD_PATH, {"lora_name": "sql", "lora_int_id": 3})
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'sql' removed successfully.",
    )
    assert adapters.asked == [
        AdapterRequest(name="sql", path="/adapters/sql", in_place=True, tenant="ops"),
        AdapterRequest(name="sql", tenant="ops"),
    ]


@pytest.mark.usefixtures("require_echo_server")
@pytest.mark.parametrize("path", [LOAD_PATH, UNLOAD_PATH])
def test_only_a_key_that_may_administer_does_so(
    server: Server,
    adapters: ScriptedAdapters,
    echo_server: tuple[ServerThread, EchoFleet],
    path: str,
) -> None:
    for key, status in ((None, 401), (USER_KEY, 403), ("bt_x_y", 401), ("any", 401)):
        refused = post(server, path, WANTED, key)
        assert refused.status_code == status, refused.text
        assert refused.json()["error"]["message"]
    echo_server[0].reconfigure(access=Access())
    refused = post(server, path, WANTED)
    assert (refused.status_code, "keys_file" in refused.text) == (403, True)
    assert adapters.asked == []


@pytest.mark.usefixtures("require_echo_server")
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"lora_path": "/a"}, "no 'lora_name'"),
        ({"lora_name": "", "lora_path": "/a"}, "'lora_name' is ''"),
        ({"lora_name": 5, "lora_path": "/a"}, "'lora_name' is '5'"),
        ({"lora_name": "sql"}, "no 'lora_path'"),
        (WANTED | {"load_inplace": "yes"}, "expected true or false"),
        (WANTED | {"is_3d_lora_weight": True}, "is_3d_lora_weight"),
        (WANTED | {"base_model_name": 1}, "expected the name of a model"),
        ([], "no JSON object"),
        ("sql", "no JSON object"),
    ],
)
def test_an_unknown_field_is_a_bad_request(
    server: Server, adapters: ScriptedAdapters, body: object, why: str
) -> None:
    refused = post(server, LOAD_PATH, body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequestError")
    assert why in refused.json()["error"]["message"]
    assert adapters.asked == []


@pytest.mark.usefixtures("require_echo_server")
def test_other_bodies_and_methods_are_refused_as_everywhere(
    server: Server, adapters: ScriptedAdapters
) -> None:
    headers = {"x-api-key": OPS_KEY}
    url = server.base_url + LOAD_PATH
    assert httpx.get(url, headers=headers, timeout=20).status_code == 405
    broken = httpx.post(url, content=b"{", headers=headers, timeout=20)
    assert (broken.status_code, "no JSON" in broken.text) == (400, True)
    large = httpx.post(url, content=b"x" * (MAX_BODY_BYTES + 1), headers=headers, timeout=20)
    assert large.status_code == 413

    def parts() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1000 + 2):
            yield b" " * 1000

    dripped = httpx.post(url, content=parts(), headers=headers, timeout=20)
    assert dripped.status_code == 413
    assert adapters.asked == []


@pytest.mark.usefixtures("require_echo_server")
def test_why_an_adapter_is_not_loaded_is_said(server: Server, adapters: ScriptedAdapters) -> None:
    adapters.problem = Problem(status=403, message="not there")
    refused = post(server, LOAD_PATH, WANTED)
    assert refused.status_code == 403
    assert refused.json()["error"] == {
        "message": "not there",
        "type": "PermissionDeniedError",
        "param": None,
        "code": 403,
    }


@pytest.mark.usefixtures("require_echo_server")
def test_an_adapter_that_was_loaded_is_listed_served_and_gone_again(
    client: openai.OpenAI,
    anthropic_client: anthropic.Anthropic,
    server: Server,
    fleet: EchoFleet,
    echo_server: tuple[ServerThread, EchoFleet],
) -> None:
    thread, _ = echo_server
    thread.administer(None, [SQL])
    rows = {row.id: row.to_dict() for row in client.models.list().data}
    assert set(rows) == {server.model, ADAPTER, "sql"}
    assert (rows["sql"]["parent"], rows["sql"]["root"]) == (server.model, "/adapters/sql")
    answer = client.completions.create(model="sql", prompt="hi", max_tokens=2)
    assert answer.model == "sql"
    message = anthropic_client.messages.create(
        model="sql", max_tokens=2, messages=[{"role": "user", "content": "hi"}]
    )
    assert message.model == "sql"
    client.responses.create(model="sql", input="hi", max_output_tokens=2)
    client.completions.create(model="sql", prompt="hi", max_tokens=2, n=2)
    # In the fleet it has the number of its load: another load of the name is another adapter.
    assert [fleet.arrived.get(timeout=5).adapter for _ in range(5)] == ["sql@7"] * 5
    thread.administer(None, [])
    assert {row.id for row in client.models.list().data} == {server.model, ADAPTER}
    with pytest.raises(openai.NotFoundError, match="sql"):
        client.completions.create(model="sql", prompt="hi", max_tokens=2)


@pytest.mark.usefixtures("require_echo_server")
def test_an_adapter_of_the_start_keeps_its_name(
    client: openai.OpenAI, fleet: EchoFleet, echo_server: tuple[ServerThread, EchoFleet]
) -> None:
    thread, _ = echo_server
    other = RuntimeAdapter(name=ADAPTER, model="tiny", source="/x", tenant="ops", number=8)
    thread.administer(None, [other])
    client.completions.create(model=ADAPTER, prompt="hi", max_tokens=2)
    assert fleet.arrived.get(timeout=5).adapter == ADAPTER
    thread.administer(None, [])
