"""What a path is called in vLLM's metrics is looked up once, and is what it is called anyway."""

from __future__ import annotations

import fastapi
import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator, routing
from starlette.routing import Mount

from baton.engine.vllm.fast_path import route_name_cache as route_names


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were looked up."""
    seen: list[str] = []
    look_up = routing.get_route_name

    def noted(request: fastapi.Request, should_include_root_path: bool) -> str | None:  # noqa: FBT001 - as it is called
        seen.append(f"{request.method} {request.url.path}")
        name: str | None = look_up(request, should_include_root_path)
        return name

    monkeypatch.setattr(routing, "get_route_name", noted)
    route_names.install_route_name_cache()
    route_names.install_route_name_cache()  # as the second model of a deployment does
    return seen


def counted(*asked: tuple[str, str]) -> list[tuple[str, str, float]]:
    """How an app counts what it is asked: method, handler, requests."""
    registry, app, part = CollectorRegistry(), fastapi.FastAPI(), fastapi.FastAPI()
    Instrumentator(registry=registry).instrument(app)
    for route in ("/one", "/one/{name}"):
        app.get(route)(lambda: "here")
    part.post("/inner")(lambda: "there")
    app.routes.append(Mount("/mounted", part))
    client = TestClient(app)
    for method, path in asked:
        client.request(method, path)
    return sorted(
        (sample.labels["method"], sample.labels["handler"], sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "http_requests_total"
    )


ASKED = (
    ("GET", "/one"),
    ("GET", "/one/a"),
    ("GET", "/one/b"),
    ("POST", "/mounted/inner"),
    ("POST", "/one"),
    ("GET", "/none"),
    ("GET", "/one"),
)


def test_requests_are_counted_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = counted(*ASKED)
    monkeypatch.setattr(routing, "get_route_name", routing.get_route_name)
    route_names.install_route_name_cache()
    assert counted(*ASKED) == before
    assert ("GET", "/one/{name}", 2.0) in before, "or this compares nothing"


def test_a_path_is_looked_up_once_for_each_method(looked_up: list[str]) -> None:
    counted(*ASKED, *ASKED)
    assert looked_up == [f"{method} {path}" for method, path in dict.fromkeys(ASKED)]


def test_of_too_many_paths_the_oldest_is_looked_up_again(
    looked_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_names, "_MAX_ENTRIES", 2)
    counted(*(("GET", f"/one/{name}") for name in "abcbca"))
    assert [path[-1] for path in looked_up] == ["a", "b", "c", "a"]
