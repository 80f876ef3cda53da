"""What a replica is started with, from the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.config import probe_options
from baton.config.derive.options import sim_settings
from baton.config.schema.deployment import Resources
from baton.domain.errors import RoleUnsupported
from baton.domain.fleet import ReplicaFacts, Role
from baton.runtime.replica_host import HostOptions, ReplicaHost
from baton.runtime.side_channel_checks import GRACE_S
from baton.serving.http.metrics_endpoint import MetricsEndpoint
from baton.serving.replica.deployment import EngineReplica, host_options, metrics_endpoint
from baton.serving.replica.engines import ReplicaSite, vllm_settings
from tests.fakes.link_rig import running_host
from tests.fakes.scripted_engine import ScriptedEngine, make_facts
from tests.serving.configs import simulated


def test_a_replica_checks_and_keeps_blocks_as_the_configuration_says() -> None:
    told = ("lease=40s", "probe.deadline=5s")
    options = host_options(simulated(*(f"transfer.{name}" for name in told)), "decode")
    assert options == HostOptions(lease_s=40.0, check_timeout_s=5.0)


@pytest.mark.parametrize(("said", "limit"), [("3", 3), ("null", None)])
def test_an_engine_pulls_as_many_at_a_time_as_the_configuration_says(
    said: str, limit: int | None
) -> None:
    told = simulated(f"transfer.max_concurrent_pulls={said}", "transfer.deadline=4s")
    pool = told.pools["decode"]
    engine = sim_settings(pool.engine, told.models[pool.model], told.transfer)
    assert (engine.max_pulls, engine.side_channel_deadline_s) == (limit, 4.0)
    site = ReplicaSite(
        replica_id="d0", pool="decode", host="127.0.0.1", reserve_ports=lambda *_: 20000
    )
    nixl = vllm_settings(told, site).nixl
    assert nixl is not None
    assert (nixl.max_pulls, nixl.pull_deadline_s) == (limit, 4.0)


@pytest.mark.parametrize(("gpus", "devices"), [(0, 1.0), (1, 1.0), (8, 8.0)])
def test_a_replica_says_how_many_gpus_it_takes(gpus: int, devices: float) -> None:
    said = simulated()
    pool = replace(said.pools["decode"], resources=Resources(gpus=gpus))
    said = replace(said, pools={**said.pools, "decode": pool})
    assert host_options(said, "decode").devices == devices
    assert host_options(said, "prefill").devices == 1.0


@pytest.mark.parametrize("deadline", ["10ms", "2s", "60s"])
def test_a_coordinator_waits_until_a_replica_must_have_answered_a_check(deadline: str) -> None:
    said = simulated(f"transfer.probe.deadline={deadline}")
    probing = probe_options(said)
    assert (
        probing.deadline_s + probing.answer_s
        > host_options(said, "decode").check_timeout_s + GRACE_S
    )


# ------------------------------------------------------------------ metrics


async def test_a_replicas_metrics_and_its_engines_own_are_for_whoever_has_the_token(
    tmp_path: Path,
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("a-token-that-nobody-guesses")
    token_file.chmod(0o600)
    series = CollectorRegistry()
    Counter("vllm:swaps", "Of an engine.", registry=series).inc(5)
    said = simulated(f"observability.token_file={token_file}")
    async with running_host() as (host, engine), httpx.AsyncClient() as http:
        endpoint = metrics_endpoint(said, host, address="127.0.0.1", series=series)
        assert endpoint is not None
        await endpoint.start()
        try:
            body = Body(host, engine.facts, endpoint)
            metadata = body.record_replica_metadata()  # type: ignore[misc]
            url = f"http://{metadata['metrics']}/metrics"
            assert (await http.get(url)).status_code == 401
            assert (await http.get(url, headers={"host": "evil.example"})).status_code == 403
            answer = await http.get(url, auth=("prometheus", token_file.read_text()))
        finally:
            await endpoint.close()
    assert "baton_live_legs 0.0" in answer.text
    assert "vllm:swaps_total 5.0" in answer.text


async def test_a_replica_of_which_no_metrics_are_wanted_has_none() -> None:
    said = simulated("observability.metrics.enabled=false")
    async with running_host() as (host, engine):
        series = CollectorRegistry()
        assert metrics_endpoint(said, host, address="127.0.0.1", series=series) is None
        metadata = Body(host, engine.facts).record_replica_metadata()  # type: ignore[misc]
        assert metadata["metrics"] is None


# ------------------------------------------------------------------ roles


class Body:
    """What Serve makes of `EngineReplica`, without Serve: a running host, and its calls."""

    set_role = EngineReplica.set_role
    set_role_if_listed = EngineReplica.set_role_if_listed
    status = EngineReplica.status
    record_replica_metadata = EngineReplica.record_replica_metadata
    _require_host = EngineReplica._require_host

    def __init__(
        self, host: ReplicaHost, facts: ReplicaFacts, metrics: MetricsEndpoint | None = None
    ) -> None:
        self._host, self._facts, self._pool = host, facts, facts.pool
        self._metrics = metrics


async def test_a_replica_says_what_it_is_meant_for_now_and_what_its_pool_is_for() -> None:
    facts = replace(make_facts(), side_channel="127.0.0.1:1")
    async with running_host(ScriptedEngine(facts)) as (host, _):
        body = Body(host, facts)
        said = await body.set_role("prefill")  # type: ignore[misc]
        assert (said["role"], said["pool_role"], said["changed"]) == ("prefill", "decode", True)
        status = await body.status()  # type: ignore[misc]
        assert status["pool_role"] == "decode"
        assert status["facts"]["role"] is Role.PREFILL  # type: ignore[index]
        assert body.record_replica_metadata()["role"] == "decode"  # type: ignore[misc]
        again = await body.set_role("prefill")  # type: ignore[misc]
        assert (again["changed"], again["pid"]) == (False, said["pid"])


async def test_only_replicas_that_are_named_play_another_role() -> None:
    facts = replace(make_facts("r1"), side_channel="127.0.0.1:1")
    async with running_host(ScriptedEngine(facts)) as (host, _):
        body = Body(host, facts)
        assert await body.set_role_if_listed(("r0", "r2"), "prefill") is None  # type: ignore[misc]
        said = await body.set_role_if_listed(("r0", "r1"), "mixed")  # type: ignore[misc]
        assert said is not None
        assert said["role"] == "mixed"


async def test_a_role_that_cannot_be_played_changes_nothing() -> None:
    async with running_host() as (host, engine):
        body = Body(host, engine.facts)
        for role in ("prefill", "chef"):
            with pytest.raises(RoleUnsupported, match="decode-1 cannot become"):
                await body.set_role(role)  # type: ignore[misc]
        assert (await body.status())["facts"]["role"] is Role.DECODE  # type: ignore[index,misc]
