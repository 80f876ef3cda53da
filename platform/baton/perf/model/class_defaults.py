"""Defaults of configuration classes, for keys that a `config.json` omits."""

from __future__ import annotations

from collections.abc import Mapping

TIED_BY_DEFAULT = frozenset(
    {"gpt2", "gpt_bigcode", "gpt_neo", "bloom", "opt", "falcon", "RefinedWeb", "RefinedWebModel"}
    | {"mpt", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "starcoder2"}
    | {"gemma4_text", "gemma4_unified_text", "lfm2", "lfm2_moe", "cohere2_moe", "ernie4_5"}
    | {"ernie4_5_moe", "granite_swa", "minicpm3", "modernbert-decoder", "smollm3", "vaultgemma"}
    | {"youtu"}
)
"""Model types whose configuration classes in Hugging Face transformers default to tied embeddings
(`tie_word_embeddings`)."""
WINDOW_PERIODS: Mapping[str, int] = {
    "gemma2": 2,
    "vaultgemma": 2,
    "gpt_oss": 2,
    "llama4_text": 4,
    "cohere2": 4,
    "olmo3": 4,
    "gemma3": 6,
    "gemma3_text": 6,
}
"""Every n-th layer attends to all tokens, where older configs do not list layers."""
_TYPES: Mapping[str, Mapping[int, str]] = {
    "block_auto_adjust_ff_dim": {
        True: "lfm2",
    },
    "first_k_dense_replace": {
        1: "axk1 axk2 glm4_moe glm4_moe_lite glm4v_moe_text hy_v3 hy_v4 kimi_linear laguna",
        3: "deepseek_v3",
    },
    "head_dim": {
        64: "gpt_oss",
        128: (
            "afmoe cohere2_moe cwm ernie4_5 glm glm4 helium hy_v3 laguna llama4_text mellum "
            "minimax_m2 minimax_m3_vl_text ministral3 nemotron_h qwen3 qwen3_vl_text seed_oss "
            "solar_open"
        ),
        256: (
            "gemma gemma2 gemma3_text gemma4_text gemma4_unified_text qwen3_5_moe_text "
            "qwen3_5_text qwen3_next vaultgemma"
        ),
    },
    "hidden_size_per_layer_input": {
        256: "gemma4_text",
    },
    "index_head_dim": {
        128: "axk2 deepseek_v32 glm_moe_dsa hy_v4",
    },
    "intermediate_size": {
        21_504: "nemotron_h",
    },
    "is_moe": {
        False: "doge",
    },
    "kv_lora_rank": {
        256: "minicpm3 mistral4",
        512: "kimi_linear",
    },
    "mamba_d_ssm": {
        1024: "falcon_h1",
    },
    "moe_intermediate_size": {
        512: "axk2 laguna qwen3_5_moe_text qwen3_next",
        768: "hy_v4 qwen3_moe",
        896: "mellum",
        1024: "exaone_moe kimi_linear",
        1280: "solar_open",
        1408: "afmoe glm4_moe glm4v_moe_text qwen2_moe qwen3_vl_moe_text",
        1536: "ernie4_5_moe glm4_moe_lite hy_v3",
        2048: "axk1 deepseek_v3 deepseek_v32 glm_moe_dsa mistral4",
        7688: "nemotron_h",
    },
    "moe_layer_start_index": {
        1: "ernie4_5_moe",
    },
    "moe_num_experts": {
        8: "aria_text",
        64: "ernie4_5_moe",
    },
    "moe_num_shared_experts": {
        2: "aria_text ernie4_5_moe",
    },
    "n_routed_experts": {
        64: "glm4_moe_lite",
        128: "axk2 glm4_moe glm4v_moe_text mistral4 solar_open",
        192: "axk1",
        256: "deepseek_v3 deepseek_v32 glm_moe_dsa hy_v4",
    },
    "n_shared_experts": {
        1: (
            "axk1 axk2 deepseek_v3 deepseek_v32 glm4_moe glm4_moe_lite glm4v_moe_text "
            "glm_moe_dsa hy_v4 mistral4 nemotron_h solar_open"
        ),
    },
    "num_attention_heads": {
        8: "gemma3_text",
    },
    "num_dense_layers": {
        1: "afmoe",
    },
    "num_experts": {
        7: "flex_olmo",
        8: "cohere2_moe",
        16: "jamba",
        60: "qwen2_moe",
        64: "afmoe exaone_moe olmoe",
        192: "hy_v3",
        256: "kimi_linear laguna qwen3_5_moe_text",
        512: "qwen3_next",
    },
    "num_key_value_heads": {
        2: "ernie4_5 glm glm4 glm4v_text qwen3_5_moe_text qwen3_next starcoder2",
        4: (
            "ernie4_5_moe gemma2 gemma3_text gemma4_text gemma4_unified_text granite_swa "
            "mellum minimax_m3_vl_text qwen3_5_text qwen3_moe smollm3 vaultgemma"
        ),
        5: "bitnet",
        8: (
            "cwm falcon_h1 glm4_moe glm4v_moe_text gpt_oss hy_v3 jamba laguna lfm2 "
            "llama4_text minimax_m2 ministral3 mistral mixtral nemotron_h phi4_multimodal "
            "phimoe qwen2_5_vl_text qwen2_vl_text seed_oss solar_open"
        ),
        16: "gemma qwen2_moe qwen3_vl_moe_text",
        32: "exaone4 exaone_moe qwen2 qwen3 qwen3_vl_text stablelm",
    },
    "num_local_experts": {
        8: "granitemoe granitemoe_swa granitemoeshared mixtral",
        16: "llama4_text phimoe",
        60: "qwen3_vl_moe_text",
        64: "mellum",
        128: "gpt_oss minimax_m3_vl_text qwen3_moe",
        256: "minimax_m2",
    },
    "num_shared_experts": {
        1: "exaone_moe hy_v3 kimi_linear",
        2: "afmoe",
    },
    "q_lora_rank": {
        384: "axk2",
        768: "glm4_moe_lite minicpm3",
        1024: "mistral4",
        1536: "axk1 deepseek_v3 deepseek_v32 hy_v4 youtu",
        2048: "glm_moe_dsa",
    },
    "shared_expert_intermediate_size": {
        512: "laguna qwen3_5_moe_text qwen3_next",
        5632: "qwen2_moe",
    },
    "sliding_window": {
        64: "modernbert-decoder",
        128: "gpt_oss granite_swa granitemoe_swa",
        512: "gemma4_text",
        1024: "afmoe gemma4_unified_text",
        4096: (
            "cohere2 cohere2_moe exaone4 exaone_moe gemma2 gemma3_text mistral olmo3 vaultgemma"
        ),
    },
    "vocab_size": {
        262_208: "gemma3_text",
    },
}
"""Values of keys, with the types of models that have them where their config omits the key.

Only those that change a shape. Source: the configuration classes of transformers 5.
"""
CLASS_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    model_type: {
        key: value
        for key, values in _TYPES.items()
        for value, types in values.items()
        if model_type in types.split()
    }
    for model_type in sorted(
        {each for values in _TYPES.values() for own in values.values() for each in own.split()}
    )
}
LISTED: Mapping[str, frozenset[str]] = {
    "layer_types": frozenset(
        {"afmoe", "granite_swa", "granitemoe_swa", "laguna", "mellum", "modernbert-decoder"}
    ),
    "indexer_types": frozenset({"hy_v4"}),
}
"""Lists without which it is not known which layers have which attention."""
