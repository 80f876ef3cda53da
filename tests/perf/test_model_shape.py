"""What configs and names say of models, against what their authors publish."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.config_json import from_config
from baton.perf.model.known_models import KNOWN_MODELS, dtype_hint, find_shape
from baton.perf.model.layers import StoredWeights
from baton.perf.model.quantization import kv_dtype, stored_weights
from baton.perf.model.shape import ModelShape
from baton.perf.model.speculative import best_draft_length, expected_tokens, speedup, step_cost

CONFIGS: Mapping[str, Mapping[str, object]] = json.loads(
    Path(__file__).with_name("configs.json").read_text(encoding="utf-8")
)
"""What the authors' config.json says of models, by their ids on the hub."""
LLAMA_8B = CONFIGS["meta-llama/Llama-3.1-8B"]
DEEPSEEK_V3 = CONFIGS["deepseek-ai/DeepSeek-V3"]
QWEN3_30B = CONFIGS["Qwen/Qwen3-30B-A3B"]
FALCON_40B = CONFIGS["tiiuae/falcon-40b"]


@pytest.mark.parametrize(("hub_id", "config"), CONFIGS.items(), ids=list(CONFIGS))
def test_a_config_and_a_name_describe_the_same_model(
    hub_id: str, config: Mapping[str, object]
) -> None:
    assert from_config(config, name=hub_id) == KNOWN_MODELS[hub_id]


@pytest.mark.parametrize(
    ("hub_id", "billions", "active_billions"),
    [
        ("meta-llama/Llama-2-13b-hf", 13.0, 13.0),
        ("meta-llama/Llama-3.1-8B", 8.03, 8.03),
        ("meta-llama/Llama-3.1-70B", 70.6, 70.6),
        ("meta-llama/Llama-3.1-405B", 405.9, 405.9),
        ("meta-llama/Llama-3.2-1B", 1.24, 1.24),
        ("meta-llama/Llama-4-Maverick-17B-128E", 400, 17.2),
        ("Qwen/Qwen2.5-7B", 7.62, 7.62),
        ("Qwen/Qwen3-32B", 32.8, 32.8),
        ("Qwen/Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen/Qwen3-235B-A22B", 235, 22),
        ("Qwen/Qwen2-57B-A14B", 57.4, 14.2),
        ("mistralai/Mistral-7B-v0.1", 7.24, 7.24),
        ("mistralai/Mistral-Large-2407", 122.6, 122.6),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7, 12.9),
        ("mistralai/Mixtral-8x22B-v0.1", 141, 39.1),
        ("deepseek-ai/DeepSeek-V2", 236, 21.4),
        ("deepseek-ai/DeepSeek-V3", 671, 37.5),
        ("moonshotai/Kimi-K2", 1026, 32.9),
        ("openai/gpt-oss-20b", 20.9, 4.2),
        ("openai/gpt-oss-120b", 116.8, 5.7),
        ("facebook/opt-13b", 12.85, 12.85),
        ("facebook/opt-66b", 65.7, 65.7),
        ("facebook/opt-175b", 175, 175),
        ("bigscience/bloom", 176.2, 176.2),
        ("google/gemma-2-9b", 9.24, 9.24),
        ("google/gemma-3-27b", 27.0, 27.0),
        ("microsoft/phi-4", 14.7, 14.7),
        ("EleutherAI/gpt-neox-20b", 20.6, 20.6),
        ("internlm/internlm-20b", 20.1, 20.1),
        ("Qwen/Qwen-72B", 72.3, 72.3),
        ("MiniMaxAI/MiniMax-M2", 229, 11.0),
        ("zai-org/GLM-4.5-Air", 106.9, 13.4),
    ],
)
def test_models_have_as_many_parameters_as_their_authors_say(
    hub_id: str, billions: float, active_billions: float
) -> None:
    shape = find_shape(hub_id)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active_billions, rel=0.02)


@pytest.mark.parametrize(
    ("hub_id", "kv_bytes"),
    [
        pytest.param("facebook/opt-66b", 2_359_296, id="a head of keys for each of queries"),
        pytest.param("meta-llama/Llama-3.1-70B", 327_680, id="grouped heads"),
        pytest.param("openai/gpt-oss-120b", 73_728, id="layers with a window"),
        pytest.param("deepseek-ai/DeepSeek-R1", 70_272, id="latent attention"),
    ],
)
def test_a_token_takes_as_many_bytes_of_kv_cache_as_the_field_computes(
    hub_id: str, kv_bytes: int
) -> None:
    shape = find_shape(hub_id)
    assert shape.kv_token_bytes(Dtype.FP16) == kv_bytes
    assert shape.kv_token_bytes(Dtype.FP8) == kv_bytes / 2


def test_layers_that_share_an_indexer_keep_no_keys_for_it() -> None:
    """GLM-5.2 builds 21 in 78 layers, of 132 bytes a token; each latent has 576 numbers."""
    shape = find_shape("zai-org/GLM-5.2")
    assert shape.kv_token_bytes(Dtype.BF16) == pytest.approx(78 * 2 * 576 + 21 * 132)
    assert shape.kv_token_bytes(Dtype.FP8) == pytest.approx(78 * 656 + 21 * 132)
    every_layer = replace(shape, indexer_layers=None)
    assert every_layer.kv_token_bytes(Dtype.BF16) == pytest.approx(78 * (2 * 576 + 132))


def test_a_pattern_says_which_layers_share_an_indexer() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    indexer = {
        "v_head_dim": 128,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk_pattern": "FS" * 16,
    }
    assert shaped(**latent, **indexer).indexer_layers == 16


def test_layers_with_a_window_keep_their_window_only() -> None:
    shape = find_shape("openai/gpt-oss-120b")
    token_bytes = shape.kv_token_bytes(Dtype.BF16)
    assert shape.kv_bytes(100, Dtype.BF16) == 100 * token_bytes
    assert shape.kv_bytes(128, Dtype.BF16) == 128 * token_bytes
    assert shape.kv_bytes(1128, Dtype.BF16) == (128 + 1000 / 2) * token_bytes


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_more_tokens_never_take_fewer_bytes(one: int, more: int) -> None:
    shape = find_shape("google/gemma-2-9b")
    before, after = (shape.kv_bytes(tokens, Dtype.BF16) for tokens in (one, one + more))
    assert before <= after <= before + more * shape.kv_token_bytes(Dtype.BF16)


# --------------------------------------------------------------------------- experts


@pytest.mark.parametrize("hub_id", ["mistralai/Mixtral-8x7B-v0.1", "deepseek-ai/DeepSeek-V3"])
def test_one_token_touches_its_own_experts_and_many_tokens_touch_all(hub_id: str) -> None:
    shape = find_shape(hub_id)
    assert shape.touched_parameters(0) == shape.common_layer_parameters
    assert shape.touched_parameters(1) == pytest.approx(shape.active_layer_parameters, rel=1e-9)
    assert shape.touched_parameters(10_000) == pytest.approx(shape.layer_parameters, rel=1e-9)
    touched = [shape.touched_parameters(tokens) for tokens in range(1, 200)]
    assert touched == sorted(touched)


def test_two_tokens_touch_the_experts_that_counting_expects() -> None:
    """8 experts, 2 each: 2 + 2 * 6/8 = 3.5 are chosen by one of the two tokens."""
    shape = find_shape("mistralai/Mixtral-8x7B-v0.1")
    expected = shape.common_layer_parameters + 32 * 3.5 * shape.expert_parameters
    assert shape.touched_parameters(2) == expected


def test_a_dense_model_is_touched_whole_by_every_step() -> None:
    shape = find_shape("meta-llama/Llama-3.1-8B")
    assert shape.touched_parameters(1) == shape.touched_parameters(500) == shape.layer_parameters
    assert shape.active_parameters == shape.parameters


def test_tied_embeddings_are_stored_once_and_still_multiplied_with() -> None:
    tied = find_shape("meta-llama/Llama-3.2-1B")
    untied = replace(tied, tied_embeddings=False)
    assert untied.parameters - tied.parameters == tied.output_parameters == 128_256 * 2048


# --------------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size"],
)
def test_a_config_that_lacks_a_key_is_refused_by_its_name(key: str) -> None:
    config = {name: value for name, value in LLAMA_8B.items() if name != key}
    with pytest.raises(UnknownModel, match=f"^mine: its config has no '{key}'"):
        from_config(config, name="mine")


@pytest.mark.parametrize("value", [-1, "32", 3.5, True])
def test_a_senseless_value_is_refused_and_shown(value: object) -> None:
    with pytest.raises(UnknownModel, match=f"'num_hidden_layers': got {value!r}"):
        from_config({**LLAMA_8B, "num_hidden_layers": value}, name="mine")


def test_heads_of_latent_attention_need_not_share_out_the_hidden_size() -> None:
    """Their size is that of what is unpacked; 2,048 cannot be shared out among 20."""
    config = {**LLAMA_8B, "hidden_size": 2048, "num_attention_heads": 20, "kv_lora_rank": 512}
    config |= {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    config.pop("head_dim", None)
    assert from_config(config, name="mine").head_dim == 256


@pytest.mark.parametrize("key", ["qk_rope_head_dim", "v_head_dim", "num_experts_per_tok"])
def test_half_a_latent_attention_or_mixture_is_refused(key: str) -> None:
    config = {name: value for name, value in DEEPSEEK_V3.items() if name != key}
    with pytest.raises(UnknownModel, match=key):
        from_config(config, name="mine")


def test_heads_that_do_not_divide_the_hidden_size_need_a_dimension_of_their_own() -> None:
    config = {**LLAMA_8B, "num_attention_heads": 30, "num_key_value_heads": 10}
    with pytest.raises(UnknownModel, match="4096 cannot be split among 30 heads"):
        from_config(config, name="mine")
    assert from_config({**config, "head_dim": 128}, name="mine").head_dim == 128


@pytest.mark.parametrize("model_type", ["mamba2", "rwkv", "t5", "zamba2"])
def test_a_model_without_decoder_attention_layers_is_refused(model_type: str) -> None:
    with pytest.raises(UnknownModel, match=f"got model_type '{model_type}'"):
        from_config({**LLAMA_8B, "model_type": model_type}, name="mine")


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "got linear_attention"),
        ({"layer_types": ["full_attention", "conv"]}, "got conv"),
        ({"attn_type_list": [1, 0, 1]}, "got linear attention"),
        ({"linear_num_key_heads": 16}, "got linear attention"),
        ({"full_attention_interval": 4}, "got linear attention"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "got linear attention"),
        ({"mamba_d_state": 16}, "got a state-space model"),
        ({"hybrid_override_pattern": "M-M*"}, "got a state-space model"),
        ({"conv_L_cache": 3}, "got convolutions"),
        ({"block_configs": [{}, {}]}, "got layers of different shapes"),
        ({"compress_ratios": [0, 4]}, "got attention to compressed keys"),
        ({"sparse_attention_config": {"use": True}}, "got sparse attention"),
        ({"global_head_dim": 512}, "got layers with heads of different sizes"),
        ({"attn_output_gate": True}, "got gated attention"),
        ({"is_encoder_decoder": True}, "got an encoder"),
        ({"type_vocab_size": 1}, "got an encoder"),
        ({"num_kv_shared_layers": 10}, "got layers that share keys and values"),
        ({"num_kv_shared_layers": 1}, "got layers that share keys and values"),
        ({"hidden_size_per_layer_input": 256}, "got embeddings of each layer"),
        ({"swa_num_key_value_heads": 8}, "got layers with heads of different sizes"),
        ({"v_head_dim": 64}, "got 64, expected the keys' 128"),
        ({"index_head_dim": 128, "index_n_heads": 4}, "got keys that select tokens"),
        ({"cross_attention_layers": [3, 8]}, "got attention to another sequence"),
        ({"num_attention_heads_per_layer": [32, 16]}, "got layers with different heads"),
        ({"num_key_value_heads": [8, 4]}, "got values that differ between layers"),
    ],
)
def test_a_structure_that_a_shape_cannot_describe_is_refused_by_its_keys(
    added: dict[str, object], reason: str
) -> None:
    config = {**LLAMA_8B, "model_type": "of_tomorrow", **added}
    with pytest.raises(UnknownModel, match=f"{next(iter(added))}.*{reason}"):
        from_config(config, name="mine")


@pytest.mark.parametrize(
    "added",
    [
        {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 128},
        {"attn_type_list": [1] * 32},
        {"full_attention_interval": 1},
        {"mamba_ssm_dtype": None},
        {"attn_output_gate": False},
        {"block_configs": []},
    ],
)
def test_a_structure_that_is_switched_off_is_none(added: dict[str, object]) -> None:
    assert shaped(**added).parameters == shaped().parameters


@pytest.mark.parametrize(
    ("added", "dense"),
    [
        ({"moe_layer_freq": [0, 0, *[1] * 30]}, 2),
        ({"mlp_layer_types": ["dense", *["sparse"] * 31]}, 1),
    ],
)
def test_dense_layers_may_be_listed_layer_by_layer(added: dict[str, object], dense: int) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    assert shaped(**experts, **added).expert_layers == 32 - dense


def test_a_list_of_one_number_is_that_number() -> None:
    experts = {"num_experts": [8] * 32, "moe_topk": [2] * 32, "moe_intermediate_size": [512] * 32}
    mixture = shaped(**experts).experts
    assert mixture is not None
    assert (mixture.count, mixture.active, mixture.width) == (8, 2, 512)


def test_a_feed_forward_with_xielu_has_no_gate() -> None:
    assert not shaped(model_type="apertus", hidden_act="xielu").gated_ffn
    assert shaped(model_type="bitnet", hidden_act="relu2").gated_ffn
    with pytest.raises(UnknownModel, match="'hidden_act': got 'relu2'"):
        shaped(hidden_act="relu2")


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, Dtype.FP8),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, Dtype.FP8),
        ({"kv_cache_scheme": None}, None),
        ({"quant_method": "fp8"}, None),
    ],
)
def test_a_quantization_may_say_how_the_kv_cache_is_stored(
    quantization: dict[str, object], dtype: Dtype | None
) -> None:
    assert kv_dtype({**LLAMA_8B, "quantization_config": quantization}) is dtype


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "hqq"},
        {"quant_method": "of_tomorrow"},
        {"quant_method": "gptq", "bits": 5},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {}}}},
        {},
    ],
)
def test_an_unknown_quantization_is_refused_and_never_taken_for_fp8(
    quantization: dict[str, object],
) -> None:
    with pytest.raises(UnknownModel, match=r"^quantization_config: got "):
        stored({"quantization_config": quantization})


def shaped(**changes: object) -> ModelShape:
    return from_config({**LLAMA_8B, **changes}, name="mine")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 32 * 10**9}, "'num_hidden_layers': got 32000000000, expected at mo"),
        ({"num_key_value_heads": 7}, "'num_key_value_heads': got 7, expected a divisor of 32"),
        ({"num_key_value_heads": 64}, "'num_key_value_heads': got 64, expected a divisor of 32"),
        ({"layer_types": ["full_attention"] * 31}, "'layer_types': got 31 items, expected one for"),
        ({"no_rope_layers": [1] * 33}, "'no_rope_layers': got 33 items, expected one for each of"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    changed: dict[str, object], message: str
) -> None:
    with pytest.raises(UnknownModel, match=message):
        from_config({**LLAMA_8B, **changed}, name="mine")


def test_no_token_passes_through_more_experts_than_there_are() -> None:
    with pytest.raises(UnknownModel, match="got 129, expected at most the 128 experts"):
        from_config({**QWEN3_30B, "num_experts_per_tok": 129}, name="mine")


@pytest.mark.parametrize(
    ("model_type", "omitted", "meant"),
    [
        ("mistral", "num_key_value_heads", {"num_key_value_heads": 8}),
        ("mistral", "sliding_window", {"sliding_window": 4096}),
        ("qwen3", "head_dim", {"head_dim": 128}),
        ("smollm3", "tie_word_embeddings", {"tie_word_embeddings": True}),
        ("qwen3_moe", "num_experts", {"num_experts": 128}),
        ("qwen3_moe", "moe_intermediate_size", {"moe_intermediate_size": 768}),
        ("deepseek_v3", "n_routed_experts", {"n_routed_experts": 256}),
        ("deepseek_v3", "first_k_dense_replace", {"first_k_dense_replace": 3}),
        ("deepseek_v3", "q_lora_rank", {"q_lora_rank": 1536}),
        ("olmo3", "layer_types", {"layer_types": (["sliding_attention"] * 3 + ["full_attention"])}),
    ],
)
def test_an_omitted_key_has_the_default_of_its_class(
    model_type: str, omitted: str, meant: dict[str, object]
) -> None:
    if model_type == "olmo3":
        meant = {"layer_types": meant["layer_types"] * 8}  # type: ignore[operator]  # a list
    base = {"qwen3_moe": QWEN3_30B, "deepseek_v3": DEEPSEEK_V3}.get(model_type, LLAMA_8B)
    config = {**base, "hidden_size": 5120, "num_attention_heads": 32, "model_type": model_type}
    config |= {"sliding_window": 4096} if model_type == "olmo3" else {}
    without = {key: value for key, value in config.items() if key != omitted}
    assert from_config(without, name="mine") == from_config({**config, **meant}, name="mine")


def test_a_key_that_says_none_has_no_default() -> None:
    config = {**LLAMA_8B, "model_type": "mistral", "num_key_value_heads": None}
    assert from_config(config, name="mine").kv_heads == 32


@pytest.mark.parametrize("model_type", ["afmoe", "laguna"])
def test_layers_of_unknown_types_are_refused_where_the_class_lists_them(model_type: str) -> None:
    with pytest.raises(UnknownModel, match="'layer_types': got no list"):
        from_config({**QWEN3_30B, "model_type": model_type}, name="mine")


def test_a_type_of_weights_that_is_unknown_is_refused() -> None:
    with pytest.raises(UnknownModel, match="torch_dtype: got 'float64', expected one of"):
        stored({"torch_dtype": "float64"})


@pytest.mark.parametrize(
    "scheme", [{"num_bits": 4, "type": "int"}, {"num_bits": 4, "type": "float"}, 4]
)
def test_a_kv_cache_that_vllm_refuses_is_refused(scheme: object) -> None:
    config = {**LLAMA_8B, **compressed(8, "float", kv_cache_scheme=scheme)}
    with pytest.raises(UnknownModel, match="kv_cache_scheme: got"):
        kv_dtype(config)


def test_without_a_word_on_kv_heads_every_head_has_its_own() -> None:
    assert shaped(num_key_value_heads=None).kv_heads == 32


def test_a_window_counts_for_all_layers_unless_the_config_says_which() -> None:
    assert shaped(sliding_window=4096).windowed_layers == 32
    some = ["full_attention"] * 20 + ["sliding_attention"] * 12
    assert shaped(sliding_window=4096, layer_types=some).windowed_layers == 12
    assert shaped(sliding_window=4096, sliding_window_pattern=6).windowed_layers == 27
    none = shaped(sliding_window=4096, layer_types=["full_attention"] * 32)
    assert (none.window_tokens, none.windowed_layers) == (None, 0)


def test_a_number_that_is_zero_or_null_is_none() -> None:
    assert shaped(sliding_window=0).window_tokens is None
    assert shaped(num_local_experts=0, num_key_value_heads=0) == shaped(num_key_value_heads=None)


def test_qwen_has_a_window_only_where_it_is_switched_on_and_behind_its_first_layers() -> None:
    qwen = {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 20}
    assert shaped(**qwen).window_tokens is None
    assert shaped(**qwen, use_sliding_window=True).windowed_layers == 12


def test_falcon_shares_one_head_of_keys_unless_it_is_grouped() -> None:
    old = {**FALCON_40B, "new_decoder_architecture": False, "multi_query": True}
    assert from_config(old, name="mine").kv_heads == 1
    assert from_config({**old, "multi_query": False}, name="mine").kv_heads == 128


def test_dense_layers_are_the_first_the_listed_and_those_between() -> None:
    def dense(**changes: object) -> int:
        experts = from_config({**QWEN3_30B, **changes}, name="mine").experts
        assert experts is not None
        return experts.dense_layers

    assert dense() == 0
    assert dense(mlp_only_layers=[0, 1, 2]) == 3
    assert dense(decoder_sparse_step=2) == 24
    assert dense(first_k_dense_replace=4) == 4


def stored(said: Mapping[str, object]) -> StoredWeights:
    config = {name: value for name, value in LLAMA_8B.items() if name != "torch_dtype"}
    return stored_weights({**config, **said}, from_config(LLAMA_8B, name="mine"))


def quantized(method: str, **more: object) -> dict[str, object]:
    return {"quantization_config": {"quant_method": method, **more}}


def compressed(bits: int, number: str, **more: object) -> dict[str, object]:
    group = {"weights": {"num_bits": bits, "type": number}}
    return quantized("compressed-tensors", config_groups={"group_0": group}, **more)


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ({}, Dtype.BF16),
        ({"torch_dtype": "float16"}, Dtype.FP16),
        ({"dtype": "float32"}, Dtype.BF16),  # which vLLM narrows
        (quantized("fp8"), Dtype.FP8),
        (quantized("awq", bits=4), Dtype.INT4),
        (quantized("gptq", bits=8), Dtype.INT8),
        (quantized("mxfp4"), Dtype.BF16),  # which has routed experts in 4 bits, and here are none
        (quantized("modelopt", quant_algo="NVFP4", exclude_modules=[]), Dtype.FP4),
        (compressed(8, "int"), Dtype.INT8),
        (compressed(8, "float"), Dtype.FP8),
        (compressed(4, "float", format="nvfp4-pack-quantized"), Dtype.FP4),
        (quantized("bitsandbytes", load_in_4bit=True), Dtype.INT4),
        (quantized("bitsandbytes", load_in_8bit=True), Dtype.INT8),
        (quantized("auto-round", bits=4), Dtype.INT4),
        ({"text_config": {"model_type": "llama", "torch_dtype": "float16"}}, Dtype.FP16),
    ],
)
def test_a_config_says_how_weights_are_stored(said: dict[str, object], dtype: Dtype) -> None:
    assert stored(said).dtype is dtype


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("said", "hub_id", "dtype"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B", None),
        ("META-LLAMA/llama-3.1-70b", "meta-llama/Llama-3.1-70B", None),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8", "meta-llama/Llama-3.1-70B", Dtype.FP8),
        ("nvidia/Llama-3.1-405B-Instruct-FP4", "meta-llama/Llama-3.1-405B", Dtype.FP4),
        ("Qwen/Qwen2.5-32B-Instruct-AWQ", "Qwen/Qwen2.5-32B", Dtype.INT4),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen/Qwen3-235B-A22B", Dtype.FP8),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistralai/Mistral-7B-v0.1", None),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-v0.2", None),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", None),
        ("llama2-70b", "meta-llama/Llama-2-70b-hf", None),
        ("bloom-176b", "bigscience/bloom", None),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-R1", Dtype.FP8),
        ("openai/gpt-oss-120b", "openai/gpt-oss-120b", Dtype.FP4),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "deepseek-ai/DeepSeek-R1", Dtype.FP4),
        ("moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2", Dtype.INT4),
        ("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2", Dtype.FP8),
        (
            "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
            "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
            None,
        ),
    ],
)
def test_a_name_is_recognized_with_its_usual_suffixes(
    said: str, hub_id: str, dtype: Dtype | None
) -> None:
    assert find_shape(said).name == hub_id
    assert dtype_hint(said) is dtype


@pytest.mark.parametrize("hub_id", KNOWN_MODELS)
def test_every_known_model_is_found_by_its_own_id(hub_id: str) -> None:
    assert find_shape(hub_id) is KNOWN_MODELS[hub_id]


@pytest.mark.parametrize("shape", KNOWN_MODELS.values(), ids=list(KNOWN_MODELS))
def test_known_shapes_are_consistent(shape: ModelShape) -> None:
    assert shape.heads % shape.kv_heads == 0
    assert 0 <= shape.windowed_layers <= shape.layers
    assert (shape.window_tokens is None) == (shape.windowed_layers == 0)
    assert shape.active_parameters <= shape.parameters
    assert shape.experts is None or shape.experts.active <= shape.experts.count


def test_an_unknown_model_is_answered_with_near_names() -> None:
    with pytest.raises(UnknownModel) as caught:
        find_shape("meta-llama/Llama-3.1-71B")
    assert "'meta-llama/Llama-3.1-71B'" in caught.value.reason
    assert "meta-llama/Llama-3.1-70B" in caught.value.remedy
    assert "config.json" in caught.value.remedy


def test_an_unknown_model_gets_no_hint() -> None:
    assert dtype_hint("someone/something") is None
    assert dtype_hint("someone/something-fp8") is Dtype.FP8


# ---------- what drafting gains, against the paper's figures and against rolling dice
@pytest.mark.parametrize(
    ("acceptance", "drafted", "tokens"),
    [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5), (0.8, 5, 3.68928), (0.6, 3, 2.176)],
)
def test_a_step_yields_a_geometric_series(acceptance: float, drafted: int, tokens: float) -> None:
    assert expected_tokens(acceptance, drafted) == pytest.approx(tokens)


@given(st.floats(0, 1), st.integers(0, 12))
def test_the_closed_form_is_the_sum_of_its_terms(acceptance: float, drafted: int) -> None:
    """The token behind the k-th accepted one is there with probability a^k."""
    terms = sum(acceptance**k for k in range(drafted + 1))
    assert expected_tokens(acceptance, drafted) == pytest.approx(terms, rel=1e-9)


def test_rolling_dice_yields_as_many_tokens() -> None:
    rng = random.Random(5)
    acceptance, drafted, steps = 0.7, 4, 40_000
    tokens = 0
    for _ in range(steps):
        tokens += 1
        for _ in range(drafted):
            if rng.random() >= acceptance:
                break
            tokens += 1
    assert tokens / steps == pytest.approx(expected_tokens(acceptance, drafted), rel=0.01)


@pytest.mark.parametrize(
    ("acceptance", "drafted", "draft_cost", "times"),
    [(0.6, 2, 0.02, 1.88), (0.8, 5, 0.02, 3.35), (0.9, 10, 0.02, 5.72), (0.8, 5, 0.1, 2.46)],
)
def test_tokens_come_as_many_times_faster_as_the_formula_says(
    acceptance: float, drafted: int, draft_cost: float, times: float
) -> None:
    assert speedup(acceptance, drafted, draft_cost=draft_cost) == pytest.approx(times, abs=0.01)


def test_a_full_batch_pays_for_checking_and_then_drafting_may_lose() -> None:
    assert step_cost(4, draft_cost=0.05) == pytest.approx(1.2)
    assert step_cost(4, draft_cost=0.05, verify_cost=3.0) == pytest.approx(3.2)
    assert speedup(0.7, 4, draft_cost=0.05) > 2
    assert speedup(0.7, 4, draft_cost=0.05, verify_cost=5.0) < 1


def test_without_drafting_nothing_changes() -> None:
    assert speedup(0.9, 0, draft_cost=0.5) == 1.0


@given(st.floats(0, 0.99), st.floats(0.001, 1))
def test_the_best_number_is_the_best_of_all(acceptance: float, draft_cost: float) -> None:
    gains = [speedup(acceptance, drafted, draft_cost=draft_cost) for drafted in range(17)]
    assert gains[best_draft_length(acceptance, draft_cost=draft_cost)] == pytest.approx(max(gains))


def test_drafting_that_costs_more_than_it_is_accepted_does_not_pay() -> None:
    assert best_draft_length(0.2, draft_cost=0.3) == 0
    assert best_draft_length(0.99, draft_cost=0.01) == 16


@pytest.mark.parametrize(("acceptance", "drafted"), [(-0.1, 1), (1.1, 1), (0.5, -1)])
def test_senseless_figures_are_refused(acceptance: float, drafted: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1, at least 0"):
        expected_tokens(acceptance, drafted)
