"""What the console is told, and what it is told when somebody does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import pytest

from baton.config.schema.deployment import DeploymentConfig, Route
from baton.config.schema.security import SecurityConfig, TlsConfig
from baton.config.schema.service import TenantConfig
from baton.console.feed import ChatTarget, ChatUnavailable, Feed
from baton.console.history import History
from baton.domain.commands import RecordSelection
from baton.domain.errors import NotRunning, TimedOut
from baton.serving.controller import http_server
from baton.serving.controller.deployment import PointRecorder
from baton.serving.controller.http_server import CallIngresses, LiveFeed, chat_target
from baton.serving.ray.packing import pack
from baton.serving.ray.serve_control import CallResults
from baton.serving.scaling.ports import TickInputs
from tests.serving.configs import simulated
from tests.serving.scaled_fleet import Clock

CONFIG = simulated()
NOBODY = CallResults(failures=("ingress: no answer to 'links' within 3 s",))


class Ingresses:
    """Answers of several ingresses, by method; what was asked is kept."""

    def __init__(self, **answers: list[object]) -> None:
        self.answers = answers
        self.asked: list[tuple[object, ...]] = []
        self.missing: tuple[str, ...] = ()

    async def __call__(self, method: str, *arguments: object) -> CallResults:
        self.asked.append((method, *arguments))
        given = tuple(pack(answer) for answer in self.answers.get(method, []))
        return CallResults(values=given, failures=self.missing)


async def told() -> Mapping[str, object]:
    return {"model": "tiny", "generation": 3}


def feed(
    ask: CallIngresses, status: Callable[[], Awaitable[Mapping[str, object]]] = told
) -> LiveFeed:
    def no_chat() -> ChatUnavailable:
        return ChatUnavailable(reason="there is no API here")

    def ticks(count: int) -> Mapping[str, object]:
        return {"autoscaler": "slo", "ticks": [{"age_s": 1.0}] * count}

    return LiveFeed(
        status=status,
        ticks=ticks,
        config=lambda: CONFIG,
        call=ask,
        points=History(),
        chat_target=no_chat,
    )


def request_row(request_id: str, *, age_s: float, slowness: float) -> dict[str, object]:
    return {"request_id": request_id, "age_s": age_s, "slowness": slowness}


async def test_the_overview_is_what_the_controller_and_every_ingress_say() -> None:
    ask = Ingresses(status=[{"healthy": True}, {"healthy": False}])
    assert await feed(ask).overview() == {
        "model": "tiny",
        "generation": 3,
        "ingresses": [{"healthy": True}, {"healthy": False}],
    }


async def test_an_unresponsive_ingress_is_named_and_hides_no_other() -> None:
    ask = Ingresses(status=[{"healthy": True}])
    ask.missing = ("ingress: no answer to 'status' within 3 s",)
    found = await feed(ask).overview()
    assert found["ingresses"] == [{"healthy": True}]
    assert found["unresponsive"] == ["ingress: no answer to 'status' within 3 s"]


async def test_a_controller_that_has_seen_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_QUERY_TIMEOUT_S", 0.01)

    def never() -> Awaitable[Mapping[str, object]]:
        return asyncio.Future()

    with pytest.raises(TimedOut, match="has seen no replica yet"):
        await feed(Ingresses(), never).overview()


async def test_links_of_several_ingresses_are_one_list() -> None:
    pair = {"source_id": "p", "target_id": "d", "failed_handoffs": 1, "flows": 2, "state": "ok"}
    ask = Ingresses(links=[[pair | {"probed_age_s": 9.0}], [pair | {"probed_age_s": 1.0}]])
    (row,) = await feed(ask).links()
    assert (row["flows"], row["probed_age_s"]) == (4, 1.0)


async def test_requests_of_several_ingresses_are_in_one_order() -> None:
    ask = Ingresses(
        requests=[
            [request_row("a", age_s=5.0, slowness=9.0)],
            [request_row("b", age_s=1.0, slowness=2.0), request_row("c", age_s=3.0, slowness=4.0)],
        ]
    )
    latest = await feed(ask).requests(2, RecordSelection.LATEST)
    slowest = await feed(ask).requests(2, RecordSelection.SLOWEST)
    assert [entry["request_id"] for entry in latest] == ["b", "c"]
    assert [entry["request_id"] for entry in slowest] == ["a", "c"]
    assert ask.asked == [("requests", 2, "latest"), ("requests", 2, "slowest")]


async def test_one_request_is_looked_for_everywhere() -> None:
    ask = Ingresses(explain=[[], [{"request_id": "x"}]])
    assert await feed(ask).request("x") == [{"request_id": "x"}]
    assert await feed(Ingresses(explain=[[], []])).request("x") == []


async def test_where_no_ingress_answers_that_is_said() -> None:
    async def no_answer(method: str, *arguments: object) -> CallResults:
        return NOBODY

    lone = feed(no_answer)
    for call in (lone.links(), lone.requests(1, RecordSelection.LATEST), lone.request("x")):
        with pytest.raises(NotRunning, match="no ingress answers: ingress: no answer"):
            await call


async def test_ticks_are_the_controllers_and_the_configuration_shows_no_secret() -> None:
    live: Feed = feed(Ingresses())
    assert len(await live.ticks(3)) == 3
    assert "source: tiny" in await live.config()


async def test_every_tick_is_a_point_of_the_charts_without_a_viewer_too() -> None:
    points, clock = History(), Clock()
    rates = iter([5.0, 6.0, 7.0])
    recorder = PointRecorder(
        points, lambda: {"demand": {"requests_per_s": next(rates)}}, clock=clock
    )
    for _ in range(3):
        await recorder.on_tick(TickInputs())
        clock.at_s += 2.0
    assert points.columns(clock.now_s())["offered_per_s"] == [5.0, 6.0, 7.0]


# ------------------------------------------------------------------------------- the playground


def target_of(config: DeploymentConfig) -> ChatTarget:
    found = chat_target(config, ["10.0.0.8", "10.0.0.7", "10.0.0.8"])
    assert isinstance(found, ChatTarget)
    return found


def test_a_deployment_on_loopback_is_chatted_with_there_and_nowhere_else() -> None:
    target = target_of(CONFIG)
    assert target.urls == (f"http://127.0.0.1:{CONFIG.server.port}",)
    assert target.models == tuple(CONFIG.models)
    assert (target.takes_key, target.needs_key, target.cert_file) == (False, False, None)


def test_a_public_front_is_asked_on_this_node_and_then_on_those_of_ingresses() -> None:
    config = replace(
        CONFIG,
        server=replace(CONFIG.server, host="0.0.0.0", port=8443),  # noqa: S104 - meant
        security=SecurityConfig(tls=TlsConfig(cert_file="cert.pem", key_file="key.pem")),
        tenants={"acme": TenantConfig(keys_file="acme.keys")},
    )
    target = target_of(config)
    hosts = ("127.0.0.1", "10.0.0.7", "10.0.0.8")
    assert target.urls == tuple(f"https://{host}:8443" for host in hosts)
    assert (target.takes_key, target.needs_key, target.cert_file) == (True, True, "cert.pem")


def test_there_is_no_playground_without_the_route_or_where_clients_need_certificates() -> None:
    routes = tuple(route for route in Route if route is not Route.CHAT)
    closed = replace(CONFIG, server=replace(CONFIG.server, routes=routes))
    mutual = replace(CONFIG, security=SecurityConfig(tls=TlsConfig(client_ca_file="ca.pem")))
    for config, reason in ((closed, "server.routes"), (mutual, "client_ca_file")):
        found = chat_target(config, [])
        assert isinstance(found, ChatUnavailable)
        assert reason in found.reason
