"""Models whose layers differ: parameters, KV cache and states, against what is published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.config_json import from_config
from baton.perf.model.known_models import find_shape
from baton.perf.model.layer_work import layer_kinds
from baton.perf.model.memory import MemoryModel
from baton.perf.model.shape import ModelShape

CONFIGS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("hybrid_configs.json").read_text(encoding="utf-8")
)
"""What the authors' config.json says of models, by their ids on the hub."""
QWEN = find_shape("Qwen/Qwen3.5-27B")


def read(hub_id: str) -> ModelShape:
    return from_config(CONFIGS[hub_id], name=hub_id)


@pytest.mark.parametrize(
    ("hub_id", "billions", "active_billions"),
    [
        ("Qwen/Qwen3-Next-80B-A3B", 80, None),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", 31.6, 3.6),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B", 120, None),
        ("nvidia/Nemotron-H-56B-Base-8K", 56, None),
        ("google/gemma-4-26B-A4B", 25.2, 3.8),
        ("moonshotai/Kimi-Linear-48B-A3B", 48, None),
        ("ibm-granite/granite-4.0-h-small", 32, 9),
        ("tiiuae/Falcon-H1-34B", 34, None),
        ("ai21labs/Jamba-v0.1", 52, 12),
        ("LiquidAI/LFM2-1.2B", 1.17, None),
    ],
)
def test_hybrids_have_as_many_parameters_as_their_authors_say(
    hub_id: str, billions: float, active_billions: float | None
) -> None:
    """As rounded in their cards; the transformers oracle has the exact numbers."""
    shape = read(hub_id)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.025)
    if active_billions is not None:
        assert shape.active_parameters / 1e9 == pytest.approx(active_billions, rel=0.025)


@pytest.mark.parametrize(
    ("hub_id", "billions", "active_billions"),
    [("Qwen3.5-27B", 26.9, 26.9), ("Qwen3.5-122B-A10B", 122, 10), ("Qwen3.5-397B-A17B", 397, 17)],
)
def test_qwen_3_5_is_known_by_name(hub_id: str, billions: float, active_billions: float) -> None:
    shape = find_shape(hub_id)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active_billions, rel=0.03)
    assert shape.left_out == ("the vision encoder",)


@pytest.mark.parametrize(
    ("hub_id", "attention_layers", "state_layers", "kv_bytes"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", 6, 23, 6 * 2 * 2 * 128 * 2),
        ("moonshotai/Kimi-Linear-48B-A3B", 7, 20, 7 * 576 * 2),
        ("ibm-granite/granite-4.0-h-small", 4, 36, 4 * 2 * 8 * 128 * 2),
        ("tiiuae/Falcon-H1-34B", 72, 72, 72 * 2 * 4 * 128 * 2),
        ("ai21labs/Jamba-v0.1", 4, 28, 4 * 2 * 8 * 128 * 2),
        ("LiquidAI/LFM2-1.2B", 6, 10, 6 * 2 * 8 * 64 * 2),
        ("google/gemma-4-26B-A4B", 30, 0, 25 * 2 * 8 * 256 * 2 + 5 * 2 * 2 * 512 * 2),
        ("MiniMaxAI/MiniMax-M3", 60, 0, 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2),
        ("XiaomiMiMo/MiMo-V2-Flash", 48, 0, (9 * 4 + 39 * 8) * (192 + 128) * 2),
        ("openbmb/MiniCPM3-4B", 62, 0, 62 * 2 * 40 * 96 * 2),
    ],
)
def test_only_layers_with_attention_keep_keys_and_values(
    hub_id: str, attention_layers: int, state_layers: int, kv_bytes: int
) -> None:
    shape = read(hub_id)
    assert (shape.attention_layers, shape.state_layers) == (attention_layers, state_layers)
    assert shape.kv_token_bytes(Dtype.BF16) == kv_bytes


def test_qwen_keeps_a_state_of_32_bits_and_a_convolutions_last_inputs() -> None:
    """48 layers: 48 heads of 128 x 128 numbers, and three inputs of 2 x 16 x 128 + 48 x 128."""
    assert QWEN.kv_token_bytes(Dtype.BF16) == 65_536
    assert QWEN.state_bytes == 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2)
    config = {**CONFIGS["Qwen/Qwen3-Next-80B-A3B"], "mamba_ssm_dtype": "float32"}
    narrow = read("Qwen/Qwen3-Next-80B-A3B").state_bytes
    assert from_config(config, name="wide").state_bytes > 1.9 * narrow


def test_a_models_states_are_none_where_all_layers_have_attention() -> None:
    shape = find_shape("meta-llama/Llama-3.1-8B")
    assert (shape.state_bytes, shape.state_block_tokens(Dtype.BF16)) == (0, 0)
    assert shape.request_bytes(1000, Dtype.BF16) == shape.kv_bytes(1000, Dtype.BF16)


def test_a_block_of_a_hybrid_is_as_large_as_a_state() -> None:
    """A state has 3.2 MB, a token 4,096 bytes in a layer: blocks of 784 tokens, as vLLM says."""
    assert QWEN.state_block_tokens(Dtype.BF16) == 784
    block_bytes = 784 * 4096
    one = QWEN.request_bytes(1, Dtype.BF16)
    assert one == (16 + 48) * block_bytes
    assert QWEN.request_bytes(784, Dtype.BF16) == one
    assert QWEN.request_bytes(785, Dtype.BF16) == one + 16 * block_bytes


def test_states_leave_room_for_fewer_requests() -> None:
    memory = MemoryModel(shape=QWEN, accelerator=find_accelerator("H200"))
    fit = memory.fit(1, 1)
    assert fit.state_bytes == QWEN.state_bytes
    expected = fit.kv_bytes / QWEN.request_bytes(1024, Dtype.BF16)
    assert fit.concurrent_requests(1024) == pytest.approx(expected, rel=1e-3)
    assert fit.concurrent_requests(1024) < fit.kv_bytes / (1024 * 65_536) / 2


def test_devices_split_states_and_copy_keys_and_values() -> None:
    """Of 397B on 8: one of 2 KV heads, an eighth of each state, so shorter blocks."""
    shape = find_shape("Qwen/Qwen3.5-397B-A17B")
    assert shape.state_block_tokens(Dtype.BF16, 8) == 528
    block_bytes = 528 * 1024
    assert shape.request_bytes(1000, Dtype.BF16, 8) == (15 * 2 + 45) * block_bytes
    fit = MemoryModel(shape=shape, accelerator=find_accelerator("H200")).fit(8, 1)
    expected = fit.kv_bytes / shape.request_bytes(8192, Dtype.BF16, 8)
    assert fit.concurrent_requests(8192) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_of_a_pipeline_hold_all_states_and_keys(pp: int) -> None:
    memory = MemoryModel(shape=QWEN, accelerator=find_accelerator("H200"))
    split = memory.fit(2, pp).split
    assert 2 * sum(map(split.stage_state_bytes, range(pp))) == QWEN.state_bytes
    token_bytes = sum(split.stage_token_bytes(stage, Dtype.BF16) for stage in range(pp))
    assert 2 * token_bytes == QWEN.kv_token_bytes(Dtype.BF16)


@pytest.mark.parametrize("hub_id", list(CONFIGS))
def test_products_of_all_layers_are_all_matrices(hub_id: str) -> None:
    shape = read(hub_id)
    products = 0
    for kind in layer_kinds(shape, 1):
        plain = sum(matrix.inputs * matrix.outputs for matrix in kind.matrices)
        expert = sum(matrix.inputs * matrix.outputs for matrix in kind.expert_matrices)
        count = shape.experts.count if shape.experts else 0
        products += kind.layers * (plain + count * expert)
    assert products == shape.layer_parameters


def test_a_network_of_a_search_has_layers_of_each_size() -> None:
    attention = {"n_heads_in_group": 8, "no_op": False}
    blocks = [
        {"attention": attention, "ffn": {"ffn_mult": 5.25, "no_op": False}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.3, "no_op": False}},
        {"attention": attention, "ffn": {"no_op": True}},
    ]
    config = {
        "model_type": "nemotron-nas",
        "block_configs": blocks,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 3,
        "vocab_size": 1000,
    }
    shape = from_config(config, name="mine")
    assert shape.kv_token_bytes(Dtype.BF16) == 2 * 2 * 8 * 128 * 2
    widths = [layer.ffn_width for layer in shape.kinds]
    assert widths == [28_672, 7168, 0]  # up to multiples of 256
    blocks[0] = {"attention": {**attention, "window_length": 8}, "ffn": {"no_op": True}}
    with pytest.raises(UnknownModel, match="window_length"):
        from_config(config, name="mine")


def test_layers_that_share_keys_keep_none_and_each_layer_may_have_embeddings() -> None:
    """Gemma 4 with its last ten of 30 layers sharing: eight windowed, and two of heads of 512."""
    text = CONFIGS["google/gemma-4-26B-A4B"]["text_config"]
    config = {**text, "num_kv_shared_layers": 10, "hidden_size_per_layer_input": 256}
    shape = from_config(config, name="mine")
    assert shape.kv_token_bytes(Dtype.BF16) == 2 * 2 * (17 * 8 * 256 + 3 * 2 * 512)
    alone = from_config({**config, "hidden_size_per_layer_input": 0}, name="mine")
    mixing = 30 * 256 * 3 * 2816
    assert shape.parameters - alone.parameters == 30 * 256 * 262_144 + mixing
    assert shape.active_parameters - alone.active_parameters == mixing, "one row is looked up"


def test_newer_files_list_heads_of_layers_without_a_window() -> None:
    text = CONFIGS["google/gemma-4-26B-A4B"]["text_config"]
    old_keys = ("global_head_dim", "num_global_key_value_heads")
    config = {key: value for key, value in text.items() if key not in old_keys}
    full = {"head_dim": 512, "num_key_value_heads": 2}
    layers = {f"{layer:02}": full for layer in (5, 11, 17, 23, 29)}
    shape = from_config({**config, "per_layer_config": layers}, name="mine")
    assert shape == replace(from_config(text, name="mine"))
    layers["29"] = {"head_dim": 128}
    with pytest.raises(UnknownModel, match="got layers that differ"):
        from_config({**config, "per_layer_config": layers}, name="mine")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["linear_attention"] * 48}, "no layer with attention"),
        ({"layer_types": ["of_tomorrow"] * 48}, "got of_tomorrow"),
        ({"mamba_d_state": 16}, "a state-space model"),
        ({"linear_num_key_heads": None}, "no 'linear_num_key_heads'"),
    ],
)
def test_unknown_parts_of_a_hybrid_are_refused(changes: dict[str, Any], reason: str) -> None:
    config = {**CONFIGS["Qwen/Qwen3-Next-80B-A3B"], **changes}
    with pytest.raises(UnknownModel, match=reason):
        from_config(config, name="mine")


def test_an_order_names_the_kind_of_each_layer() -> None:
    with pytest.raises(ValueError, match="got an order of 63 layers, expected 64"):
        replace(QWEN, order=QWEN.order[1:])
