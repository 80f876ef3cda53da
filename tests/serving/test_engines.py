"""From a configuration to the settings of one engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.config import probe_options
from baton.config.derive.options import sim_settings
from baton.config.schema.deployment import Resources
from baton.domain.demand import CoordinatorReport, Tally
from baton.domain.errors import RoleUnsupported
from baton.domain.fleet import ReplicaFacts, Role
from baton.engine.sim import SimEngine
from baton.engine.vllm.core.settings import engine_arguments
from baton.runtime.replica_host import HostOptions, ReplicaHost
from baton.runtime.side_channel_checks import GRACE_S
from baton.serving.http.metrics_endpoint import MetricsEndpoint
from baton.serving.ray.packing import pack, pack_reports, unpack, unpack_reports
from baton.serving.replica import hub_environment
from baton.serving.replica.deployment import EngineReplica, host_options, metrics_endpoint
from baton.serving.replica.engines import (
    ReplicaSite,
    build_engine,
    engine_environment,
    vllm_settings,
)
from baton.serving.replica.hub_environment import apply_variables, select_variables
from tests.fakes.link_rig import running_host
from tests.fakes.scripted_engine import ScriptedEngine, make_facts
from tests.serving.configs import example, simulated


def site(pool: str) -> ReplicaSite:
    return ReplicaSite(
        replica_id=f"{pool}-1",
        pool=pool,
        host="10.1.2.3",
        reserve_ports=lambda _host, base, count: base + count,
        gcs_address="10.1.2.1:6379",
    )


def test_a_simulated_pool_gets_simulated_engines() -> None:
    assert isinstance(build_engine(example("sim.yaml"), site("decode")), SimEngine)


def test_an_engine_is_told_its_model_role_and_side_channel() -> None:
    asked = example("gpu-example.yaml", "models.llama-8b.source=/models/llama")
    settings = vllm_settings(asked, site("prefill"))
    assert (settings.model_source, settings.model_name) == ("/models/llama", "llama-8b")
    assert settings.role is Role.PREFILL
    assert settings.nixl is not None
    assert (settings.nixl.host, settings.nixl.port) == ("10.1.2.3", 20_001)
    assert settings.max_batched_tokens == 8192


def test_an_engine_on_an_ipv6_network_meets_others_at_an_address_in_brackets() -> None:
    asked = example("gpu-example.yaml", "models.llama-8b.source=/models/llama")
    nixl = vllm_settings(asked, replace(site("prefill"), host="fd00::1")).nixl
    assert nixl is not None
    assert nixl.address == "[fd00::1]:20001"


def test_an_engine_on_a_gpu_is_told_how_much_of_the_hosts_memory_is_its_own() -> None:
    offloading = "pools.decode.engine.offload.host_memory=8GiB"
    asked = example("gpu-example.yaml", "models.llama-8b.source=/models/llama", offloading)
    assert vllm_settings(asked, site("decode")).host_memory_bytes == 8 * 1024**3
    assert vllm_settings(asked, site("prefill")).host_memory_bytes is None


def test_an_engine_reads_the_model_as_its_api_server_is_told_and_in_the_time_that_is_said() -> None:
    asked = example(
        "gpu-example.yaml",
        "models.llama-8b.source=hf://meta-llama/Llama-3.1-8B",
        "models.llama-8b.api.trust_remote_code=true",
        "models.llama-8b.engine.start_deadline=20m",
    )
    settings = vllm_settings(asked, site("prefill"))
    assert settings.model_source == "meta-llama/Llama-3.1-8B"
    assert settings.extra["trust_remote_code"] is True
    assert settings.start_deadline_s == 1200.0


def test_engines_that_share_a_gpu_take_no_more_of_its_memory_than_their_part() -> None:
    asked = example("one-gpu.yaml", "pools.decode.engine.gpu_memory_utilization=0.5")
    prefill, decode = (vllm_settings(asked, site(pool)) for pool in ("prefill", "decode"))
    assert (prefill.gpu_memory_utilization, decode.gpu_memory_utilization) == (0.45, 0.5)
    assert prefill.shares_gpu
    alone = example("gpu-example.yaml", "models.llama-8b.source=/models/llama")
    assert not vllm_settings(alone, site("decode")).shares_gpu


def test_an_engine_is_told_of_adapters_and_of_the_room_for_them_where_there_are_any() -> None:
    model = "models.llama-8b.source=/models/llama"
    adapter = "models.llama-8b.adapters={sql: {source: /adapters/sql}}"
    asked = example("gpu-example.yaml", model, adapter, "pools.decode.engine.adapters.max_loaded=9")
    arguments = engine_arguments(vllm_settings(asked, site("decode")), None)
    assert arguments["enable_lora"]
    assert (arguments["max_loras"], arguments["max_cpu_loras"]) == (4, 9)
    assert dict(vllm_settings(asked, site("decode")).adapters) == {"sql": "/adapters/sql"}
    without = engine_arguments(
        vllm_settings(example("gpu-example.yaml", model), site("decode")), None
    )
    assert "enable_lora" not in without


def test_an_engine_says_what_it_caches_only_where_the_index_wants_to_know() -> None:
    model = "models.llama-8b.source=/models/llama"
    asked = example("gpu-example.yaml", model)
    assert vllm_settings(asked, site("decode")).kv_events
    blind = example("gpu-example.yaml", model, "router.index=predicted")
    assert not vllm_settings(blind, site("decode")).kv_events


def test_only_engines_on_a_cpu_poll_for_transfers_with_pauses() -> None:
    asked = example("gpu-example.yaml", "models.llama-8b.source=/models/llama")
    on_gpu = vllm_settings(asked, site("prefill")).nixl
    without = ("pools.prefill.resources.gpus=0", "pools.prefill.resources.accelerator=null")
    on_cpu = vllm_settings(example("gpu-example.yaml", *without), site("prefill")).nixl
    assert on_gpu is not None
    assert on_gpu.progress_delay_us is None
    assert on_cpu is not None
    assert on_cpu.progress_delay_us


def test_the_workers_of_a_split_engine_live_in_its_placement_group() -> None:
    split = example(
        "gpu-example.yaml",
        "pools.decode.parallel.tp=2",
        "pools.decode.resources.gpus=2",
        "models.llama-8b.source=/models/llama",
    )
    settings = vllm_settings(split, site("decode"))
    assert settings.tensor_parallel == 2
    assert settings.extra["distributed_executor_backend"] == "ray"


def test_the_workers_of_a_split_engine_on_cpus_are_processes_of_its_own_and_share_its_cores() -> (
    None
):
    split = example(
        "quickstart.yaml", "pools.decode.parallel.tp=2", "pools.decode.resources.cpus=8"
    )
    settings = vllm_settings(split, site("decode"))
    assert settings.extra["distributed_executor_backend"] == "mp"
    assert settings.env["OMP_NUM_THREADS"] == "4"


def test_engines_on_a_cpu_share_its_cores_in_peace() -> None:
    environment = engine_environment(example("quickstart.yaml"), "decode")
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_engines_on_a_gpu_are_left_to_vllm() -> None:
    assert engine_environment(example("gpu-example.yaml"), "decode") == {}


def test_configured_values_for_engines_win() -> None:
    asked = example("quickstart.yaml", "transfer.env.OMP_NUM_THREADS='2'")
    assert engine_environment(asked, "decode")["OMP_NUM_THREADS"] == "2"


def test_workers_of_one_engine_meet_on_the_interface_that_the_cluster_knows() -> None:
    asked = example("gpu-example.yaml", "models.llama-8b.source=/models/llama")
    told = vllm_settings(asked, site("decode")).env
    assert told["VLLM_HOST_IP"] == "10.1.2.3"
    # Or vLLM would start a Ray of its own for them.
    assert told["RAY_ADDRESS"] == "10.1.2.1:6379"


# -------------------------------------------------------------------- the environment of a hub


def test_only_what_is_about_hubs_and_proxies_is_kept() -> None:
    shell = {"HF_TOKEN": "t", "https_proxy": "http://p:1", "HOME": "/h", "NO_PROXY": "", "X": "1"}
    assert select_variables(shell) == {"HF_TOKEN": "t", "https_proxy": "http://p:1"}
    wanted = {"HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "HTTP_PROXY"}
    assert wanted <= set(hub_environment.HUB_VARIABLES)
    assert "HF_HOME" not in hub_environment.HUB_VARIABLES, "a folder of the shell's own machine"


def test_the_shell_counts_for_more_than_the_node_and_says_nothing_of_the_rest() -> None:
    seen = {"HF_ENDPOINT": "https://of-the-node", "HF_HOME": "/node"}
    apply_variables(seen, {"HF_ENDPOINT": "https://of-the-shell"}, ("10.0.0.1",))
    assert seen == {"HF_ENDPOINT": "https://of-the-shell", "HF_HOME": "/node"}


def test_nodes_are_reached_without_the_proxy() -> None:
    seen = {"no_proxy": "mirror.example"}
    apply_variables(
        seen, {"HTTPS_PROXY": "http://p:1", "NO_PROXY": ".corp, 10.0.0.2"}, ("10.0.0.1", "fd::2")
    )
    wanted = ".corp,10.0.0.2,mirror.example,localhost,127.0.0.1,::1,10.0.0.1,fd::2"
    assert seen["NO_PROXY"] == seen["no_proxy"] == wanted


def test_a_proxy_of_the_node_alone_is_for_others_too() -> None:
    seen = {"http_proxy": "http://p:1"}
    apply_variables(seen, {}, ("10.0.0.1",))
    assert "10.0.0.1" in seen["no_proxy"].split(",")


# -------------------------------------------------------------------- packing of replicas


INLINE_BYTES = 100 * 1024
"""What Ray still puts into its own message."""


def test_plain_values_come_back_and_others_as_text() -> None:
    told = {"a": [1, 2.5, None, True], "role": Role.DECODE, "left": {1, 2}.__len__}
    (number, role, left) = unpack(pack(told)).values()  # type: ignore[attr-defined]
    assert (number, role) == ([1, 2.5, None, True], "decode")
    assert isinstance(left, str)


def test_unpacked_data_is_left_as_it_is() -> None:
    assert unpack({"generation": 3}) == {"generation": 3}
    assert unpack_reports({"generation": 3}) == ()
    assert unpack_reports(pack_reports.__name__) == ()


def test_six_hundred_ticks_with_all_their_numbers_go_into_a_message() -> None:
    inputs = {f"input_{number}_tokens_per_s": number * 1.37 for number in range(20)}
    pools = [{"pool": pool, "have": 2, "desired": 3, "inputs": inputs} for pool in ("p", "d")]
    ticks = [{"age_s": age * 2.013, "paused_reason": "", "pools": pools} for age in range(600)]
    assert len(pack({"ticks": ticks})) < INLINE_BYTES


def test_a_report_of_a_thousand_tenants_comes_back_and_goes_into_a_message() -> None:
    rows = tuple(
        Tally("default", f"tenant-{number}", "m", "decode", evaluated=number, gpu_s=number / 7)
        for number in range(1000)
    )
    report = CoordinatorReport(coordinator_id="i", at_s=1.0, tallies=rows)
    sent = pack_reports((report,))
    assert len(sent) < INLINE_BYTES
    assert unpack_reports(sent) == (report,)


# -------------------------------------------------------------------- a replica


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


async def test_metrics_of_replicas_and_their_engines_need_the_token(
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


async def test_a_replica_reports_its_role_and_its_pools_role() -> None:
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
