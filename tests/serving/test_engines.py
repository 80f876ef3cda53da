"""From a configuration to the settings of one engine."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.fleet import Role
from baton.engine.sim import SimEngine
from baton.engine.vllm.core.settings import engine_arguments
from baton.serving.replica.engines import (
    ReplicaSite,
    build_engine,
    engine_environment,
    vllm_settings,
)
from tests.serving.configs import example


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


def test_what_the_configuration_sets_for_engines_wins() -> None:
    asked = example("quickstart.yaml", "transfer.env.OMP_NUM_THREADS='2'")
    assert engine_environment(asked, "decode")["OMP_NUM_THREADS"] == "2"


def test_workers_of_one_engine_meet_on_the_interface_that_the_cluster_knows() -> None:
    asked = example("gpu-example.yaml", "models.llama-8b.source=/models/llama")
    told = vllm_settings(asked, site("decode")).env
    assert told["VLLM_HOST_IP"] == "10.1.2.3"
    # Or vLLM would start a Ray of its own for them.
    assert told["RAY_ADDRESS"] == "10.1.2.1:6379"
