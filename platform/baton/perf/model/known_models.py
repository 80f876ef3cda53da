"""Shapes of known models by name, without a download.

Source: the `config.json` that the authors of each family publish with the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.config_json import from_config
from baton.perf.model.layers import Experts, Indexer, LatentAttention
from baton.perf.model.quantization import experts_only_weights, stored_weights
from baton.perf.model.shape import ModelShape
from baton.perf.model.weight_formats import MX_GROUP, MXFP4, Format, integers, nvfp4

_IGNORED_NAME_PARTS = frozenset(
    {"instruct", "chat", "hf", "it", "base", "pt", "meta", "dynamic", "block", "quantized", "text"}
    | {"thinking", "preview", "original", "pro", "128k", "gguf", "mlx", "unsloth", "bnb", "a16"}
    | {
        "speciale",
        "exp",
        "0528",
        "0324",
        "0905",
        "2507",
        "0711",
        "0725",
        "fp8kv",
        "kv",
        "static",
        "pertensor",
        "terminus",
        "hybrid",
    }
)
"""Parts of names that do not change the shape."""
_DTYPE_BY_NAME_PART: Mapping[str, Dtype] = {
    "fp8": Dtype.FP8,
    "float8": Dtype.FP8,
    "w8a8": Dtype.INT8,
    "int8": Dtype.INT8,
    "w8a16": Dtype.INT8,
    "int4": Dtype.INT4,
    "4bit": Dtype.INT4,
    "w4a16": Dtype.INT4,
    "awq": Dtype.INT4,
    "gptq": Dtype.INT4,
    "fp4": Dtype.FP4,
    "nvfp4": Dtype.FP4,
    "mxfp4": Dtype.FP4,
    "bf16": Dtype.BF16,
    "fp16": Dtype.FP16,
}
"""Parts of names that state how the weights are stored."""
_STORED_AS: Mapping[str, Dtype] = {
    "openai/gpt-oss": Dtype.FP4,
    "deepseek-ai/DeepSeek-V3": Dtype.FP8,
    "deepseek-ai/DeepSeek-R1": Dtype.FP8,
    "MiniMaxAI/MiniMax-M2": Dtype.FP8,
    "moonshotai/Kimi-K2.5": Dtype.INT4,
    "moonshotai/Kimi-K2.6": Dtype.INT4,
    "moonshotai/Kimi-K2": Dtype.FP8,
    "deepseek-ai/DeepSeek-V4": Dtype.FP4,
}
"""Models that their authors publish quantized, by the start of their ids."""
_Row = tuple[str, int, int, int, int, int, int, int]
"""Hub id, layers, hidden, heads, KV heads, head dimension, feed-forward width, longest length."""
_K = 1024


def _rows(vocab: int, *rows: _Row, tied: bool = False, gated: bool = True) -> Iterator[ModelShape]:
    for name, layers, hidden, heads, kv_heads, head_dim, ffn_width, max_len_tokens in rows:
        yield ModelShape(
            name=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_width=ffn_width,
            vocab=vocab,
            tied_embeddings=tied,
            gated_ffn=gated,
            max_len_tokens=max_len_tokens,
        )


def _with_window(
    tokens: int, global_every: int, shapes: Iterator[ModelShape]
) -> Iterator[ModelShape]:
    """All layers have a window except each `global_every`-th; 0 for no exception."""
    for shape in shapes:
        global_layers = shape.layers // global_every if global_every else 0
        yield replace(shape, window_tokens=tokens, windowed_layers=shape.layers - global_layers)


def _with_experts(experts: Experts, shapes: Iterator[ModelShape]) -> Iterator[ModelShape]:
    return (replace(shape, experts=experts) for shape in shapes)


def _with_latent_attention(
    query_rank: int | None, shapes: Iterator[ModelShape]
) -> Iterator[ModelShape]:
    """With the dimensions of all DeepSeek models."""
    latent = LatentAttention(
        kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=query_rank
    )
    return (replace(shape, latent=latent) for shape in shapes)


def _llama() -> Iterator[ModelShape]:
    org = "meta-llama/"
    yield from _rows(
        32_000,
        ("huggyllama/llama-7b", 32, 4096, 32, 32, 128, 11_008, 2 * _K),
        ("huggyllama/llama-13b", 40, 5120, 40, 40, 128, 13_824, 2 * _K),
        ("huggyllama/llama-30b", 60, 6656, 52, 52, 128, 17_920, 2 * _K),
        ("huggyllama/llama-65b", 80, 8192, 64, 64, 128, 22_016, 2 * _K),
        (org + "Llama-2-7b-hf", 32, 4096, 32, 32, 128, 11_008, 4 * _K),
        (org + "Llama-2-13b-hf", 40, 5120, 40, 40, 128, 13_824, 4 * _K),
        (org + "Llama-2-70b-hf", 80, 8192, 64, 8, 128, 28_672, 4 * _K),
        ("codellama/CodeLlama-34b-hf", 48, 8192, 64, 8, 128, 22_016, 16 * _K),
        ("lmsys/vicuna-7b-v1.5", 32, 4096, 32, 32, 128, 11_008, 4 * _K),
        ("lmsys/vicuna-13b-v1.5", 40, 5120, 40, 40, 128, 13_824, 4 * _K),
        ("TinyLlama/TinyLlama-1.1B", 22, 2048, 32, 4, 64, 5632, 2 * _K),
    )
    yield from _rows(
        128_256,
        (org + "Meta-Llama-3-8B", 32, 4096, 32, 8, 128, 14_336, 8 * _K),
        (org + "Meta-Llama-3-70B", 80, 8192, 64, 8, 128, 28_672, 8 * _K),
        (org + "Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 128 * _K),
        (org + "Llama-3.1-70B", 80, 8192, 64, 8, 128, 28_672, 128 * _K),
        (org + "Llama-3.1-405B", 126, 16_384, 128, 8, 128, 53_248, 128 * _K),
        (org + "Llama-3.3-70B", 80, 8192, 64, 8, 128, 28_672, 128 * _K),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 32, 4096, 32, 8, 128, 14_336, 128 * _K),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 80, 8192, 64, 8, 128, 28_672, 128 * _K),
    )
    yield from _rows(
        128_256,
        (org + "Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128 * _K),
        (org + "Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128 * _K),
        tied=True,
    )
    yield from _llama_4()


def _llama_4() -> Iterator[ModelShape]:
    """Three layers in four attend to their chunk of 8,192 tokens only."""
    scout = Experts(count=16, active=1, width=8192, shared=1)
    maverick = Experts(count=128, active=1, width=8192, shared=1, dense_layers=24)
    for name, experts, max_len_tokens in (
        ("meta-llama/Llama-4-Scout-17B-16E", scout, 10_240 * _K),
        ("meta-llama/Llama-4-Maverick-17B-128E", maverick, 1024 * _K),
    ):
        row = (name, 48, 5120, 40, 8, 128, 16_384, max_len_tokens)
        yield from _with_window(8192, 4, _with_experts(experts, _rows(202_048, row)))


def _qwen() -> Iterator[ModelShape]:
    org = "Qwen/"
    yield from _rows(
        151_936,
        (org + "Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 32 * _K),
        (org + "Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 32 * _K),
        (org + "Qwen2.5-3B", 36, 2048, 16, 2, 128, 11_008, 32 * _K),
        (org + "Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 40 * _K),
        (org + "Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 40 * _K),
        (org + "Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 40 * _K),
        tied=True,
    )
    yield from _rows(
        152_064,
        (org + "Qwen2-7B", 28, 3584, 28, 4, 128, 18_944, 32 * _K),
        (org + "Qwen2-72B", 80, 8192, 64, 8, 128, 29_568, 32 * _K),
        (org + "Qwen2.5-7B", 28, 3584, 28, 4, 128, 18_944, 32 * _K),
        (org + "Qwen2.5-14B", 48, 5120, 40, 8, 128, 13_824, 32 * _K),
        (org + "Qwen2.5-32B", 64, 5120, 40, 8, 128, 27_648, 32 * _K),
        (org + "Qwen2.5-72B", 80, 8192, 64, 8, 128, 29_568, 32 * _K),
        (org + "QwQ-32B", 64, 5120, 40, 8, 128, 27_648, 40 * _K),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 28, 3584, 28, 4, 128, 18_944, 128 * _K),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 48, 5120, 40, 8, 128, 13_824, 128 * _K),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 64, 5120, 40, 8, 128, 27_648, 128 * _K),
    )
    yield from _rows(
        151_936,
        (org + "Qwen3-8B", 36, 4096, 32, 8, 128, 12_288, 40 * _K),
        (org + "Qwen3-14B", 40, 5120, 40, 8, 128, 17_408, 40 * _K),
        (org + "Qwen3-32B", 64, 5120, 64, 8, 128, 25_600, 40 * _K),
    )
    for row, experts in (
        (("Qwen2-57B-A14B", 28, 3584, 28, 4, 18_944, 32), (64, 8, 2560, 8)),
        (("Qwen3-30B-A3B", 48, 2048, 32, 4, 6144, 40), (128, 8, 768, 0)),
        (("Qwen3-235B-A22B", 94, 4096, 64, 4, 12_288, 40), (128, 8, 1536, 0)),
        (("Qwen3-Coder-480B-A35B", 62, 6144, 96, 8, 8192, 256), (160, 8, 2560, 0)),
        (("Qwen3-Coder-30B-A3B", 48, 2048, 32, 4, 6144, 256), (128, 8, 768, 0)),
    ):
        name, layers, hidden, heads, kv_heads, ffn_width, kilotokens = row
        full = (org + name, layers, hidden, heads, kv_heads, 128, ffn_width, kilotokens * _K)
        yield from _with_experts(_experts(*experts), _rows(151_936, full))


def _qwen_hybrid() -> Iterator[ModelShape]:
    """Each fourth layer has attention; the others keep a state."""
    common = {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 256 * _K,
        "vocab_size": 248_320,
    }
    names = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "linear_num_value_heads",
        "intermediate_size",
    )
    expert_names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    for models, row, mixture in (
        (("Qwen3.5-27B", "Qwen3.6-27B"), (64, 5120, 24, 4, 48, 17_408), ()),
        (("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), (40, 2048, 16, 2, 32), (256, 8, 512)),
        (("Qwen3.5-122B-A10B",), (48, 3072, 32, 2, 64), (256, 8, 1024)),
        (("Qwen3.5-397B-A17B",), (60, 4096, 32, 2, 64), (512, 10, 1024)),
    ):
        experts = dict(zip(expert_names, mixture, strict=False))
        shared = {"shared_expert_intermediate_size": mixture[-1]} if mixture else {}
        text = {**common, **dict(zip(names, row, strict=False)), **experts, **shared}
        for model in models:
            yield from_config({"text_config": text, "vision_config": True}, name="Qwen/" + model)


_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_ULTRA = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*"
    "EMEMEMEM*EMEMEMEME"
)
"""Nemotron 3: Mamba, experts and attention (*), one in each layer."""


def _nemotron_3() -> Iterator[ModelShape]:
    names = ("hidden_size", "num_attention_heads", "mamba_num_heads", "moe_intermediate_size")
    for name, pattern, row, experts, latent in (
        ("Nano-30B-A3B", _NANO, (2688, 32, 64, 1856), (128, 6), None),
        ("Super-120B-A12B", _SUPER, (4096, 32, 128, 2688), (512, 22), 1024),
        ("Ultra-550B-A55B", _ULTRA, (8192, 64, 256, 5120), (512, 22), 2048),
    ):
        config = {
            **dict(zip(names, row, strict=True)),
            "model_type": "nemotron_h",
            "num_hidden_layers": len(pattern),
            "hybrid_override_pattern": pattern,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "intermediate_size": row[-1],
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "n_routed_experts": experts[0],
            "num_experts_per_tok": experts[1],
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 2 * row[-1],
            "moe_latent_size": latent,
            "vocab_size": 131_072,
            "max_position_embeddings": 256 * _K,
        }
        yield from_config(config, name=f"nvidia/NVIDIA-Nemotron-3-{name}")


def _selective() -> Iterator[ModelShape]:
    """Models that attend to the tokens that an index selects, or to some of different sizes."""
    v4_flash = {
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4],
        "index_head_dim": 128,
        "index_n_heads": 64,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "vocab_size": 129_280,
        "max_position_embeddings": 1024 * _K,
    }
    shape = from_config(v4_flash, name="deepseek-ai/DeepSeek-V4-Flash")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    published = {**v4_flash, "quantization_config": blocks, "expert_dtype": "fp4"}
    yield replace(shape, stored=stored_weights(published, shape))
    sparse = {"sparse_index_dim": 128, "sparse_num_index_heads": 4}
    minimax = {
        "model_type": "minimax_m3",
        "hidden_size": 6144,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12_288,
        "moe_layer_freq": [0] * 3 + [1] * 57,
        "sparse_attention_config": {**sparse, "sparse_attention_freq": [0] * 3 + [1] * 57},
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "vocab_size": 200_064,
        "max_position_embeddings": 1024 * _K,
    }
    yield from_config(minimax, name="MiniMaxAI/MiniMax-M3")
    gemma_4 = {
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "num_global_key_value_heads": 2,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "layer_types": ([*["sliding_attention"] * 5, "full_attention"]) * 5,
        "sliding_window": 1024,
        "intermediate_size": 2112,
        "enable_moe_block": True,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
        "vocab_size": 262_144,
        "max_position_embeddings": 256 * _K,
    }
    whole = {"text_config": gemma_4, "vision_config": True}
    yield from_config(whole, name="google/gemma-4-26B-A4B")


def _qwen_vision() -> Iterator[ModelShape]:
    """The language models of Qwen3-VL are those of Qwen3, for longer prompts."""
    for size in ("2B", "4B", "8B", "32B", "30B-A3B", "235B-A22B"):
        text = {"2B": "1.7B"}.get(size, size)
        (shape,) = (shape for shape in _qwen() if shape.name == f"Qwen/Qwen3-{text}")
        yield replace(
            shape,
            name=f"Qwen/Qwen3-VL-{size}",
            max_len_tokens=256 * _K,
            left_out=("the vision encoder",),
        )


def _experts(count: int, active: int, width: int, shared: int) -> Experts:
    return Experts(count=count, active=active, width=width, shared=shared)


def _mistral() -> Iterator[ModelShape]:
    org = "mistralai/"
    row = (org + "Mistral-7B-v0.1", 32, 4096, 32, 8, 128, 14_336, 32 * _K)
    yield from _with_window(4096, 0, _rows(32_000, row))
    yield from _rows(32_000, (org + "Mistral-7B-v0.2", 32, 4096, 32, 8, 128, 14_336, 32 * _K))
    yield from _rows(
        32_768,
        (org + "Mistral-7B-v0.3", 32, 4096, 32, 8, 128, 14_336, 32 * _K),
        (org + "Mistral-Large-2407", 88, 12_288, 96, 8, 128, 28_672, 128 * _K),
        (org + "Codestral-22B-v0.1", 56, 6144, 48, 8, 128, 16_384, 32 * _K),
    )
    yield from _rows(
        131_072,
        (org + "Mistral-Nemo-2407", 40, 5120, 32, 8, 128, 14_336, 128 * _K),
        (org + "Mistral-Small-24B-2501", 40, 5120, 32, 8, 128, 32_768, 32 * _K),
    )
    eight_of_7 = (org + "Mixtral-8x7B-v0.1", 32, 4096, 32, 8, 128, 14_336, 32 * _K)
    yield from _with_experts(_experts(8, 2, 14_336, 0), _rows(32_000, eight_of_7))
    eight_of_22 = (org + "Mixtral-8x22B-v0.1", 56, 6144, 48, 8, 128, 16_384, 64 * _K)
    yield from _with_experts(_experts(8, 2, 16_384, 0), _rows(32_000, eight_of_22))


_INDEXERS = {"deepseek-ai/DeepSeek-V3.2": Indexer(dim=128, heads=64)}


def _deepseek() -> Iterator[ModelShape]:
    for org, names, row, experts in (
        (
            "deepseek-ai/",
            ("DeepSeek-V2-Lite",),
            (27, 2048, 16, 10_944, 160, 102_400, None),
            (64, 6, 1408, 2, 1),
        ),
        (
            "deepseek-ai/",
            ("DeepSeek-V2", "DeepSeek-V2.5"),
            (60, 5120, 128, 12_288, 160, 102_400, 1536),
            (160, 6, 1536, 2, 1),
        ),
        (
            "deepseek-ai/",
            ("DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.1", "DeepSeek-V3.2"),
            (61, 7168, 128, 18_432, 160, 129_280, 1536),
            (256, 8, 2048, 1, 3),
        ),
        (
            "moonshotai/",
            ("Kimi-K2",),
            (61, 7168, 64, 18_432, 128, 163_840, 1536),
            (384, 8, 2048, 1, 1),
        ),
        (
            "moonshotai/",
            ("Kimi-K2.5", "Kimi-K2.6"),
            (61, 7168, 64, 18_432, 256, 163_840, 1536),
            (384, 8, 2048, 1, 1),
        ),
    ):
        layers, hidden, heads, ffn_width, kilotokens, vocab, query_rank = row
        count, active, width, shared, dense_layers = experts
        mixture = replace(_experts(count, active, width, shared), dense_layers=dense_layers)
        for name in names:
            full = (org + name, layers, hidden, heads, 1, 192, ffn_width, kilotokens * _K)
            shapes = _with_latent_attention(query_rank, _with_experts(mixture, _rows(vocab, full)))
            indexer = _INDEXERS.get(org + name)
            yield from (replace(shape, indexer=indexer) for shape in shapes)


def _openai() -> Iterator[ModelShape]:
    for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
        row = ("openai/" + name, layers, 2880, 64, 8, 64, 2880, 128 * _K)
        yield from _with_window(
            128, 2, _with_experts(_experts(experts, 4, 2880, 0), _rows(201_088, row))
        )
    gpt_2 = ("openai-community/gpt2", 12, 768, 12, 12, 64, 3072, _K)
    yield from _rows(50_257, gpt_2, tied=True, gated=False)


def _opt() -> Iterator[ModelShape]:
    sizes = {
        "125m": (12, 768, 12),
        "1.3b": (24, 2048, 32),
        "2.7b": (32, 2560, 32),
        "6.7b": (32, 4096, 32),
        "13b": (40, 5120, 40),
        "30b": (48, 7168, 56),
        "66b": (64, 9216, 72),
        "175b": (96, 12_288, 96),
    }
    for size, (layers, hidden, heads) in sizes.items():
        row = (f"facebook/opt-{size}", layers, hidden, heads, heads, hidden // heads, 4 * hidden)
        yield from _rows(50_272, (*row, 2 * _K), tied=True, gated=False)


def _gemma() -> Iterator[ModelShape]:
    org = "google/"
    second = _rows(
        256_000,
        (org + "gemma-2-2b", 26, 2304, 8, 4, 256, 9216, 8 * _K),
        (org + "gemma-2-9b", 42, 3584, 16, 8, 256, 14_336, 8 * _K),
        (org + "gemma-2-27b", 46, 4608, 32, 16, 128, 36_864, 8 * _K),
        tied=True,
    )
    yield from _with_window(4096, 2, second)
    small = (org + "gemma-3-1b", 26, 1152, 4, 1, 256, 6912, 32 * _K)
    yield from _with_window(512, 6, _rows(262_144, small, tied=True))
    third = _rows(
        262_208,
        (org + "gemma-3-4b", 34, 2560, 8, 4, 256, 10_240, 128 * _K),
        (org + "gemma-3-12b", 48, 3840, 16, 8, 256, 15_360, 128 * _K),
        (org + "gemma-3-27b", 62, 5376, 32, 16, 128, 21_504, 128 * _K),
        tied=True,
    )
    yield from _with_window(1024, 6, third)


def _phi() -> Iterator[ModelShape]:
    org = "microsoft/"
    phi_2 = (org + "phi-2", 32, 2560, 32, 32, 80, 10_240, 2 * _K)
    yield from _rows(51_200, phi_2, gated=False)
    yield from _rows(
        32_064,
        (org + "Phi-3-mini-4k", 32, 3072, 32, 32, 96, 8192, 4 * _K),
        (org + "Phi-3-mini-128k", 32, 3072, 32, 32, 96, 8192, 128 * _K),
        (org + "Phi-3-medium-128k", 40, 5120, 40, 10, 128, 17_920, 128 * _K),
    )
    yield from _rows(100_352, (org + "phi-4", 40, 5120, 40, 10, 128, 17_920, 16 * _K))
    mini = (org + "Phi-4-mini", 32, 3072, 24, 8, 128, 8192, 128 * _K)
    yield from _rows(200_064, mini, tied=True)


def _qwen_before_2() -> Iterator[ModelShape]:
    """Every head has keys and values of its own."""
    org = "Qwen/"
    yield from _rows(
        151_936,
        (org + "Qwen-7B", 32, 4096, 32, 32, 128, 11_008, 32 * _K),
        (org + "Qwen1.5-7B", 32, 4096, 32, 32, 128, 11_008, 32 * _K),
    )
    yield from _rows(
        152_064,
        (org + "Qwen-14B", 40, 5120, 40, 40, 128, 13_696, 8 * _K),
        (org + "Qwen1.5-14B", 40, 5120, 40, 40, 128, 13_696, 32 * _K),
        (org + "Qwen-72B", 80, 8192, 64, 64, 128, 24_576, 32 * _K),
        (org + "Qwen1.5-72B", 80, 8192, 64, 64, 128, 24_576, 32 * _K),
    )


def _others() -> Iterator[ModelShape]:
    intern = ("internlm/internlm-20b", 60, 5120, 40, 40, 128, 13_824, 4 * _K)
    yield from _rows(103_168, intern)
    mimo = ("XiaomiMiMo/MiMo-7B", 36, 4096, 32, 8, 128, 11_008, 32 * _K)
    yield from _rows(151_680, mimo)
    smol = ("HuggingFaceTB/SmolLM2-1.7B", 24, 2048, 32, 32, 64, 8192, 8 * _K)
    yield from _rows(49_152, smol, tied=True)
    minimax = tuple(
        (f"MiniMaxAI/MiniMax-{version}", 62, 3072, 48, 8, 128, 1536, max_len_tokens)
        for version, max_len_tokens in (("M2", 192 * _K), ("M2.5", 192 * _K), ("M2.7", 200 * _K))
    )
    yield from _with_experts(_experts(256, 8, 1536, 0), _rows(200_064, *minimax))
    yield from _rows(
        250_880,
        ("bigscience/bloom", 70, 14_336, 112, 112, 128, 57_344, 2 * _K),
        ("bigscience/bloom-7b1", 30, 4096, 32, 32, 128, 16_384, 2 * _K),
        tied=True,
        gated=False,
    )
    yield from _rows(
        65_024,
        ("tiiuae/falcon-7b", 32, 4544, 71, 1, 64, 18_176, 2 * _K),
        ("tiiuae/falcon-40b", 60, 8192, 128, 8, 64, 32_768, 2 * _K),
        ("tiiuae/falcon-180B", 80, 14_848, 232, 8, 64, 59_392, 2 * _K),
        tied=True,
        gated=False,
    )
    neox = ("EleutherAI/gpt-neox-20b", 44, 6144, 64, 64, 96, 24_576, 2 * _K)
    yield from _rows(50_432, neox, gated=False)
    yield from _rows(
        64_000,
        ("01-ai/Yi-6B", 32, 4096, 32, 4, 128, 11_008, 4 * _K),
        ("01-ai/Yi-34B", 60, 7168, 56, 8, 128, 20_480, 4 * _K),
    )
    for name, row, mixture in (
        ("zai-org/GLM-4.5", (92, 5120, 12_288), (160, 1536, 3)),
        ("zai-org/GLM-4.6", (92, 5120, 12_288), (160, 1536, 3)),
        ("zai-org/GLM-4.5-Air", (46, 4096, 10_944), (128, 1408, 1)),
    ):
        (layers, hidden, ffn_width), (count, width, dense_layers) = row, mixture
        experts = replace(_experts(count, 8, width, 1), dense_layers=dense_layers)
        full = (name, layers, hidden, 96, 8, 128, ffn_width, 128 * _K)
        yield from _with_experts(experts, _rows(151_552, full))
    latent = LatentAttention(kv_rank=512, rope_dim=64, nope_dim=192, value_dim=256, query_rank=2048)
    experts = replace(_experts(256, 8, 2048, 1), dense_layers=3)
    for name, max_len_tokens, indexer_layers in (
        ("zai-org/GLM-5", 198 * _K, None),
        ("zai-org/GLM-5.1", 198 * _K, None),
        ("zai-org/GLM-5.2", 1024 * _K, 21),
        ("zai-org/GLM-5.3", 1024 * _K, 21),
    ):
        full = (name, 78, 6144, 64, 1, 256, 12_288, max_len_tokens)
        yield from (
            replace(
                shape,
                latent=latent,
                indexer=Indexer(dim=128, heads=32),
                indexer_layers=indexer_layers,
            )
            for shape in _with_experts(experts, _rows(154_880, full))
        )


_FAMILIES = (
    _llama,
    _qwen,
    _qwen_before_2,
    _qwen_hybrid,
    _qwen_vision,
    _nemotron_3,
    _selective,
    _mistral,
    _deepseek,
    _openai,
    _opt,
    _gemma,
    _phi,
    _others,
)

_EXPERTS_ONLY: Mapping[str, Format] = {
    "openai/gpt-oss": MXFP4,
    "moonshotai/Kimi-K2.5": integers(4, MX_GROUP, zero_point=False),
    "moonshotai/Kimi-K2.6": integers(4, MX_GROUP, zero_point=False),
}
"""Formats of routed experts where the authors quantize only these, by the start of ids."""


def _as_stored(shape: ModelShape) -> ModelShape:
    formats = (own for start, own in _EXPERTS_ONLY.items() if shape.name.startswith(start))
    own = next(formats, None)
    return shape if own is None else replace(shape, stored=experts_only_weights(own, shape))


KNOWN_MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {shape.name: _as_stored(shape) for family in _FAMILIES for shape in family()}
)
"""By hub id."""


def find_shape(hub_id: str) -> ModelShape:
    """The shape of a model by its hub id, or by that of a variant of the same shape.

    Case, organisation, tuning and quantization in the id do not matter for the shape. Of models
    with experts that are named after NVFP4, only the routed experts are stored so, as NVIDIA does.

    Raises:
        UnknownModel: the model is not known.
    """
    normalized = _normalize_name(hub_id)
    shape = _BY_NORMALIZED_NAME.get(normalized) or _BY_NORMALIZED_NAME.get(
        re.sub(r"-v\d(\.\d)?$", "", normalized)
    )
    if shape is None:
        similar = get_close_matches(normalized, _BY_NORMALIZED_NAME, n=3, cutoff=0.5)
        names = (
            ", ".join(_BY_NORMALIZED_NAME[similar_name].name for similar_name in similar)
            or "another name"
        )
        raise UnknownModel(
            f"the shape of {hub_id!r} is not known by its name",
            f"try {names}, or give the path of its config.json",
        )
    is_nvfp4 = not {"nvfp4", "fp4"}.isdisjoint(_parts(hub_id))
    if is_nvfp4 and shape.experts is not None:
        return replace(shape, stored=experts_only_weights(nvfp4(None), shape))
    return shape


def dtype_hint(hub_id: str) -> Dtype | None:
    """The storage type of the weights by the name; None when the name does not tell."""
    parts = _parts(hub_id)
    for part in parts:
        if part in _DTYPE_BY_NAME_PART:
            return _DTYPE_BY_NAME_PART[part]
    if parts == _TRAINED_IN_INT4:
        return Dtype.INT4
    shape = _BY_NORMALIZED_NAME.get(_normalize_name(hub_id))
    if shape is None:
        return None
    dtypes = (dtype for start, dtype in _STORED_AS.items() if shape.name.startswith(start))
    return None if "Distill" in shape.name else next(dtypes, None)


_TRAINED_IN_INT4 = ["kimi", "k2", "thinking"]
"""Source: moonshotai/Kimi-K2-Thinking, model card: native INT4 of the experts."""


def _parts(hub_id: str) -> list[str]:
    return re.split(r"[-_]", hub_id.rstrip("/").rsplit("/", 1)[-1].lower())


def _normalize_name(hub_id: str) -> str:
    parts = [
        part
        for part in _parts(hub_id)
        if part not in _IGNORED_NAME_PARTS and part not in _DTYPE_BY_NAME_PART
    ]
    return re.sub(r"^llama-?(\d)", r"llama-\1", "-".join(parts))


def _normalized_names() -> Iterator[tuple[str, ModelShape]]:
    for shape in KNOWN_MODELS.values():
        normalized = _normalize_name(shape.name)
        # BLOOM's id has no size, but common names have.
        if normalized == "bloom":
            yield "bloom-176b", shape
        # `mixtral-8x7b` equals its only version; of several versions, the last is used.
        yield re.sub(r"-v0\.\d$", "", normalized), shape
        yield normalized, shape


_BY_NORMALIZED_NAME: Mapping[str, ModelShape] = MappingProxyType(dict(_normalized_names()))
