"""Adapters that are loaded and unloaded while a deployment runs: the controller's part."""

from __future__ import annotations

import asyncio

import pytest

from baton.config.load import load_text
from baton.config.schema.deployment import DeploymentConfig
from baton.control.fleet.adapter_registry import AdapterRegistry, AdapterRejection, LoadRequest
from baton.engine.vllm.gate.adapters import AdapterRequest
from baton.engine.vllm.gate.errors import Problem
from baton.serving.controller.adapter_manager import AdapterManager
from baton.serving.ingress.deployment import make_administer
from baton.serving.ray.serve_control import NO_REPLICA_READY, CallResults
from baton.serving.scaling.ports import TickInputs
from baton.serving.store.adapter_store import (
    AdapterFollower,
    AdapterStore,
    active_adapters,
    decode_registry,
    encode_registry,
)
from tests.fakes.head_store import HeadStore

LOOKS = TickInputs(reports=(), missing=())
FILE = """
version: 1
models:
  tiny:
    source: tiny
    max_len: 4096
    {adapters}
    runtime_adapters: {{max: 2, paths: [/adapters]}}
    engine: {{kind: sim}}
pools:
  prefill: {{role: prefill}}
  decode: {{role: decode}}
"""


def config(adapters: str = "") -> DeploymentConfig:
    return load_text(FILE.format(adapters=adapters))


def order(name: str = "sql", **more: object) -> LoadRequest:
    return LoadRequest(**{"name": name, "source": "/adapters/sql", "tenant": "ops"} | more)  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


class Deployments:
    """What the controller calls: pools and ingresses that answer as they are told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.registries: dict[str, AdapterRegistry] = {}
        self.refuses: dict[str, dict[str, object]] = {}
        self.silent: dict[str, str] = {}
        self.needed: dict[str, int] = {}
        self.hold: asyncio.Event | None = None

    async def __call__(
        self, deployment: str, method: str, *arguments: object, timeout_s: float
    ) -> CallResults:
        self.calls.append((deployment, method))
        if self.hold is not None:
            await self.hold.wait()
        if deployment in self.silent:
            return CallResults(failures=(f"{deployment}: {self.silent[deployment]}",))
        match method:
            case "check_adapter":
                return CallResults(values=(self.refuses.get(deployment),))
            case "apply_adapters":
                registry = self.registries[deployment] = decode_registry(str(arguments[0]))
                return CallResults(values=(registry.version,))
            case "adapters_in_flight":
                registry = decode_registry(str(arguments[0]))
                return CallResults(values=({"version": registry.version, "needed": self.needed},))
            case _:
                raise AssertionError(method)


class World:
    def __init__(self) -> None:
        self.clock, self.store, self.fleet = Clock(), HeadStore(), Deployments()
        self.config = config()
        self.desk = self.new_manager()

    def new_manager(self) -> AdapterManager:
        return AdapterManager(
            lambda: self.config, self.fleet, clock=self.clock, store=AdapterStore(self.store)
        )

    def offered(self) -> list[str]:
        registry = self.fleet.registries.get("ingress", AdapterRegistry())
        return [adapter.name for adapter in registry.adapters if not adapter.draining]

    async def later(self, s: float) -> None:
        self.clock.at_s += s
        await self.desk.on_tick(LOOKS)


@pytest.fixture
def world() -> World:
    return World()


async def refusal(made: object) -> AdapterRejection:
    found = await made  # type: ignore[misc]
    assert isinstance(found, AdapterRejection), found
    return found


async def test_every_replica_is_asked_then_told_and_ingresses_last(world: World) -> None:
    assert await world.desk.load(order()) is None
    assert world.fleet.calls == [
        ("prefill", "check_adapter"),
        ("decode", "check_adapter"),
        ("prefill", "apply_adapters"),
        ("decode", "apply_adapters"),
        ("ingress", "apply_adapters"),
    ]
    assert world.offered() == ["sql"]


async def test_an_adapter_that_one_replica_cannot_serve_is_loaded_nowhere(world: World) -> None:
    world.fleet.refuses["decode"] = {"status": 404, "reason": "no such folder"}
    refused = await refusal(world.desk.load(order()))
    assert (refused.status, refused.reason) == (404, "no such folder")
    world.fleet.refuses.clear()
    world.fleet.silent["decode"] = "no answer"
    refused = await refusal(world.desk.load(order()))
    assert (refused.status, "decode: no answer" in refused.reason) == (503, True)
    assert world.store.values == {}
    assert not [call for call in world.fleet.calls if call[1] == "apply_adapters"]


async def test_a_pool_without_replicas_has_none_to_ask(world: World) -> None:
    world.fleet.silent["decode"] = NO_REPLICA_READY
    assert await world.desk.load(order()) is None


async def test_a_controller_that_is_started_again_knows_what_was_loaded(world: World) -> None:
    assert await world.desk.load(order()) is None
    again = world.new_manager()
    await again.follower.start()
    try:
        assert [row["name"] for row in again.rows()] == ["sql"]
        refused = await refusal(again.load(order()))
        assert "already been loaded" in refused.reason
    finally:
        await again.follower.close()


async def test_of_two_controllers_one_at_a_time_changes_what_there_is(world: World) -> None:
    other = world.new_manager()
    assert await world.desk.load(order()) is None
    assert await other.load(order("chat")) is None
    refused = await refusal(world.desk.load(order("third")))
    assert "runtime_adapters.max" in refused.reason
    names = [adapter.name for adapter in AdapterStore(world.store).newest().adapters]
    assert names == ["sql", "chat"]


async def test_an_adapter_stays_with_replicas_until_no_request_needs_it(world: World) -> None:
    await world.desk.load(order())
    assert await world.desk.unload("sql", "ops") is None
    assert world.offered() == []
    world.fleet.needed = {"sql@1": 2}
    for _ in range(20):
        await world.later(2.0)
    assert [row["state"] for row in world.desk.rows()] == ["draining"]
    world.fleet.needed = {}
    await world.later(2.0)
    assert [row["state"] for row in world.desk.rows()] == ["draining"], "one may be on its way"
    for _ in range(4):
        await world.later(2.0)
    assert world.desk.rows() == []
    assert world.fleet.registries["decode"].adapters == ()


async def test_an_ingress_that_does_not_answer_may_have_requests_for_as_long_as_one_lasts(
    world: World,
) -> None:
    await world.desk.load(order())
    await world.desk.unload("sql", "ops")
    world.fleet.silent["ingress"] = "no answer"
    total_s = world.config.admission.timeouts.total_s
    for _ in range(int(total_s // 10)):
        await world.later(10.0)
    assert world.desk.rows() != []
    for _ in range(2):
        await world.later(10.0)
    assert world.desk.rows() == []


async def test_a_replica_that_missed_the_message_finds_it_in_the_store(world: World) -> None:
    taken: asyncio.Queue[int] = asyncio.Queue()
    holder = AdapterFollower(
        lambda registry: taken.put_nowait(registry.version),
        AdapterStore(world.store),
        interval_s=0.01,
    )
    await holder.start()
    try:
        await world.desk.load(order())
        assert await asyncio.wait_for(taken.get(), 5) == 1
        assert holder.update(AdapterRegistry()) == 1, "an older one changes nothing"
    finally:
        await holder.close()


async def test_a_name_that_the_file_has_now_is_said(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.desk.load(order())
    world.config = config("adapters: {sql: {source: /adapters/old}}")
    world.desk.follower.reapply()
    assert "adapter_not_served" in caplog.text
    (row,) = world.desk.rows()
    assert "configuration file" in str(row["not_served"])
    refused = await refusal(world.desk.load(order("sql", in_place=True)))
    assert "taken by the configuration file" in refused.reason


async def test_a_store_that_cannot_be_reached_is_said_and_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object, **_named: object) -> bool:
        raise ConnectionError("not connected")

    monkeypatch.setattr(world.store, "put", broken)
    refused = await refusal(world.desk.load(order()))
    assert (refused.status, "not connected" in refused.reason) == (503, True)
    assert world.desk.rows() == []


def test_a_stored_registry_is_read_again_and_foreign_data_is_refused() -> None:
    store = HeadStore()
    kept = AdapterStore(store)
    assert kept.newest() == AdapterRegistry()
    registry = AdapterRegistry(version=3)
    assert decode_registry(encode_registry(registry)) == registry
    assert kept.add(AdapterRegistry(version=1))
    assert not kept.add(AdapterRegistry(version=1))
    for text in ("{}", "[]", "x", '{"version": 1, "adapters": [{"name": "a"}]}'):
        with pytest.raises(ValueError, match=r"cannot be read|Expecting value"):
            decode_registry(text)


def test_few_versions_are_kept() -> None:
    store = HeadStore()
    for version in range(1, 30):
        assert AdapterStore(store).add(AdapterRegistry(version=version))
    assert len(store.values) <= 3
    assert AdapterStore(store).version() == 29


@pytest.mark.parametrize("unload", [False, True])
async def test_an_ingress_says_what_the_controller_says(unload: bool) -> None:  # noqa: FBT001
    asked: list[tuple[object, ...]] = []
    said: list[CallResults] = [
        CallResults(values=(None,)),
        CallResults(values=({"status": 403, "reason": "no"},)),
        CallResults(failures=("controller: gone",)),
    ]

    async def call(
        deployment: str, method: str, *arguments: object, timeout_s: float
    ) -> CallResults:
        asked.append((deployment, method, *arguments))
        return said.pop(0)

    administer = make_administer(call)
    wanted = AdapterRequest(name="sql", path=None if unload else "/a/sql", tenant="ops")
    assert await administer(wanted) is None
    assert await administer(wanted) == Problem(status=403, message="no")
    silent = await administer(wanted)
    assert silent is not None
    assert (silent.status, "controller: gone" in silent.message) == (503, True)
    method = "unload_adapter" if unload else "load_adapter"
    assert asked[0][:2] == ("controller", method)


async def test_a_restarted_deployment_continues_with_adapters_that_do_not_drain(
    world: World,
) -> None:
    await world.desk.load(order())
    await world.desk.load(order("chat"))
    await world.desk.unload("sql", "ops")
    carried = active_adapters(AdapterStore(world.store))
    assert [adapter.name for adapter in carried.adapters] == ["chat"]
    store = AdapterStore(HeadStore())
    assert store.add(carried)
    assert store.newest() == carried
