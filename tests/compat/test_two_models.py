"""Two of vLLM's API servers behind one gate: each API, each model, and a model that nobody has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton.engine.tiny_model import write_tiny_model
from baton.engine.vllm.frontend.app import VllmFrontend
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.gate.model_router import ModelRouter
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MAX_LEN_TOKENS, MonotonicClock
from tests.fakes.frontends import fleet_facts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.asyncio(loop_scope="module"),
]
MODELS = ("small", "large")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 4,
    },
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}


class Two:
    """The fleet of each model, and a client of both."""

    def __init__(self, fleets: dict[str, EchoFleet], client: httpx.AsyncClient) -> None:
        self.fleets = fleets
        self.client = client

    async def ask(self, model: str, path: str, **more: object) -> httpx.Response:
        return await self.client.post(path, json={**BODIES[path], "model": model, **more})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    facts = fleet_facts(MAX_LEN_TOKENS)
    fleets, frontends = {name: EchoFleet() for name in MODELS}, {}
    async with AsyncExitStack() as ends:
        for name, fleet in fleets.items():
            settings = FrontendSettings(model=str(model), served_model_name=name)
            frontend = VllmFrontend(settings, facts, hooks=fleet.hooks(), clock=MonotonicClock())
            ends.push_async_callback(frontend.close)
            await frontend.start()
            fleet.frontend = frontends[name] = frontend
            steps = asyncio.create_task(fleet.run())
            ends.callback(steps.cancel)
        router = ModelRouter({name: other.api for name, other in frontends.items()})
        app = frontends["small"].gate_app(router, healthy=lambda: True)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://baton", timeout=60
        ) as client:
            yield Two(fleets, client)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", MODELS)
async def test_each_api_serves_each_model_from_its_own_fleet(
    two: Two, model: str, path: str
) -> None:
    for fleet in two.fleets.values():
        fleet.reset()
    answer = await two.ask(model, path)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    arrived = {name: fleet.arrived.qsize() for name, fleet in two.fleets.items()}
    assert arrived == {name: int(name == model) for name in MODELS}


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_model_is_not_found_in_the_words_of_the_api(two: Two, path: str) -> None:
    answer = await two.ask("nobody", path)
    assert answer.status_code == 404, answer.text
    told = answer.json()
    assert "nobody" in told["error"]["message"]
    assert (told.get("type") == "error") == (path == "/v1/messages")


async def test_a_model_that_is_full_refuses_and_the_other_serves(two: Two) -> None:
    two.fleets["small"].free_slots = 0
    try:
        answers = [await two.ask(model, "/v1/completions") for model in MODELS]
    finally:
        two.fleets["small"].reset()
    assert [answer.status_code for answer in answers] == [503, 200]


@pytest.mark.parametrize("model", MODELS)
async def test_a_stream_comes_from_the_model_that_it_names(two: Two, model: str) -> None:
    answer = await two.ask(model, "/v1/completions", stream=True)
    assert answer.text.count(f'"model":"{model}"') >= 4
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_all_models_are_listed(two: Two) -> None:
    listed = (await two.client.get("/v1/models")).json()["data"]
    assert [row["id"] for row in listed] == list(MODELS)
