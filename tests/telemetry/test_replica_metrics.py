"""What a replica is to Prometheus."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.fleet import AdapterStatus, LinkTotals, Load, StepTotals, TransferTotals
from baton.runtime.replica_host import ReplicaHost
from baton.telemetry import catalogue as c
from baton.telemetry.metrics.replica import replica_families
from tests.fakes.link_rig import ANY_PORT, joined_client, running_host
from tests.fakes.scripted_engine import ScriptedEngine, make_facts

LOAD = Load(
    queued_requests=1,
    running_requests=2,
    pulling_requests=3,
    queued_tokens=40,
    kv_used_fraction=0.25,
    step_s=0.01,
    transfers=TransferTotals(failures=5, expired_leases=6),
    adapters=AdapterStatus(("ada", "bob"), hits=7, loads=3, loading_s=1.25),
    steps=StepTotals(
        steps=10, busy_s=1.5, prefill_tokens=700, decode_tokens=80, prefill_steps=4, decode_steps=9
    ),
)
LINK = LinkTotals("p-1", pulls=3, moved_bytes=4096, busy_s=0.5, failures=2, transport="tcp")


class Engine(ScriptedEngine):
    """Has a load and links."""

    pulled: tuple[LinkTotals, ...] = (LINK,)

    def load(self) -> Load:
        return LOAD

    def links(self) -> tuple[LinkTotals, ...]:
        return self.pulled


def told(host: ReplicaHost) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in replica_families(host)
        for sample in family.samples
    }


async def test_every_metric_of_replicas_is_told() -> None:
    async with running_host(Engine()) as (host, _):
        names = {name for name, *_ in told(host)}
    assert names == {
        name
        for metric in c.CATALOGUE
        if metric.component is c.Component.REPLICA
        for name in metric.names
    }


async def test_load_and_steps_are_told_as_the_engine_says() -> None:
    async with running_host(Engine()) as (host, _):
        found = told(host)
    states = {key[1]: value for key, value in found.items() if key[0] == c.ENGINE_REQUESTS.name}
    assert states == {"queued": 1, "running": 2, "pulling": 3}
    assert found[(c.QUEUED_TOKENS.name,)] == 40
    assert found[(c.KV_USED.name,)] == 0.25
    assert found[(c.ENGINE_BUSY.name,)] == 1.5
    assert (found[c.STEPS.name, "prefill"], found[c.STEPS.name, "decode"]) == (4, 9)
    assert (found[c.COMPUTED_TOKENS.name, "prefill"], found[c.COMPUTED_TOKENS.name, "decode"]) == (
        700,
        80,
    )
    assert found[(c.EXPIRED_LEASES.name,)] == 6


async def test_adapters_are_told_as_the_engine_says() -> None:
    async with running_host(Engine()) as (host, _):
        found = told(host)
    assert found[(c.ADAPTERS.name,)] == 2
    assert (found[(c.ADAPTER_HITS.name,)], found[(c.ADAPTER_LOADS.name,)]) == (7, 3)
    assert found[(c.ADAPTER_TIME.name,)] == 1.25


async def test_pulls_are_counted_by_source_and_failures_without_one_as_other() -> None:
    async with running_host(Engine()) as (host, _):
        found = told(host)
    assert found[c.PULLS.name, "p-1", "tcp"] == 3
    assert found[c.PULLED_BYTES.name, "p-1", "tcp"] == 4096
    assert found[c.PULL_TIME.name, "p-1", "tcp"] == 0.5
    assert found[c.PULL_FAILURES.name, "p-1"] == 2
    assert found[c.PULL_FAILURES.name, "other"] == 3


async def test_of_too_many_sources_those_are_told_that_were_pulled_from_last() -> None:
    engine = Engine()
    engine.pulled = tuple(from_source(f"p-{n}") for n in range(c.MAX_LABEL_VALUES + 10))
    async with running_host(engine) as (host, _):
        pulls = [key[1] for key in told(host) if key[0] == c.PULLS.name]
    assert len(pulls) == c.MAX_LABEL_VALUES - 1
    assert pulls[-1] == f"p-{c.MAX_LABEL_VALUES + 9}"
    assert "p-0" not in pulls
    assert "other" not in pulls, "it would go down when a source makes room for another"


def from_source(source_id: str) -> LinkTotals:
    return LINK._replace(source_id=source_id, failures=0)


async def test_coordinators_and_frames_are_counted() -> None:
    async with running_host(Engine()) as (host, _), joined_client(host):
        found = told(host)
    assert found[(c.COORDINATORS.name,)] == 1
    assert found[c.LINK_FRAMES.name, "received"] >= 1
    assert found[c.LINK_FRAMES.name, "sent"] >= 1
    assert found[c.LINK_FRAMES.name, "bad"] == 0


async def test_a_replica_is_told_with_the_role_that_it_plays() -> None:
    facts = replace(make_facts(), side_channel="127.0.0.1:1")
    async with running_host(Engine(facts)) as (host, engine):
        host.set_role(type(facts.role)("prefill"))
        infos = [key[1:] for key in told(host) if key[0] == c.REPLICA_INFO.name]
    said = engine.facts
    assert infos == [("prefill", said.model, said.engine, said.engine_version)]


async def test_nothing_is_told_before_the_engine_has_started() -> None:
    host = ReplicaHost(ScriptedEngine(), bind=ANY_PORT)
    assert told(host) == {}
