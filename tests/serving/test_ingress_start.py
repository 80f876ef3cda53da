"""In what order an ingress comes up."""

from __future__ import annotations

import pytest

from baton.domain.demand import ColdStart
from baton.domain.events import ReplicaJoined
from baton.domain.fleet import Role
from baton.runtime.link.options import LinkOptions
from baton.serving.ingress import model_ingress as ingress_body
from baton.serving.ingress.model_ingress import ModelIngress
from tests.fakes.facts import replica_facts
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


async def test_an_ingress_is_healthy_while_its_fleet_rests_at_zero() -> None:
    body = a_body(*TO_ZERO)
    try:
        assert not body._can_serve(), "it has not heard yet whether one starts for the first time"
        body.record_cold_start(ColdStart(duration_s=20.0, is_measured=True))
        assert body._can_serve()
        body.record_cold_start(ColdStart(can_start=False))
        assert not body._can_serve()
    finally:
        await body.close()
