"""Bytes of each matrix as quantizations store them, against sums and published files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.config_json import from_config
from baton.perf.model.known_models import find_shape
from baton.perf.model.layers import Part, StoredWeights
from baton.perf.model.memory import ModelSplit
from baton.perf.model.quantization import kv_dtype, stored_weights

DENSE: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
}
EXPERTS: Mapping[str, Any] = {
    **DENSE,
    "model_type": "deepseek_v3",
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1024,
}
HALF = 2.0
NVFP4 = 0.5 + 1 / 16


def bytes_of(
    config: Mapping[str, Any], method: str | None, **quantization: object
) -> Mapping[Part, float]:
    return stored(config, method, **quantization).bytes_by_part


def stored(config: Mapping[str, Any], method: str | None, **quantization: object) -> StoredWeights:
    named = {} if method is None else {"quant_method": method}
    quantized = {**config, "quantization_config": {**named, **quantization}}
    return stored_weights(quantized, from_config(config, name="mine"))


@pytest.mark.parametrize(
    ("method", "quantization", "parameter_bytes"),
    [
        pytest.param("fp8", {}, 1, id="a scale of a matrix"),
        pytest.param(
            "fp8", {"weight_block_size": [128, 128]}, 1 + 4 / 128**2, id="a scale of a block"
        ),
        pytest.param("fbgemm_fp8", {}, 1 + 4 / 1024, id="a scale of an output"),
        pytest.param("awq", {"bits": 4, "group_size": 64}, 0.5 + 2.5 / 64, id="AWQ"),
        pytest.param("gptq", {"bits": 8, "group_size": 128}, 1 + 3 / 128, id="GPTQ"),
        pytest.param("gptq", {"bits": 3, "group_size": 128}, (3 + 19 / 128) / 8, id="3 bits"),
        pytest.param("gptq", {"bits": 2, "group_size": 64}, (2 + 18 / 64) / 8, id="2 bits"),
        pytest.param("gptq", {"bits": 4, "group_size": -1}, 0.5 + 2.5 / 1024, id="no groups"),
        pytest.param("bitsandbytes", {"load_in_4bit": True}, 0.5 + 4 / 64, id="NF4"),
        pytest.param(
            "bitsandbytes",
            {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            0.5 + (1 + 4 / 256) / 64,
            id="scales that are quantized",
        ),
        pytest.param("modelopt", {"quant_algo": "FP8"}, 1, id="ModelOpt"),
        pytest.param(
            "modelopt", {"quant_algo": "NVFP4", "ignore": [], "group_size": 16}, NVFP4, id="NVFP4"
        ),
        pytest.param(
            None, {"quant_algo": "W4A16_AWQ", "exclude_modules": []}, 0.5 + 2 / 128, id="its AWQ"
        ),
        pytest.param("modelopt", {"quant_algo": "MXFP8"}, 1 + 1 / 32, id="MXFP8"),
    ],
)
def test_a_matrix_is_stored_with_its_scales(
    method: str, quantization: dict[str, object], parameter_bytes: float
) -> None:
    """All have 1,024 inputs, but the down-projection."""
    found = bytes_of(DENSE, method, **quantization)
    assert found[Part.ATTENTION] == pytest.approx(parameter_bytes, abs=1e-5)
    assert found[Part.EMBEDDING] == HALF


@pytest.mark.parametrize(
    ("weights", "parameter_bytes"),
    [
        ({"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}, 0.5 + 2 / 32),
        ({"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False}, 0.5 + 2.5 / 32),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, 1 + 4 / 1024),
        ({"num_bits": 4, "type": "float", "group_size": 16}, NVFP4),
        ({"num_bits": 4, "type": "float", "group_size": 32}, 0.5 + 1 / 32),
    ],
)
def test_compressed_tensors_say_it_by_group(
    weights: dict[str, object], parameter_bytes: float
) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    found = bytes_of(DENSE, "compressed-tensors", config_groups=groups)
    assert found[Part.ATTENTION] == pytest.approx(parameter_bytes, abs=1e-9)


def test_several_groups_store_what_they_name() -> None:
    four = {"num_bits": 4, "type": "float", "group_size": 16}
    groups = {
        "group_0": {"targets": ["re:.*mlp.*"], "weights": four},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
    }
    found = stored(DENSE, "compressed-tensors", config_groups=groups)
    assert found.bytes_by_part[Part.FFN] == NVFP4
    assert found.bytes_by_part[Part.ATTENTION] == pytest.approx(1)
    assert found.bytes_by_part[Part.OUTPUT] == HALF
    assert (found.dtype, found.label) == (Dtype.FP4, "fp4")


@pytest.mark.parametrize(
    ("method", "quantization", "wide"),
    [
        ("fp8", {"modules_to_not_convert": ["model.layers.0.self_attn.o_proj"]}, 1 / 8),
        ("fp8", {"ignored_layers": ["self_attn"]}, 1),
        ("awq", {"bits": 4, "group_size": 128, "modules_to_not_convert": ["o_proj"]}, 1 / 2),
        ("modelopt", {"quant_algo": "FP8", "ignore": ["model.layers.1.self_attn*"]}, 1 / 4),
        ("modelopt", {"quant_algo": "FP8", "exclude_modules": ["*.layers.*.self_attn.*"]}, 1),
        ("modelopt", {"quant_algo": "FP8", "ignore": ["model.layers.1.*"]}, 1 / 4),
        ("modelopt", {"quant_algo": "FP8", "ignore": ["language_model.model.layers.0*"]}, 1 / 4),
        ("gptq", {"bits": 8, "group_size": -1, "dynamic": {"-:.*o_proj.*": {}}}, 1 / 2),
        ("bitsandbytes", {"load_in_8bit": True, "llm_int8_skip_modules": ["q_proj"]}, 1 / 2),
    ],
)
def test_matrices_that_a_quantization_leaves_out_have_16_bits(
    method: str, quantization: dict[str, object], wide: float
) -> None:
    """Queries and outputs are of the same size; `wide` is the share of both in all layers."""
    found = bytes_of(DENSE, method, **quantization)
    narrow_bytes = found[Part.FFN] if wide == 1 else None
    quantized = bytes_of(
        DENSE,
        method,
        **{
            key: value
            for key, value in quantization.items()
            if key not in {"modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"}
            and key not in {"dynamic", "llm_int8_skip_modules"}
        },
    )
    narrow_bytes = quantized[Part.ATTENTION]
    expected = wide * HALF + (1 - wide) * narrow_bytes
    assert found[Part.ATTENTION] == pytest.approx(expected, rel=1e-6)


def test_layer_1_is_not_layer_10() -> None:
    """Of twelve layers, `layers.1*` names three, `layers.1.*` one."""
    config = {**DENSE, "num_hidden_layers": 12}
    for pattern, layers in (("model.layers.1*", 3), ("model.layers.1.*", 1)):
        found = bytes_of(config, "modelopt", quant_algo="FP8", ignore=[pattern])
        assert found[Part.FFN] == pytest.approx((12 + layers) / 12, rel=1e-6)


def test_each_layer_may_have_an_algorithm_of_its_own() -> None:
    layers = {
        f"model.language_model.layers.{layer}.{name}": {"quant_algo": algorithm, "group_size": 16}
        for layer in range(4)
        for name, algorithm in (
            ("self_attn.q_proj", "FP8"),
            ("mlp.gate_proj", "W4A16_NVFP4"),
            ("mlp.up_proj", "W4A16_NVFP4"),
            ("mlp.down_proj", "W4A16_NVFP4"),
        )
    } | {"lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    found = bytes_of(DENSE, "modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert found[Part.FFN] == found[Part.OUTPUT] == NVFP4
    assert found[Part.ATTENTION] == pytest.approx((1 + HALF) / 2)
    assert found[Part.KEY_VALUE] == HALF


def test_an_entry_may_name_the_experts_of_a_layer() -> None:
    layers = {f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4"} for layer in range(4)}
    found = bytes_of(EXPERTS, "modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert found[Part.EXPERTS] == NVFP4
    assert found[Part.SHARED_EXPERTS] == found[Part.ATTENTION] == HALF


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "experts_int8"])
def test_routers_and_embeddings_are_never_quantized(method: str) -> None:
    found = bytes_of(EXPERTS, method)
    assert found[Part.ROUTER] == found[Part.EMBEDDING] == found[Part.OUTPUT] == HALF
    assert found[Part.EXPERTS] <= 1 + 4 / 1024


def test_a_compression_config_is_a_quantization() -> None:
    quantization = {"quant_method": "fp8"}
    config = {**DENSE, "compression_config": quantization}
    assert stored_weights(config, from_config(DENSE, name="mine")).dtype is Dtype.FP8


@pytest.mark.parametrize("scheme", ["FP8", {"num_bits": 8, "type": "float"}])
def test_a_scheme_of_the_kv_cache_is_a_name_or_an_object(scheme: object) -> None:
    config = {**DENSE, "quantization_config": {"quant_algo": "FP8", "kv_cache_scheme": scheme}}
    assert kv_dtype(config) is Dtype.FP8


def test_fp4_without_the_names_of_modules_that_it_leaves_out_is_refused() -> None:
    with pytest.raises(UnknownModel, match="NVFP4 without 'exclude_modules'"):
        stored(DENSE, "modelopt", quant_algo="NVFP4")


@pytest.mark.parametrize(
    ("hub_id", "weights", "gigabytes"),
    [
        pytest.param("moonshotai/Kimi-K2.5", Dtype.INT4, 594.2, id="experts in 4 bits only"),
        pytest.param("openai/gpt-oss-120b", Dtype.FP4, 65.2, id="gpt-oss 120b"),
        pytest.param("openai/gpt-oss-20b", Dtype.FP4, 13.76, id="gpt-oss 20b"),
        pytest.param("deepseek-ai/DeepSeek-V4-Flash", Dtype.FP4, 155.9, id="FP8 beside FP4"),
        pytest.param("nvidia/MiniMax-M2.5-NVFP4", Dtype.FP4, 134.4, id="NVFP4 by name"),
        pytest.param("nvidia/GLM-5.3-NVFP4", Dtype.FP4, 444.9, id="NVFP4 of GLM by name"),
    ],
)
def test_models_of_which_only_experts_are_quantized_are_known_so(
    hub_id: str, weights: Dtype, gigabytes: float
) -> None:
    """Of gpt-oss and Kimi the published files, of the others the sums of `benchmarks.fidelity`."""
    found = ModelSplit(shape=find_shape(hub_id)).stage_weights_bytes(0, weights)
    assert found / 1e9 == pytest.approx(gigabytes, rel=0.002)
