"""What is announced of a change of any key is what happens to the processes of a deployment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.config import DeploymentConfig
from baton.config.diff import ProcessKind, Reload, diff, process_inputs, reload_class
from baton.config.language.tree import Path as Key
from baton.config.language.tree import format_path
from baton.config.load import load_text
from baton.config.schema.deployment import ApiServerKind, EngineKind
from baton.domain.errors import ApplyRejected
from baton.engine.vllm.frontend.app import VllmFrontend
from baton.engine.vllm.frontend.rust_arguments import build_rust_arguments
from baton.engine.vllm.frontend.rust_frontend import RustFrontend
from baton.runtime.link.options import LinkOptions
from baton.serving.application.app import controller_options, ingress_options, pool_options
from baton.serving.controller.deployment import ControllerService, controller_http
from baton.serving.ingress import deployment as ingress
from baton.serving.ingress.deployment import Ingress, MultiModelIngress
from baton.serving.ingress.model_ingress import ModelIngress
from baton.serving.ingress.rust_ingress import gate_settings, open_routes
from baton.serving.ray import context as ray_context
from baton.serving.replica import deployment as replica
from baton.serving.replica import hub_environment
from baton.serving.replica.deployment import EngineReplica, host_options
from baton.serving.replica.engines import ReplicaSite, vllm_settings
from baton.serving.shared.names import INGRESS
from baton.serving.store.config_participant import ConfigParticipant
from baton.serving.store.config_store import LiveConfig
from tests.config.every_key import (
    FULL_CONFIG,
    ONE_VALUE,
    RUST_CONFIG,
    SIMULATED_CONFIG,
    KeyChange,
    all_changes,
    apply_compatible,
    schema_keys,
    wildcard_path,
)
from tests.config.read_recorder import record_reads
from tests.config.state import state
from tests.serving.test_apply import Fleet

BASES = {
    "real engines": FULL_CONFIG,
    "simulated engines": SIMULATED_CONFIG,
    "the Rust frontend": RUST_CONFIG,
}


@pytest.fixture(autouse=True)
def named_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the configurations name; logs stay where they are."""
    monkeypatch.chdir(tmp_path)
    for module in (ingress, replica):
        monkeypatch.setattr(module, "configure_logs", lambda _format, _level: None)
    for name in ("t.keys", "other.keys"):
        Path(name).touch(mode=0o600)
    for name in ("token", "other"):
        Path(name).write_text("a-token-that-nobody-guesses")
        Path(name).chmod(0o600)


def test_every_key_that_can_have_another_value_is_tried() -> None:
    tried = {wildcard_path(change.path) for change in all_changes()}
    assert schema_keys() - tried == ONE_VALUE


# ------------------------------------------------------------------ who is replaced


def replaced(change: KeyChange) -> set[str] | None:
    """The deployments that are built anew; None: the change is refused while anything runs."""
    pools = {name: pool.replicas.initial for name, pool in change.old.pools.items()}
    try:
        return set(Fleet(change.old, pools=pools).apply(change.new).replaced)
    except ApplyRejected:
        return None


@pytest.mark.parametrize("change", all_changes(), ids=str)
def test_the_announced_effect_of_a_change_is_its_real_one(change: KeyChange) -> None:
    announced = {other.reload for other in diff(change.old, change.new)}
    if Reload.RESTART in announced:
        assert replaced(change) is None
    elif Reload.ROLLING in announced:
        assert replaced(change) == to_be_replaced(change)
    else:
        assert replaced(change) == set()


def to_be_replaced(change: KeyChange) -> set[str]:
    """As the guide has it (docs/operations/configuration.md)."""
    match change.path:
        case ("pools", pool, *_):
            return {pool}
        case ("models", model, "revision"):
            return {INGRESS} | {n for n, other in change.old.pools.items() if other.model == model}
        case ("admission", "max_body"):
            return {INGRESS}
        case _:
            raise AssertionError(f"who is replaced for {change}?")


# ------------------------------------------------------------------ who reads what, and when


@dataclass(frozen=True)
class Read:
    """What one kind of process reads of a configuration."""

    at_start: frozenset[Key]
    while_it_runs: frozenset[Key]
    """By which it goes on when another configuration is taken."""

    @property
    def kept(self) -> frozenset[Key]:
        """What it is stuck with until it is replaced."""
        return self.at_start - self.while_it_runs


@asynccontextmanager
async def an_ingress(config: DeploymentConfig) -> AsyncIterator[MultiModelIngress]:
    """As Serve starts it, but for vLLM's server and the members of a fleet."""

    def make(model: str, part: DeploymentConfig) -> ModelIngress:
        return ModelIngress(part, app="app", coordinator_id=f"c/{model}", link=LinkOptions())

    bodies = MultiModelIngress(config, make)
    rust = config.server.api_server is ApiServerKind.RUST
    for body in bodies.model_ingresses:
        await body.telemetry.start("127.0.0.1")
        await body._auth.start()
        settings, facts, hooks = body._frontend_settings(), await body._fleet_facts(), body._hooks()
        if rust:
            settings = dataclasses.replace(settings, routes=open_routes(config))
            build_rust_arguments(settings, max_len_tokens=512)
            gate = gate_settings(config, bind="fd@0", frontend_socket=Path("folder/http"))
            vars(body)["gate"] = gate  # which is started by them and keeps them
        kind = RustFrontend if rust else VllmFrontend
        body._frontend = kind(settings, facts, hooks=hooks, clock=body._clock)
    try:
        yield bodies
    finally:
        for body in bodies.model_ingresses:
            body._driver.close()
            await body._auth.close()
            await body._link.close()
            await body.telemetry.close()


class FirstHalf(Ingress):
    """What Serve makes before it asks for the app: it has nothing to end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def read_by_ingress(config: DeploymentConfig) -> Read:
    before, at_start = record_reads(config)
    after, while_it_runs = record_reads(config)
    FirstHalf(before)
    ingress_options(before)
    async with an_ingress(before) as bodies:
        await bodies.prepare_switch(after)()
    return Read(frozenset(at_start), frozenset(while_it_runs))


async def read_by_controller(config: DeploymentConfig) -> Read:
    before, at_start = record_reads(config)
    after, while_it_runs = record_reads(config)
    controller_options(before)
    body = ControllerService(before, app="app", name="controller")
    holder = ConfigParticipant(LiveConfig(generation=0, config=before), body.prepare_switch)
    controller_http(body, holder, app="app", node="127.0.0.1").app()
    assert before.observability.logs.format  # as its constructor does
    assert before.observability.logs.level
    await body.prepare_switch(after)()
    body.usage()
    return Read(frozenset(at_start), frozenset(while_it_runs))


async def read_by_replica(config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch) -> Read:
    before, reads = record_reads(config)
    pool_options(before, "d")
    if config.pools["d"].engine.kind is EngineKind.SIM:
        await start_and_stop(before, monkeypatch)
    else:  # all but the start of a real engine
        host_options(before, "d")
        assert before.cluster.model_cache.path is None  # where its model is kept
        site = ReplicaSite(
            replica_id="r", pool="d", host="127.0.0.1", reserve_ports=lambda _host, base, _n: base
        )
        vllm_settings(before, site)
    return Read(frozenset(reads), frozenset())


class Replica(EngineReplica):
    """Ends when it is told to, and not when it is collected."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def start_and_stop(config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica as Serve has it, but for what it asks Ray."""
    monkeypatch.setattr(ray_context, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_context, "node_addresses", lambda: ("127.0.0.1",))
    monkeypatch.setattr(hub_environment, "load_variables", dict)
    monkeypatch.setattr(ray_context, "replica_name", lambda: "one")
    monkeypatch.setattr(ray_context, "get_gcs_address", lambda: "127.0.0.1:6379")
    monkeypatch.setattr(hub_environment, "apply_stored", str)
    monkeypatch.setattr(replica, "bind_grpc_to_node", lambda _host: None)
    monkeypatch.setattr(replica, "link_options", LinkOptions)
    body = object.__new__(Replica)
    await body.__init__(config, "d")  # type: ignore[misc]
    await body.check_health()
    await EngineReplica.__del__(body)


async def read_by(
    part: ProcessKind, config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> Read:
    match part:
        case ProcessKind.REPLICA:
            return await read_by_replica(config, monkeypatch)
        case ProcessKind.INGRESS:
            return await read_by_ingress(config)
        case ProcessKind.CONTROLLER:
            return await read_by_controller(config)


def kept_by(part: ProcessKind, config: DeploymentConfig) -> set[str]:
    """What it is built from, by the table."""
    return set(process_inputs(config, part, pool="d" if part is ProcessKind.REPLICA else None))


@pytest.mark.parametrize("part", list(ProcessKind))
@pytest.mark.parametrize("base", BASES)
async def test_a_process_is_built_from_the_keys_it_keeps_from_its_start(
    part: ProcessKind, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would go on by the old value, and nobody would replace it."""
    config = load_text(json.dumps(BASES[base]))
    read = await read_by(part, config, monkeypatch)
    told_to_serve = {item for item in read.kept if reload_class(item) is Reload.POOL_SIZE}
    kept = {format_path(item) for item in read.kept - told_to_serve}
    assert kept - kept_by(part, config) == set()


@pytest.mark.parametrize("part", list(ProcessKind))
async def test_no_process_is_replaced_for_a_key_that_it_does_not_read(
    part: ProcessKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolling: set[str] = set()
    read: set[str] = set()
    for base in BASES.values():
        config = load_text(json.dumps(base))
        mine = kept_by(part, config)
        rolling |= {
            str(c) for c in all_changes() if c.old == config and str(c) in mine and rolls(c)
        }
        found = await read_by(part, config, monkeypatch)
        read |= {format_path(item) for item in found.at_start}
    assert rolling - read == set()


def rolls(change: KeyChange) -> bool:
    return reload_class(change.path, change.old) is Reload.ROLLING


async def test_a_live_key_is_read_by_the_processes_told_of_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_text(json.dumps(FULL_CONFIG))
    read: set[Key] = set()
    for part in (ProcessKind.INGRESS, ProcessKind.CONTROLLER):
        read |= (await read_by(part, config, monkeypatch)).while_it_runs
    live = {c.path for c in all_changes() if c.old == config and takes(c) is Reload.LIVE}
    of_models = {path for path in live if path[0] == "models"}
    assert {path[2] for path in of_models} == {"engine"}  # what pools take of it is theirs
    assert {format_path(path) for path in live - of_models - read} == set()


def takes(change: KeyChange) -> Reload:
    return reload_class(change.path, change.old)


# ------------------------------------------------------------------ what is taken


BY_BASE = {
    name: [c for c in all_changes() if c.old == load_text(json.dumps(base))]
    for name, base in BASES.items()
}


async def ingress_state(
    config: DeploymentConfig, then: DeploymentConfig | None = None
) -> dict[str, object]:
    """Of one that was started with a configuration, and told of another."""
    async with an_ingress(config) as bodies:
        if then is not None:
            await bodies.prepare_switch(then)()
        return undrawn(bodies)


async def controller_state(
    config: DeploymentConfig, then: DeploymentConfig | None = None
) -> dict[str, object]:
    body = ControllerService(config, app="app", name="controller")
    if then is not None:
        await body.prepare_switch(then)()
    return undrawn(body)


def undrawn(body: object) -> dict[str, object]:
    """What it holds but for what it draws: seeds are for placement, which is built anew."""
    return {at: value for at, value in state(body).items() if not isinstance(value, tuple)}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("of", [ingress_state, controller_state])
async def test_live_changes_leave_a_process_as_if_started_with_them(
    base: str, of: Callable[..., Awaitable[dict[str, object]]]
) -> None:
    live = [c for c in BY_BASE[base] if takes(c) in {Reload.LIVE, Reload.POOL_SIZE}]
    new, made = apply_compatible(live)
    assert len(made) > 0.9 * len(live)
    before, again = await of(live[0].old), await of(live[0].old)
    started, told = await of(new), await of(live[0].old, new)
    either = before.keys() | again.keys() | started.keys()
    changed = {at for at in either if before.get(at) != started.get(at)}
    by_itself = {at for at in either if before.get(at) != again.get(at)}
    differ = {at for at in changed - by_itself if told.get(at) != started.get(at)}
    assert changed - by_itself
    assert {at: (told.get(at), started.get(at)) for at in differ} == {}
