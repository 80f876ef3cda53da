"""What is said of vLLM's defaults, against the vLLM that is installed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import CATALOGUE
from baton.perf.model.engine_defaults import (
    BLOCK_SIZE_TOKENS,
    GPU_MEMORY_UTILIZATION,
    BatchDefaults,
    cpu_batch_defaults,
    gpu_batch_defaults,
)
from baton.perf.model.known_models import find_shape
from baton.perf.model.shape import ModelShape

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.config import CacheConfig
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext


def vllms(monkeypatch: pytest.MonkeyPatch, **platform: object) -> BatchDefaults:
    """By vLLM, on a device that says this of itself."""
    here = SimpleNamespace(
        is_tpu=lambda: False,
        is_cpu=lambda: False,
        is_device_capability=lambda _capability: False,
        **platform,
    )
    monkeypatch.setattr(arg_utils, "current_platform", here)
    tokens, requests = arg_utils.EngineArgs.get_batch_defaults(1)
    context = UsageContext.OPENAI_API_SERVER
    return BatchDefaults(requests[context], tokens[context])


@pytest.mark.parametrize("name", CATALOGUE)
def test_batches_are_as_large_as_vllm_makes_them_on_that_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CATALOGUE[name]
    found = vllms(
        monkeypatch,
        get_device_total_memory=lambda: device.memory_bytes,
        get_device_name=lambda: device.name,
    )
    assert gpu_batch_defaults(device) == found


@pytest.mark.parametrize("workers", [1, 4])
def test_batches_are_as_large_as_vllm_makes_them_on_cpus(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"is_cpu": lambda: True}
    monkeypatch.setattr(
        arg_utils, "current_platform", SimpleNamespace(is_tpu=lambda: False, **here)
    )
    tokens, requests = arg_utils.EngineArgs.get_batch_defaults(workers)
    context = UsageContext.OPENAI_API_SERVER
    assert cpu_batch_defaults(workers) == (requests[context], tokens[context])


def test_the_share_of_memory_and_the_size_of_blocks_are_vllms() -> None:
    assert CacheConfig().gpu_memory_utilization == GPU_MEMORY_UTILIZATION
    assert CacheConfig.DEFAULT_BLOCK_SIZE == BLOCK_SIZE_TOKENS


# -------------------------------------------------------------------- formats of KV blocks


pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_kv_cache_full_dim
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    from baton.engine.vllm.patches.engine_reports import block_bytes

BLOCK = 64


def of_vllm(shape: ModelShape, said: str) -> int:
    """Bytes of a block of all layers, by the specs of vLLM's layers."""
    layer: dict[str, object] = {}
    if shape.latent is None:
        layer["attention"] = TritonAttentionBackend.customize_spec(
            FullAttentionSpec(
                block_size=BLOCK,
                num_kv_heads=shape.kv_heads,
                head_size=shape.head_dim,
                dtype=STR_DTYPE_TO_TORCH_DTYPE[said],
                kv_quant_mode=get_kv_quant_mode(said),
            )
        )
    else:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        attention = SimpleNamespace(
            kv_cache_dtype=said,
            head_size=shape.latent.kv_rank + shape.latent.rope_dim,
            sliding_window=None,
            indexer=None,
            non_causal_multi_token_decode=False,
            topk_buffer_width=None,  # asked for by 0.33
        )
        layer["attention"] = MLAAttention.get_kv_cache_spec(attention, config)
        if shape.indexer is not None:
            keys = SimpleNamespace(
                cache_config=config.cache_config,
                # Source: `Indexer` in vLLM's deepseek_v2.py, with blocks of 128 a scale.
                head_dim=shape.indexer.dim + shape.indexer.dim // 128 * 4,
                dtype=torch.uint8,
            )
            layer["indexer"] = DeepseekV32IndexerCache.get_kv_cache_spec(keys, config)
    one = block_bytes([layer], BLOCK)
    assert one is not None
    return one * shape.layers


@pytest.mark.parametrize(
    ("model", "said", "dtype"),
    [
        ("meta-llama/Llama-3.1-8B", "bfloat16", Dtype.BF16),
        ("meta-llama/Llama-3.1-8B", "fp8", Dtype.FP8),
        ("meta-llama/Llama-3.1-8B", "int8_per_token_head", Dtype.INT8),
        ("meta-llama/Llama-3.1-70B", "fp8_per_token_head", Dtype.INT8),
        ("meta-llama/Llama-3.1-70B", "int4_per_token_head", Dtype.INT4),
        ("deepseek-ai/DeepSeek-V3", "bfloat16", Dtype.BF16),
        ("deepseek-ai/DeepSeek-V3", "fp8", Dtype.FP8),
        ("deepseek-ai/DeepSeek-V3.2", "bfloat16", Dtype.BF16),
        ("deepseek-ai/DeepSeek-V3.2", "fp8_ds_mla", Dtype.FP8),
        ("deepseek-ai/DeepSeek-V3.2", "nvfp4_ds_mla", Dtype.FP4),
    ],
)
def test_a_token_takes_what_vllms_layers_say(model: str, said: str, dtype: Dtype) -> None:
    shape = find_shape(model)
    assert shape.kv_bytes(BLOCK, dtype) == of_vllm(shape, said)


def test_four_bits_by_floating_point_have_their_scales() -> None:
    shape = find_shape("meta-llama/Llama-3.1-8B")
    # Source: FlashInferBackend.customize_spec, which is not to be had on a CPU.
    side = nvfp4_kv_cache_full_dim(shape.head_dim)
    assert shape.kv_layer_bytes(Dtype.FP4) == 2 * shape.kv_heads * side


def test_deepseek_v32_takes_656_bytes_and_132_for_its_indexer() -> None:
    assert find_shape("deepseek-ai/DeepSeek-V3.2").kv_layer_bytes(Dtype.FP8) == 656 + 132
