"""A configuration in virtual time: the same keys, the same placement, modelled engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import DeploymentConfig, coordinator_limits, load_config
from baton.config.simulation.to_scenario import SimStepTiming, load_shape, to_scenario
from baton.domain.errors import ConfigInvalid, UnknownModel
from baton.domain.fleet import Role
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY
from baton.perf.step_timing import StepBatch
from baton.policy.placement.chooser import ChooserPlacer
from baton.policy.placement.predicted import PredictedPlacer
from baton.simulator.engine.settings import SimSettings
from baton.simulator.faults import Kill
from baton.simulator.v1.settings import V1Settings

ROOT = Path(__file__).parents[2]
GPU = ROOT / "configs" / "gpu-example.yaml"
SIM = ROOT / "configs" / "sim.yaml"
CONFIGS = ROOT / "tests" / "perf" / "configs.json"


def config(file: Path, *sets: str) -> DeploymentConfig:
    return load_config([file], sets=sets).config


def settings(file: Path, pool: str, *sets: str) -> V1Settings:
    made = to_scenario(config(file, *sets))
    (plan,) = (plan for plan in made.scenario.pools if plan.name == pool)
    assert isinstance(plan.settings, V1Settings)
    return plan.settings


# ------------------------------------------------------------------ the deployment


def test_pools_limits_index_and_objectives_are_the_configurations_own() -> None:
    loaded = config(GPU)
    made = to_scenario(loaded, seed=5)
    scenario = made.scenario
    assert [(plan.name, plan.role, plan.replicas) for plan in scenario.pools] == [
        ("prefill", Role.PREFILL, 2),
        ("decode", Role.DECODE, 3),
    ]
    assert scenario.limits == coordinator_limits(loaded)
    assert scenario.index is not None
    assert scenario.index.mode is loaded.router.index
    assert (scenario.seed, scenario.coordinators) == (5, 1)
    assert (made.devices, made.device) == (5, "GPU")
    placer = scenario.placer()
    assert isinstance(placer, PredictedPlacer)
    assert placer is not scenario.placer()


def test_another_policy_places_in_virtual_time_too() -> None:
    sets = ("router.policy=random", "router.disaggregate=never")
    placer = to_scenario(config(GPU, *sets)).scenario.placer()
    assert isinstance(placer, ChooserPlacer)


def test_replica_events_are_passed_on() -> None:
    kill = Kill(at_s=3.0, replica_id="decode-0")
    assert to_scenario(config(SIM), scheduled_events=(kill,)).scenario.scheduled_events == (kill,)


def test_gpus_are_counted_with_all_workers_of_each_replica() -> None:
    sets = ("pools.decode.parallel.tp=2", "pools.decode.resources.gpus=2")
    assert to_scenario(config(GPU, *sets)).devices == 2 * 1 + 3 * 2


# ------------------------------------------------------------------ engines of vLLM


def test_a_vllm_engine_gets_its_memory_from_the_model_and_its_accelerator() -> None:
    made = settings(GPU, "decode")
    assert made.kv_block_bytes == 16 * 131072  # 128 KiB a token: 32 layers, 8 x 128, K and V, bf16
    kv_bytes = made.kv_blocks * made.kv_block_bytes
    assert 45e9 < kv_bytes < 61e9  # 0.9 of 80 GiB less 16 GB of weights and what steps need
    assert made.max_len_tokens == 16384
    assert made.max_running_requests == 256
    assert made.lease_s == 30.0
    assert made.max_pulls == 8


def test_a_faster_accelerator_steps_faster_and_two_share_the_work() -> None:
    decode = StepBatch(decode_requests=8, decode_context_tokens=8000)
    alone = settings(GPU, "decode").timing.step_s(decode)
    faster = settings(GPU, "decode", "pools.decode.resources.accelerator=B200").timing
    split = settings(GPU, "decode", "pools.decode.parallel.tp=2", "pools.decode.resources.gpus=2")
    assert faster.step_s(decode) < alone
    assert split.timing.step_s(decode) < alone
    assert split.transfer_bytes_per_s == 2 * settings(GPU, "decode").transfer_bytes_per_s


def test_stages_of_a_pipeline_work_at_once_and_caching_can_be_off() -> None:
    two_stages = ("pools.decode.parallel.pp=2", "pools.decode.resources.gpus=2")
    made = settings(GPU, "decode", *two_stages)
    assert (made.pipeline_stages, made.prefix_caching) == (2, True)
    off = "models.llama-8b.engine.prefix_caching=false"
    assert settings(GPU, "decode", off).prefix_caching is False
    assert settings(SIM, "decode", "model.engine.prefix_caching=false").prefix_caching is False


def test_unset_engine_keys_equal_the_arguments_that_vllm_gets() -> None:
    made = settings(GPU, "prefill")
    assert made.max_running_requests == 1024
    open_ = ("pools.decode.engine.max_num_seqs=null", "models.llama-8b.engine.block_size=null")
    assert settings(GPU, "decode", *open_).max_batched_tokens == 8192
    assert settings(GPU, "decode", *open_).block_size_tokens == 16


def test_narrower_weights_and_cache_leave_more_room() -> None:
    plain = settings(GPU, "decode")
    fp8 = settings(GPU, "decode", "models.llama-8b.engine.extra.quantization=fp8")
    small = settings(GPU, "decode", "models.llama-8b.engine.extra.kv_cache_dtype=fp8_e4m3")
    assert fp8.kv_blocks > plain.kv_blocks
    assert fp8.kv_block_bytes == plain.kv_block_bytes
    assert small.kv_block_bytes == plain.kv_block_bytes // 2
    assert small.layout != plain.layout


def test_a_model_that_was_published_in_fp8_is_held_in_fp8_though_it_computes_in_16_bits() -> None:
    named = "models.llama-8b.source=meta-llama/Llama-3.1-8B-Instruct-FP8"
    assert settings(GPU, "decode", named).kv_blocks > settings(GPU, "decode").kv_blocks


def test_a_share_of_the_memory_for_kv_blocks_can_be_asked_for() -> None:
    made = settings(GPU, "decode", "pools.decode.engine.kv_cache=8GiB")
    assert made.kv_blocks * made.kv_block_bytes == pytest.approx(8 * 1024**3, rel=0.01)


# ------------------------------------------------------------------ simulated engines


def test_a_simulated_engine_is_as_its_configuration_says() -> None:
    made = settings(SIM, "decode")
    assert (made.kv_blocks, made.block_size_tokens, made.max_batched_tokens) == (4096, 16, 2048)
    assert made.transfer_bytes_per_s == 25e9
    assert to_scenario(config(SIM)).device == "engine"
    assert to_scenario(config(SIM)).devices == 4
    # 20k tokens/s, and 1 ms for every step; 8 ms for a decode step, and 50 us a request.
    assert made.timing.step_s(StepBatch(prefill_tokens=200)) == pytest.approx(0.011)
    assert made.timing.step_s(StepBatch(decode_requests=2)) == pytest.approx(0.0091)


def test_a_faster_clock_makes_everything_of_a_simulated_engine_faster() -> None:
    made = settings(SIM, "decode", "model.engine.sim.speed=4")
    assert made.timing.step_s(StepBatch(prefill_tokens=200)) == pytest.approx(0.011 / 4)
    assert made.transfer_bytes_per_s == 100e9
    assert made.transfer_setup_s == pytest.approx(0.002 / 4)


def test_the_fill_of_a_simulated_cache_is_what_decodes_attend_to() -> None:
    timing = SimStepTiming(SimSettings(decode_kv_s=0.01, kv_blocks=1000, max_len_tokens=2048))
    empty = timing.step_s(StepBatch(decode_requests=1))
    half = timing.step_s(StepBatch(decode_requests=1, decode_context_tokens=8000))
    more = timing.step_s(StepBatch(decode_requests=1, decode_context_tokens=90_000))
    assert half - empty == pytest.approx(0.005)
    assert more - empty == pytest.approx(0.01)


# ------------------------------------------------------------------ what cannot be modelled


def findings(file: Path, *sets: str, model_config: Path | None = None) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        to_scenario(config(file, *sets), model_config=model_config)
    return list(caught.value.problems)


def test_every_pool_without_an_accelerator_is_named_with_the_key_to_write() -> None:
    lines = findings(
        GPU,
        "pools.prefill.resources.accelerator=null",
        "pools.decode.resources.accelerator=H1000",
    )
    assert len(lines) == 2
    assert lines[0].startswith("pools.prefill.resources.accelerator: missing, expected the name of")
    assert "H100" in lines[0]
    assert lines[1].startswith("pools.decode.resources.accelerator: there is no accelerator")
    assert "h100" in lines[1].lower()


def test_an_unknown_model_is_said_once_and_asks_for_its_config() -> None:
    lines = findings(GPU, "models.llama-8b.source=acme/unheard-of")
    assert len(lines) == 1
    assert lines[0].startswith("models.llama-8b.source: the shape of 'acme/unheard-of' is not")
    assert "config.json" in lines[0]


def test_a_model_that_does_not_fit_says_in_which_pool_and_how_it_would() -> None:
    lines = findings(GPU, "models.llama-8b.source=meta-llama/Llama-3.1-70B-Instruct")
    assert [line.split(":")[0] for line in lines] == ["pools.prefill", "pools.decode"]
    assert "TP" in lines[0].upper()


@pytest.mark.parametrize(
    ("pool", "tokens", "wanted"),
    [
        (
            "decode",
            "8193",
            "got 8193, expected at most 8192, vLLM's own max_num_batched_tokens: lower it, or set"
            " that, too",
        ),
        (
            "prefill",
            "1023",
            "got 1023, expected at least 1024, vLLM's own max_num_seqs, one a stream: raise it, or"
            " set that, too",
        ),
    ],
)
def test_a_budget_beside_streams_that_vllms_defaults_have_no_room_for_is_said_at_its_key(
    pool: str, tokens: str, wanted: str
) -> None:
    (line,) = findings(
        GPU,
        f"pools.{pool}.engine.max_num_batched_tokens=null",
        f"pools.{pool}.engine.max_num_batched_tokens_while_decoding={tokens}",
    )
    assert line == f"pools.{pool}.engine.max_num_batched_tokens_while_decoding: {wanted}"


def test_a_budget_beside_streams_within_vllms_defaults_is_simulated() -> None:
    sets = [
        f"pools.prefill.engine.{key}=null" for key in ("max_num_seqs", "max_num_batched_tokens")
    ]
    for tokens in (1024, 8192):
        made = settings(
            GPU,
            "prefill",
            *sets,
            f"pools.prefill.engine.max_num_batched_tokens_while_decoding={tokens}",
        )
        assert made.max_batched_tokens_while_decoding == tokens


def test_a_policy_that_cannot_be_loaded_is_said_before_anything_runs() -> None:
    sets = ("router.policy=no.such:thing", "router.disaggregate=always")
    assert "router.policy: cannot use 'no.such:thing'" in findings(SIM, *sets)[0]


def test_unsimulated_keys_are_reported() -> None:
    limited = to_scenario(config(GPU, "models.llama-8b.engine.offload.host_memory=64GiB"))
    assert any("not simulated" in note for note in limited.notes)
    assert not any("not simulated" in note for note in to_scenario(config(GPU)).notes)
    assert any("no statement about hardware" in note for note in to_scenario(config(SIM)).notes)


MANY = "models.llama-8b.engine.extra"


@pytest.mark.parametrize(
    ("option", "note"),
    [
        (f"{MANY}.speculative_config={{method: ngram}}", "Speculative decoding"),
        (f"{MANY}.quantization=bitsandbytes", None),
        (f"{MANY}.quantization=fp8", None),
        (f"{MANY}.quantization=gptq_marlin", None),
        (f"{MANY}.kv_cache_dtype=turboquant_k8v4", "This type of KV blocks"),
        (f"{MANY}.kv_cache_dtype=fp8_e5m2", None),
        (f"{MANY}.enforce_eager=true", "Arguments passed on to vLLM"),
        (f"{MANY}.decode_context_parallel_size=2", "Arguments passed on to vLLM"),
        (f"{MANY}.seed=7", None),
        ("models.llama-8b.adapters.a.source=org/a", "LoRA adapters"),
        ("pools.decode.env.VLLM_USE_V1=1", "Environment variables"),
        ("transfer.on_failure=fail", "Legs that fail with their transfer"),
        ("pools.decode.engine.start_deadline=9m", "Starts that fail"),
        ("transfer.probe.interval=9s", "Links that fail"),
        ("tenants.acme={keys_file: x}", "Prefix caches of single tenants"),
    ],
)
def test_a_report_names_what_is_set_and_not_simulated(option: str, note: str | None) -> None:
    plain, notes = to_scenario(config(GPU)).notes, to_scenario(config(GPU, option)).notes
    new = [other for other in notes if other not in plain]
    assert [name[: len(note or "")] for name in new] == ([] if note is None else [note])


def test_every_key_that_is_not_simulated_is_named() -> None:
    sets = [f"pools.decode.env.{name}=1" for name in "abcdef"]
    (note,) = (other for other in to_scenario(config(GPU, *sets)).notes if "Environment" in other)
    assert all(f"pools.decode.env.{name}" in note for name in "abcdef")


@pytest.mark.parametrize("held", ["bfloat16", "float16"])
def test_a_kv_cache_may_be_narrower_than_activations(held: str) -> None:
    wide = settings(GPU, "decode", "models.llama-8b.engine.dtype=float32")
    sets = ("models.llama-8b.engine.dtype=float32", f"{MANY}.kv_cache_dtype={held}")
    assert settings(GPU, "decode", *sets).kv_block_bytes * 2 == wide.kv_block_bytes


# ------------------------------------------------------------------ shapes


def test_a_folder_with_a_config_and_a_config_of_its_own_are_read(tmp_path: Path) -> None:
    name = "meta-llama/Llama-3.1-8B"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(CONFIGS.read_text())[name]))
    known = load_shape(name)
    assert load_shape(str(tmp_path)).shape.parameters == known.shape.parameters
    assert load_shape("anything", tmp_path / "config.json").weights is Dtype.BF16
    assert load_shape("anything", tmp_path).shape.name == "anything"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "got a list, expected an object"),
        ("{", "expected JSON"),
        (None, r"has no config\.json"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UnknownModel, match=reason):
        load_shape("anything", file)


def test_a_quantization_that_does_not_tell_its_bits_is_an_error() -> None:
    with pytest.raises(ConfigInvalid, match=r"extra\.quantization: got 'hqq', expected one that"):
        settings(GPU, "decode", f"{MANY}.quantization=hqq")


QWEN = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_hidden_layers": 24,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "vocab_size": 248_320,
    },
    "vision_config": {"hidden_size": 1024},
}


def test_a_hybrid_is_simulated_with_its_states_and_names_what_is_not_counted(
    tmp_path: Path,
) -> None:
    """A state of 1.1 MB takes as much as 544 tokens of 2,048 bytes in a layer."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN), encoding="utf-8")
    simulated = to_scenario(config(GPU), model_config=file)
    decode = next(pool.settings for pool in simulated.scenario.pools if pool.name == "decode")
    assert isinstance(decode, V1Settings)
    assert (decode.block_size_tokens, decode.request_blocks) == (544, 3)
    assert any("the vision encoder is not counted" in note for note in simulated.notes)


# ------------------------------------------------------------------ experts

DEEPSEEK = ROOT / "configs" / "deepseek-v3.yaml"


def of_group(dp: int) -> tuple[str, ...]:
    return (f"pools.decode.parallel={{tp: 1, dp: {dp}, ep: true}}",)


def test_whole_experts_on_each_gpu_are_simulated() -> None:
    sliced = settings(DEEPSEEK, "decode", "pools.decode.parallel.ep=false").timing
    whole = settings(DEEPSEEK, "decode").timing
    batch = StepBatch(decode_requests=64, decode_context_tokens=64_000)
    assert whole.step_s(batch) != sliced.step_s(batch)


def test_a_group_of_ranks_is_one_engine_with_the_limits_of_all() -> None:
    plain = settings(DEEPSEEK, "decode")
    loaded = load_config([DEEPSEEK], env={}, sets=of_group(8), for_simulation=True)
    made = to_scenario(loaded.config)
    (group,) = (pool.settings for pool in made.scenario.pools if pool.name == "decode")
    assert isinstance(group, V1Settings)
    assert group.max_running_requests == 8 * plain.max_running_requests
    assert group.prompt_chunk_tokens == plain.max_batched_tokens
    assert "DP 8, whole experts on each GPU" in made.pools["decode"]
    assert any("No deployment starts data-parallel groups" in note for note in made.notes)


def test_a_group_of_ranks_is_refused_but_in_a_simulation() -> None:
    with pytest.raises(ConfigInvalid, match=r"parallel.dp: got 8, expected 1: no deployment"):
        load_config([DEEPSEEK], env={}, sets=of_group(8))


def test_experts_of_a_model_that_has_none_are_refused_as_vllm_does() -> None:
    assert "there are no experts to share" in findings(GPU, "pools.decode.parallel.ep=true")[0]


def test_the_time_after_the_engine_is_a_calibrations() -> None:
    (pool, *_) = to_scenario(
        config(GPU), efficiency=replace(DEFAULT_EFFICIENCY, first_token_s=0.25)
    ).scenario.pools
    assert isinstance(pool.settings, V1Settings)
    assert pool.settings.first_token_s == 0.25
