"""Which of several models' API servers gets a request, and what the others notice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from baton.engine.vllm.gate.gate import Gate, Message, Receive, Scope, Send
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.engine.vllm.gate.model_router import ModelRouter

ROUTES = ("chat", "completions", "models", "messages", "responses", "health")


class Api:
    """An API server that answers with its name and what it was sent, and lists its own models."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while scope["method"] == "POST":
            message: Message = await receive()
            body += message["body"]
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        told: object = {"served_by": self.names[0]}
        if scope["path"] == "/v1/models":
            told = {"object": "list", "data": [{"id": name} for name in self.names]}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})


@pytest.fixture
def apis() -> dict[str, Api]:
    return {"large": Api("large", "adapted"), "small": Api("small")}


@pytest.fixture
async def client(apis: dict[str, Api]) -> AsyncIterator[httpx.AsyncClient]:
    gate = Gate(
        apis["large"],
        routes=ROUTES,
        healthy=lambda: False,
        admit=lambda _count, _caller: None,
        limits=FrontendLimits(max_body_bytes=2000),
    )
    router = ModelRouter({**apis, "adapted": apis["large"]})
    gate.replace_app(router, healthy=lambda: True)
    transport = httpx.ASGITransport(gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as found:
        yield found


@pytest.mark.parametrize(
    ("model", "served_by"), [("large", "large"), ("small", "small"), ("adapted", "large")]
)
async def test_a_request_goes_to_the_model_that_it_names(
    client: httpx.AsyncClient, apis: dict[str, Api], model: str, served_by: str
) -> None:
    asked = {"model": model, "prompt": "x" * 500}
    answer = await client.post("/v1/completions", json=asked)
    assert answer.json() == {"served_by": served_by}
    (body,) = apis[served_by].bodies
    assert json.loads(body) == asked
    assert sum(len(api.bodies) for api in apis.values()) == 1


async def test_a_body_that_comes_in_pieces_arrives_whole(
    client: httpx.AsyncClient, apis: dict[str, Api]
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"prompt": "', b'a", "mod', b'el": "small"}'):
            yield piece

    await client.post("/v1/chat/completions", content=pieces())
    assert [json.loads(body) for body in apis["small"].bodies] == [
        {"prompt": "a", "model": "small"}
    ]


@pytest.mark.parametrize("body", [b'{"model": "nobody"}', b"{", b"[]", b'{"model": 7}', b""])
async def test_a_body_without_a_model_is_left_to_an_api_server(
    client: httpx.AsyncClient, apis: dict[str, Api], body: bytes
) -> None:
    await client.post("/v1/completions", content=body)
    assert apis["large"].bodies == [body]


async def test_a_request_without_a_model_gets_the_list_of_models(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/messages", json={"max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"  # Anthropic's shape
    assert "adapted, large, small" in answer.json()["error"]["message"]


async def test_the_list_of_models_is_everybodys(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models")
    assert [row["id"] for row in answer.json()["data"]] == ["large", "adapted", "small"]


async def test_a_body_beyond_the_limit_reaches_no_engine(
    client: httpx.AsyncClient, apis: dict[str, Api]
) -> None:
    answer = await client.post("/v1/completions", json={"model": "small", "prompt": "x" * 3000})
    assert answer.status_code == 413
    assert not any(api.bodies for api in apis.values())


async def test_it_is_healthy_when_what_it_stands_before_is(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200


async def test_adapters_that_came_later_go_to_their_model_until_they_are_gone() -> None:
    apis = {"large": Api("large"), "small": Api("small")}
    router = ModelRouter(apis)
    transport = httpx.ASGITransport(router)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:

        async def served_by(model: str) -> object:
            asked = {"model": model, "prompt": "x"}
            return (await client.post("/v1/completions", json=asked)).json()["served_by"]

        router.set_adapters({"sql": "small", "large": "small"})
        assert [await served_by("sql"), await served_by("large")] == ["small", "large"]
        router.set_adapters({})
        assert await served_by("sql") == "large", "who says that it does not exist"
