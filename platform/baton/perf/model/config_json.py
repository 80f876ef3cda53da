"""Reads a model's shape from its Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from baton.perf.model.config_keys import ENCODERS, ConfigKeys
from baton.perf.model.layers import (
    Attention,
    Compression,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    StateMixer,
    TokenInput,
    delta_attention,
    gated_delta_net,
    mamba_1,
    mamba_2,
    short_convolution,
)
from baton.perf.model.shape import ModelShape

_MAMBA_RANK_DIVISOR: Final = 16
"""Of the hidden size, where `mamba_dt_rank` is "auto"."""
_FULL_ATTENTION: Final = frozenset({"full_attention", "attention", "*"})
_MAX_LAYERS: Final = 10_000
_COMPRESSION_RATIOS: Final = (0, 4, 128)
_GEMMA_GLOBAL_HEAD_DIM: Final = 512
"""Default of Gemma 4's configuration class in transformers."""
_NAS_FFN_MULTIPLE: Final = 256
"""Source: `_find_multiple` of vLLM 0.32's `models/nemotron_nas.py`."""


class _Hybrid(NamedTuple):
    """A family whose layers differ."""

    read: Callable[[ConfigKeys, ModelShape], Sequence[Layer]]
    """Each layer, from the keys and the shape of a model whose layers are alike."""
    understood: tuple[str, ...]
    """Keys, prefixes of keys and types of layers that `read` interprets."""


def from_config(config: Mapping[str, object], *, name: str) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; errors mention `name`.

    Raises:
        UnknownModel: a key is missing or invalid, or the architecture is not supported.
    """
    keys = ConfigKeys(config, name)
    hybrid = _HYBRIDS.get(keys.model_type)
    keys.check_structure(hybrid.understood if hybrid else ())
    shape = _uniform(keys, name)
    if hybrid is None:
        _check_heads(keys, shape)
        return shape
    kinds: dict[Layer, int] = {}
    order = [kinds.setdefault(layer, len(kinds)) for layer in hybrid.read(keys, shape)]
    attention = next((layer.attention for layer in kinds if layer.attention), None)
    if attention is None:
        keys.refuse("layer_types", "no layer with attention", "at least one")
    return replace(
        shape,
        layers=len(order),
        kv_heads=attention.kv_heads,
        ffn_width=max(layer.ffn_width for layer in kinds),
        experts=next((layer.experts for layer in kinds if layer.experts), None),
        kinds=tuple(kinds),
        order=tuple(order),
    )


def _uniform(keys: ConfigKeys, name: str) -> ModelShape:
    hidden = keys.count("hidden_size", "n_embd", "d_model")
    heads = keys.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = _layer_count(keys)
    keys.check_lengths(layers)
    latent, indexer, experts = _latent(keys), _indexer(keys), _experts(keys, layers)
    window_tokens, windowed_layers = keys.window_layout(layers)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if latent else keys.kv_heads(heads),
        head_dim=latent.nope_dim + latent.rope_dim if latent else keys.head_dim(hidden, heads),
        ffn_width=_ffn_width(keys, hidden, experts),
        vocab=keys.count("vocab_size", "padded_vocab_size"),
        gated_ffn=keys.gated_ffn,
        tied_embeddings=keys.tied_embeddings,
        latent=latent,
        indexer=indexer if latent else None,
        indexer_layers=keys.indexer_layers(layers) if latent and indexer else None,
        experts=experts,
        window_tokens=window_tokens,
        windowed_layers=windowed_layers,
        max_len_tokens=keys.max_len_tokens,
        left_out=tuple(part for key, part in ENCODERS.items() if keys.has_part(key)),
    )


def _check_heads(keys: ConfigKeys, shape: ModelShape) -> None:
    """Refuse keys and values that are not those of equal heads."""
    if shape.latent is not None:
        return
    if shape.heads % shape.kv_heads:
        keys.refuse("num_key_value_heads", f"{shape.kv_heads}", f"a divisor of {shape.heads} heads")
    value_dim = keys.optional_count("v_head_dim")
    if value_dim not in {None, shape.head_dim}:
        keys.refuse("v_head_dim", f"{value_dim}", f"the keys' {shape.head_dim}")
    if keys.optional_count("index_head_dim"):
        keys.refuse("index_head_dim", "keys that select tokens", "full or windowed attention")


def _ffn_width(keys: ConfigKeys, hidden: int, experts: Experts | None) -> int:
    """Of a layer without experts; 0 where each layer has its own, or none has any."""
    if keys.value("block_configs") or (experts is not None and not experts.dense_layers):
        return keys.optional_ffn_width(hidden) or 0
    return keys.ffn_width(hidden)


def _layer_count(keys: ConfigKeys) -> int:
    listed = keys.texts("layers_block_type")
    layers = len(listed) or keys.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if layers > _MAX_LAYERS:
        keys.refuse("num_hidden_layers", f"{layers}", f"at most {_MAX_LAYERS}")
    return layers


def _latent(keys: ConfigKeys) -> LatentAttention | None:
    if keys.optional_count("kv_lora_rank") is None:
        return None
    return LatentAttention(
        kv_rank=keys.count("kv_lora_rank"),
        rope_dim=keys.count("qk_rope_head_dim"),
        nope_dim=keys.count("qk_nope_head_dim"),
        value_dim=keys.count("v_head_dim"),
        query_rank=keys.optional_count("q_lora_rank"),
    )


def _indexer(keys: ConfigKeys) -> Indexer | None:
    dim = keys.optional_count("index_head_dim")
    return None if dim is None else Indexer(dim=dim, heads=keys.count("index_n_heads"))


def _experts(keys: ConfigKeys, layers: int) -> Experts | None:
    count = keys.optional_count(
        "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
    )
    if count is None or count == 1 or not keys.has_experts:
        return None
    active = keys.count(
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_k",
    )
    if active > count:
        keys.refuse("num_experts_per_tok", f"{active}", f"at most the {count} experts")
    width = keys.optional_count("moe_intermediate_size", "expert_hidden_size")
    width = width or keys.count("intermediate_size")
    return Experts(
        count=count,
        active=active,
        width=width,
        shared=keys.shared_experts(width),
        dense_layers=keys.dense_layers(layers),
        latent=keys.optional_count("moe_latent_size"),
    )


# --------------------------------------------------------------------------- states


def _gated_delta_net(keys: ConfigKeys, hidden: int) -> StateMixer:
    return gated_delta_net(
        hidden,
        key_heads=keys.count("linear_num_key_heads"),
        value_heads=keys.count("linear_num_value_heads"),
        key_dim=keys.count("linear_key_head_dim"),
        value_dim=keys.count("linear_value_head_dim"),
        kernel=keys.count("linear_conv_kernel_dim"),
        is_fp32=keys.value("mamba_ssm_dtype") == "float32",
    )


def _delta_attention(keys: ConfigKeys, hidden: int) -> StateMixer:
    linear = keys.value("linear_attn_config")
    linear = linear if isinstance(linear, Mapping) else {}
    heads, head_dim, kernel = (
        value if isinstance(value := linear.get(key), int) else keys.count(flat_key)
        for key, flat_key in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    return delta_attention(hidden, heads=heads, head_dim=head_dim, kernel=kernel)


def _mamba_2(keys: ConfigKeys, hidden: int) -> StateMixer:
    """The width is a number of heads of a size, or a multiple of the hidden size."""
    heads = keys.count("mamba_num_heads", "mamba_n_heads")
    if (head_dim := keys.optional_count("mamba_head_dim")) is None:
        width = keys.optional_count("mamba_d_ssm")
        head_dim = (width or (keys.optional_count("mamba_expand") or 2) * hidden) // heads
    # vLLM's `NemotronHForCausalLMConfig` has this default; other families have the model's 16 bits.
    default = "float32" if keys.model_type == "nemotron_h" else None
    return mamba_2(
        hidden,
        heads=heads,
        head_dim=head_dim,
        groups=keys.count("n_groups", "mamba_n_groups"),
        state_size=keys.count("ssm_state_size", "mamba_d_state"),
        kernel=keys.count("conv_kernel", "mamba_d_conv"),
        is_fp32=(keys.value("mamba_ssm_cache_dtype") or default) == "float32",
    )


def _mamba_1(keys: ConfigKeys, hidden: int) -> StateMixer:
    rank = keys.value("mamba_dt_rank")
    return mamba_1(
        hidden,
        width=keys.count("mamba_expand") * hidden,
        rank=rank if isinstance(rank, int) else -(-hidden // _MAMBA_RANK_DIVISOR),
        state_size=keys.count("mamba_d_state"),
        kernel=keys.count("mamba_d_conv"),
    )


# --------------------------------------------------------------------------- families


def _attention(shape: ModelShape, *, gated: bool = False) -> Attention:
    return Attention(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        latent=shape.latent,
        indexer=shape.indexer,
        gated=gated,
    )


def _feed_forward(shape: ModelShape, position: int) -> Layer:
    """The part after attention of a layer; those without experts come first."""
    if shape.experts is None or position < shape.experts.dense_layers:
        return Layer(ffn_width=shape.ffn_width)
    return Layer(experts=shape.experts)


def _mixed(
    shape: ModelShape, types: Sequence[str], attention: Attention, state: StateMixer
) -> Sequence[Layer]:
    """Attention or a state, then a feed-forward, in each layer."""
    return [
        replace(_feed_forward(shape, position), attention=attention)
        if type_ in _FULL_ATTENTION
        else replace(_feed_forward(shape, position), state=state)
        for position, type_ in enumerate(types)
    ]


def _qwen(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Qwen3-Next and Qwen3.5, and OLMo of the same layers, whose attention has no gate."""
    period = keys.optional_count("full_attention_interval") or 4
    types = keys.texts("layer_types") or [
        "full_attention" if (position + 1) % period == 0 else "linear_attention"
        for position in range(shape.layers)
    ]
    gated = keys.model_type != "olmo_hybrid" and keys.value("attn_output_gate") is not False
    attention = _attention(shape, gated=gated)
    return _mixed(shape, types, attention, _gated_delta_net(keys, shape.hidden))


def _kimi_linear(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    linear = keys.value("linear_attn_config")
    listed = linear.get("kda_layers") if isinstance(linear, Mapping) else None
    types: Sequence[str] = keys.texts("layer_types")
    if isinstance(listed, Sequence):  # counted from 1
        types = [
            "linear_attention" if position + 1 in listed else "full_attention"
            for position in range(shape.layers)
        ]
    return _mixed(shape, types, _attention(shape), _delta_attention(keys, shape.hidden))


def _convolutions(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """LFM2, whose width of the feed-forward is a default's share (`block_auto_adjust_ff_dim`)."""
    width = shape.ffn_width
    if keys.value("block_auto_adjust_ff_dim"):
        factor, multiple = (
            keys.value("block_ffn_dim_multiplier"),
            keys.count("block_multiple_of"),
        )
        width = int(2 * width / 3)
        width = int(factor * width) if isinstance(factor, int | float) else width
        width = -(-width // multiple) * multiple
    attention_ids = keys.value("full_attn_idxs")
    types: Sequence[str] = keys.texts("layer_types")
    if not types and isinstance(attention_ids, Sequence):
        types = [
            "full_attention" if position in attention_ids else "conv"
            for position in range(shape.layers)
        ]
    state = short_convolution(shape.hidden, kernel=keys.count("conv_L_cache"))
    return _mixed(replace(shape, ffn_width=width), types, _attention(shape), state)


def _bamba(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    attention_ids = keys.value("attn_layer_indices")
    attention_ids = attention_ids if isinstance(attention_ids, Sequence) else ()
    types = (
        keys.texts("layers_block_type")
        or keys.texts("layer_types")
        or [
            "attention" if position in attention_ids else "mamba"
            for position in range(shape.layers)
        ]
    )
    return _mixed(shape, types, _attention(shape), _mamba_2(keys, shape.hidden))


def _granite(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Granite 4: a shared expert in each layer, and routed experts in some models."""
    shared = keys.count("shared_intermediate_size")
    experts = shape.experts and replace(shape.experts, shared=0, shared_width=shared)
    shape = replace(shape, ffn_width=shared, experts=experts)
    types = keys.texts("layer_types") or keys.texts("layers_block_type")
    return _mixed(shape, types, _attention(shape), _mamba_2(keys, shape.hidden))


def _falcon_h1(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Attention and a state beside each other in each layer."""
    state = _mamba_2(keys, shape.hidden)
    layer = Layer(attention=_attention(shape), state=state, ffn_width=shape.ffn_width)
    return [layer] * shape.layers


def _jamba(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Attention and experts each in every n-th layer."""
    attention, state = _attention(shape), _mamba_1(keys, shape.hidden)
    layers = []
    for position in range(shape.layers):
        has_experts = shape.experts and _is_in_period(keys, "expert_layer", position)
        has_attention = _is_in_period(keys, "attn_layer", position)
        layers.append(
            Layer(
                attention=attention if has_attention else None,
                state=None if has_attention else state,
                ffn_width=0 if has_experts else shape.ffn_width,
                experts=shape.experts if has_experts else None,
            )
        )
    return layers


def _is_in_period(keys: ConfigKeys, name: str, position: int) -> bool:
    offset = keys.optional_count(f"{name}_offset") or 0
    return position % keys.count(f"{name}_period") == offset


def _nemotron_h(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """One of attention, a state, a feed-forward or experts in each layer."""
    pattern = keys.value("hybrid_override_pattern")
    types = keys.texts("layers_block_type") or keys.texts("layer_types")
    types = types or (list(pattern) if isinstance(pattern, str) else [])
    experts = shape.experts
    if experts is not None:
        width = keys.optional_count("moe_shared_expert_intermediate_size") or experts.width
        count = keys.optional_count("n_shared_experts") or 0
        experts = replace(experts, shared=0, shared_width=width * count)
    state = Layer(state=_mamba_2(keys, shape.hidden))
    feed_forward, mixture = Layer(ffn_width=shape.ffn_width), Layer(experts=experts)
    kinds = dict.fromkeys(_FULL_ATTENTION, Layer(attention=_attention(shape)))
    kinds |= dict.fromkeys(("mamba", "linear_attention", "M"), state)
    kinds |= dict.fromkeys(("mlp", "-"), feed_forward)
    kinds |= dict.fromkeys(("moe", "E"), mixture) if experts else {}
    for type_ in types:
        if type_ not in kinds:
            keys.refuse("hybrid_override_pattern", type_, "attention, mamba, mlp or moe")
    return [kinds[type_] for type_ in types]


def _gemma_4(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Layers without a window have heads of another size; experts are beside a feed-forward.

    The last layers of small models use keys and values of earlier layers, and each layer has
    embeddings of its own. Newer files list what differs in `per_layer_config`.
    """
    types = keys.texts("layer_types")
    windowed = replace(_attention(shape), window_tokens=shape.window_tokens)
    full = _gemma_4_full(keys, shape, types)
    width = keys.optional_count("hidden_size_per_layer_input")
    vocab = keys.optional_count("vocab_size_per_layer_input") or shape.vocab
    has_experts = bool(keys.value("enable_moe_block"))
    rest = Layer(
        experts=shape.experts if has_experts else None,
        token_input=TokenInput(width=width, vocab=vocab) if width else None,
    )
    first_shared = len(types) - (keys.optional_count("num_kv_shared_layers") or 0)
    is_doubled = bool(keys.value("use_double_wide_mlp"))
    layers = []
    for position, type_ in enumerate(types):
        is_shared = position >= first_shared
        own = windowed if type_ == "sliding_attention" else full
        layers.append(
            replace(
                rest,
                attention=replace(own, shares_kv=is_shared),
                ffn_width=shape.ffn_width * (2 if is_shared and is_doubled else 1),
            )
        )
    return layers


def _gemma_4_full(keys: ConfigKeys, shape: ModelShape, types: Sequence[str]) -> Attention:
    """Attention of layers without a window."""
    listed = keys.value("per_layer_config")
    changes = list(listed.values()) if isinstance(listed, Mapping) else []
    is_listed = len(changes) == sum(type_ in _FULL_ATTENTION for type_ in types)
    first = changes[0] if changes else {}
    if any(change != first for change in changes) or (changes and not is_listed):
        keys.refuse("per_layer_config", "layers that differ", "layers without a window alike")
    first = first if isinstance(first, Mapping) else {}
    head_dim, kv_heads = first.get("head_dim"), first.get("num_key_value_heads")
    if not isinstance(head_dim, int):
        head_dim = keys.optional_count("global_head_dim") or _GEMMA_GLOBAL_HEAD_DIM
    is_shared = bool(keys.value("attention_k_eq_v"))
    if not isinstance(kv_heads, int):  # those of layers without a window count only with one key
        own = keys.optional_count("num_global_key_value_heads") if is_shared else None
        kv_heads = own or shape.kv_heads
    return replace(
        _attention(shape),
        head_dim=head_dim,
        kv_heads=kv_heads,
        keys_are_values=is_shared,
    )


def _nemotron_nas(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Layers from a search: each has its own numbers of heads and width, or lacks a part.

    Source: `DeciLMDecoderLayer` of vLLM 0.32's `models/nemotron_nas.py`.
    """
    blocks = keys.value("block_configs")
    blocks = blocks if isinstance(blocks, Sequence) else ()
    layers = []
    for block in blocks:
        attention, ffn = _block_part(keys, block, "attention"), _block_part(keys, block, "ffn")
        group, width = attention.get("n_heads_in_group"), ffn.get("intermediate_size")
        if isinstance(factor := ffn.get("ffn_mult"), int | float):
            width = -(-int(2 * factor * shape.hidden / 3) // _NAS_FFN_MULTIPLE) * _NAS_FFN_MULTIPLE
        has_ffn, has_attention = not ffn.get("no_op"), not attention.get("no_op")
        if (has_ffn and not isinstance(width, int)) or (
            has_attention and not (isinstance(group, int) and group > 0)
        ):
            keys.refuse("block_configs", f"{block}", "heads in a group and a width")
        kv_heads = shape.heads // group if isinstance(group, int) else 0
        layers.append(
            Layer(
                attention=replace(_attention(shape), kv_heads=kv_heads) if has_attention else None,
                ffn_width=width if has_ffn and isinstance(width, int) else 0,
            )
        )
    return layers


def _block_part(keys: ConfigKeys, block: object, name: str) -> Mapping[str, object]:
    part = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(part, Mapping):
        keys.refuse("block_configs", f"{block}", f"objects with {name!r}")
    for key in ("replace_with_linear", "window_length", "sparsify", "num_sink_tokens"):
        if part.get(key):
            keys.refuse("block_configs", key, "full attention and feed-forwards")
    return part


def _minimax_m3(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Sparse attention, in all but some layers, selects tokens by a key of 16 bits.

    Source: `MiniMaxM3SparseAttention` and `MiniMaxM3IndexerCache` of vLLM 0.32.
    """
    sparse = keys.value("sparse_attention_config")
    sparse = sparse if isinstance(sparse, Mapping) else {}
    dim, heads = sparse.get("sparse_index_dim"), sparse.get("sparse_num_index_heads")
    listed = sparse.get("sparse_attention_freq")
    used = list(listed) if isinstance(listed, Sequence) else []
    used = used or [type_ == "minimax_m3_sparse" for type_ in keys.texts("layer_types")]
    indexer = Indexer(
        dim=dim if isinstance(dim, int) else keys.count("index_head_dim"),
        heads=heads if isinstance(heads, int) else keys.count("index_n_heads"),
        is_plain=True,
    )
    plain = _attention(shape)
    selecting = replace(plain, indexer=indexer)
    return [
        replace(_feed_forward(shape, position), attention=selecting if is_used else plain)
        for position, is_used in enumerate(used)
    ]


def _mimo_v2(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Windowed layers have heads of their own; values are narrower than keys.

    Source: `MiMoV2DecoderLayer` of vLLM 0.32.
    """
    full = replace(_attention(shape), value_dim=keys.optional_count("v_head_dim"))
    windowed = Attention(
        heads=keys.count("swa_num_attention_heads"),
        kv_heads=keys.count("swa_num_key_value_heads"),
        head_dim=keys.count("swa_head_dim"),
        value_dim=keys.optional_count("swa_v_head_dim"),
        window_tokens=keys.count("sliding_window_size", "sliding_window"),
    )
    pattern = keys.value("hybrid_layer_pattern")  # 1: windowed
    is_windowed = list(pattern) if isinstance(pattern, Sequence) else []
    is_windowed = is_windowed or [
        type_ == "sliding_attention" for type_ in keys.texts("layer_types")
    ]
    return [
        replace(_feed_forward(shape, position), attention=windowed if own else full)
        for position, own in enumerate(is_windowed)
    ]


def _deepseek_v4(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Layers compress keys by 4, 128 or not at all; those by 4 select tokens by an index.

    Source: `DeepseekV4Attention` of vLLM 0.32.
    """
    ratios = keys.value("compress_ratios")
    ratios = list(ratios) if isinstance(ratios, Sequence) else []
    if len(ratios) < shape.layers:
        keys.refuse("compress_ratios", f"{len(ratios)} ratios", f"one for each of {shape.layers}")
    layers = []
    for position, ratio in enumerate(ratios[: shape.layers]):
        if ratio not in _COMPRESSION_RATIOS:
            keys.refuse("compress_ratios", f"{ratio}", "0, 4 or 128")
        compression = Compression(
            ratio=ratio,
            query_rank=keys.count("q_lora_rank"),
            output_rank=keys.count("o_lora_rank"),
            output_groups=keys.count("o_groups"),
            latest_tokens=keys.count("sliding_window"),
            rope_dim=keys.count("qk_rope_head_dim"),
        )
        attention = replace(
            _attention(shape),
            compression=compression,
            indexer=_indexer(keys) if ratio == _COMPRESSION_RATIOS[1] else None,
        )
        layers.append(replace(_feed_forward(shape, position), attention=attention))
    return layers


def _minicpm_3(keys: ConfigKeys, shape: ModelShape) -> Sequence[Layer]:
    """Latent attention of which vLLM keeps the heads (`MiniCPM3Attention`)."""
    del keys
    attention = replace(_attention(shape), kv_heads=shape.heads, keeps_heads=True)
    return [Layer(attention=attention, ffn_width=shape.ffn_width)] * shape.layers


_QWEN: Final = ("full_attention_interval", "attn_output_gate", "mamba_ssm_dtype")
_GEMMA: Final = (
    "global_head_dim",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "per_layer_config",
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
)
_MAMBA: Final = ("mamba", "linear_attention", "attention", "layer_types")
_HYBRIDS: Mapping[str, _Hybrid] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        _Hybrid(
            _qwen,
            ("linear_", "linear_attention", *_QWEN),
        ),
    ),
    "kimi_linear": _Hybrid(_kimi_linear, ("linear_", "linear_attention")),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), _Hybrid(_convolutions, ("conv", "full_attn_idxs", "conv_"))
    ),
    "bamba": _Hybrid(_bamba, (*_MAMBA, "attn_layer_indices")),
    "granitemoehybrid": _Hybrid(_granite, _MAMBA),
    "falcon_h1": _Hybrid(_falcon_h1, (*_MAMBA, "hybrid", "ssm_")),
    "jamba": _Hybrid(_jamba, (*_MAMBA, "attn_layer_")),
    "nemotron_h": _Hybrid(
        _nemotron_h,
        (*_MAMBA, "moe", "mlp", "ssm_state_size", "hybrid_override_pattern", "layers_block_type"),
    ),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _Hybrid(_gemma_4, _GEMMA)),
    "olmo_hybrid": _Hybrid(_qwen, ("linear_", "linear_attention")),
    "nemotron-nas": _Hybrid(_nemotron_nas, ("block_configs",)),
    **dict.fromkeys(
        ("minimax_m3", "minimax_m3_text", "minimax_m3_vl_text"),
        _Hybrid(_minimax_m3, ("sparse_attention_config", "minimax_m3_sparse", "index_")),
    ),
    **dict.fromkeys(
        ("mimo_v2_flash", "mimo_v2"), _Hybrid(_mimo_v2, ("swa_", "hybrid_layer_pattern"))
    ),
    **dict.fromkeys(
        ("deepseek_v4", "deepseek_ref"),
        _Hybrid(_deepseek_v4, ("compress_", "o_lora_rank", "index_")),
    ),
    "minicpm3": _Hybrid(_minicpm_3, ()),
}
"""By the type of the language model."""
