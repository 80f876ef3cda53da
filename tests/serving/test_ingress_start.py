"""In what order an ingress comes up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.config import load_config
from baton.domain.demand import ColdStart
from baton.domain.events import ReplicaJoined
from baton.domain.fleet import Role
from baton.runtime.link.options import LinkOptions
from baton.serving.ingress import deployment as ingress
from baton.serving.ingress import model_ingress as ingress_body
from baton.serving.ingress.deployment import Ingress, waited_s
from baton.serving.ingress.model_ingress import FleetReadiness, ModelIngress
from baton.serving.ray import context as ray_context
from tests.fakes.facts import replica_facts
from tests.fakes.scaled_deadline import ScaledDeadline
from tests.serving.configs import example, simulated


class Stopped(Exception):
    """The replicas were asked for."""


@pytest.mark.parametrize("frontend", ["python", "rust"])
async def test_imports_are_over_before_replicas_wait_for_beats(
    frontend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep the loop waiting for seconds, and a replica leaves an ingress that is silent."""
    sets = [f"server.api_server={frontend}", "observability.metrics.enabled=false"]
    config = simulated(*sets)
    body = ModelIngress(config, app="app", coordinator_id="c", link=LinkOptions())
    done: list[str] = []

    async def ask_for_replicas() -> None:
        raise Stopped

    monkeypatch.setattr(
        ingress_body, f"preload_{frontend}_frontend", lambda: done.append("imported")
    )
    monkeypatch.setattr(body._membership, "start", ask_for_replicas)
    try:
        with pytest.raises(Stopped):
            await body.start("127.0.0.1")
    finally:
        await body.close()
    assert done == ["imported"]


class Kept:
    """A store that outlives ingresses."""

    def __init__(self, **kept: bytes) -> None:
        self.kept = dict(kept)

    def load(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def save(self, name: str, data: bytes) -> None:
        self.kept[name] = data


def a_body(*sets: str) -> ModelIngress:
    """Of a model whose context's length only its replicas know."""
    settings = ["observability.metrics.enabled=false", "model.max_len=null", *sets]
    config = example("quickstart.yaml", *settings)
    return ModelIngress(config, app="app", coordinator_id="c", link=LinkOptions())


TO_ZERO = (
    "pools.prefill.replicas={min: 0, initial: 1}",
    "pools.decode.replicas={min: 0, initial: 1}",
    "autoscaler.scale_to_zero=true",
)


async def test_an_ingress_begins_again_while_the_fleet_is_at_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No replica is there to say how long the context is, and none will be: nobody can ask."""
    store = Kept()
    monkeypatch.setattr(ingress_body, "live_config", store)
    first, again = a_body(*TO_ZERO), a_body(*TO_ZERO)
    try:
        first._on_link_event(ReplicaJoined(facts=replica_facts("m0", Role.MIXED)))
        facts = await first._fleet_facts()
        assert (await again._fleet_facts()).max_len_tokens == facts.max_len_tokens
    finally:
        await first.close()
        await again.close()


async def test_an_ingress_of_a_fleet_that_is_never_at_zero_waits_for_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingress_body, "live_config", Kept(**{"context/app/tiny": b"77"}))
    body = a_body()
    try:
        body._on_link_event(ReplicaJoined(facts=replica_facts("m0", Role.MIXED)))
        assert (await body._fleet_facts()).max_len_tokens != 77
    finally:
        await body.close()


async def test_an_ingress_is_healthy_while_its_fleet_is_at_zero() -> None:
    body = a_body(*TO_ZERO)
    try:
        assert not body._can_serve(), "it has not heard yet whether one starts for the first time"
        body.record_cold_start(ColdStart(duration_s=20.0, is_measured=True))
        assert body._can_serve()
        body.record_cold_start(ColdStart(can_start=False))
        assert not body._can_serve()
    finally:
        await body.close()


# -------------------------------------------------------------------- waits


BUSY = "import os; os.sched_setaffinity(0, {int(__import__('sys').argv[1])})\nwhile True: pass"
BETWEEN_S = 0.2
LONG_S = 1e6
"""Longer than any test has used a processor."""
SIM = Path(__file__).parents[2] / "configs" / "sim.yaml"


@pytest.fixture
def crowded() -> Iterator[None]:
    """This thread has one core, and another process wants all of it."""
    thread, before = threading.get_native_id(), os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(thread, {core})
    busy = subprocess.Popen([sys.executable, "-c", BUSY, str(core)])
    try:
        yield
    finally:
        busy.kill()
        busy.wait(timeout=30)
        os.sched_setaffinity(thread, before)


@pytest.mark.usefixtures("crowded")
def test_time_for_which_others_had_its_core_is_counted() -> None:
    thread = threading.get_native_id()
    before_s = waited_s(thread)
    deadline = ScaledDeadline(60)
    while waited_s(thread) - before_s < BETWEEN_S:
        assert not deadline.is_expired(), "it shares its core and has never waited"


def test_a_thread_of_which_nothing_is_known_has_not_waited() -> None:
    assert waited_s(0) == 0.0


@pytest.mark.parametrize("frontend", ["python", "rust"])
async def test_a_blocked_event_loop_makes_an_ingress_busy(
    frontend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_context, "replica_name", lambda: "ingress-1")
    monkeypatch.setattr(ingress, "waited_s", lambda _thread_id: LONG_S)
    config = load_config([SIM], env={}, sets=[f"server.api_server={frontend}"]).config
    started = cast("Any", SimpleNamespace(_require_models=lambda: None, _config=config))
    name, needed_s, _, cores = await Ingress.resource_usage(started)
    assert name == "ingress-1"
    assert (needed_s >= LONG_S) is (frontend == "python")
    assert cores >= 1


# -------------------------------------------------------------------- readiness


def test_an_ingress_is_not_ready_before_it_knows_a_replica_of_each_pool() -> None:
    view = FleetReadiness(["prefill", "decode"], wait_s=10.0)
    assert not view.is_ready([], 0.0)
    assert not view.is_ready(["decode"], 1.0)
    assert view.is_ready(["decode", "decode", "prefill"], 2.0)


def test_an_ingress_stays_ready_when_a_pool_goes_missing() -> None:
    view = FleetReadiness(["prefill", "decode"], wait_s=10.0)
    assert view.is_ready(["decode", "prefill"], 0.0)
    assert view.is_ready(["decode"], 1.0)
    assert view.is_ready([], 2.0)  # whether anybody can serve is asked elsewhere


def test_a_pool_that_stays_missing_holds_an_ingress_back_for_a_while_only() -> None:
    view = FleetReadiness(["prefill", "decode"], wait_s=10.0)
    assert not view.is_ready([], 100.0)  # nobody could serve: that time does not count
    assert not view.is_ready(["decode"], 200.0)
    assert not view.is_ready(["decode"], 209.9)
    assert view.is_ready(["decode"], 210.0)
