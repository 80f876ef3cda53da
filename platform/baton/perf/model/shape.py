"""The shape of a model: what its `config.json` says, and what follows for weights and KV.

Parameters are those of the matrices. Biases, norms and learned positions are left out; together
they are below 1 % of the models here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype
from baton.perf.model.config_json import ConfigJson

_FP32_BYTES: Final = 4
_FP8_BLOCK: Final = 128
"""Numbers of a latent or of an indexer's key that share a scale."""
_FP4_BLOCK: Final = 16
"""Numbers that share a scale of one byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): one compressed key-value per token for all heads."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward part of a layer."""

    count: int
    active: int
    """Chosen per token."""
    width: int
    """Of one expert's feed-forward."""
    shared: int = 0
    """Experts that every token goes through, counted in widths of one."""
    dense_layers: int = 0
    """Layers with a plain feed-forward instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """With latent attention 1: all heads read the same."""
    head_dim: int
    ffn_width: int
    vocab: int
    gated_ffn: bool = True
    """Three matrices (gate, up, down) instead of two."""
    tied_embeddings: bool = False
    latent: LatentAttention | None = None
    indexer_dim: int | None = None
    """Of the keys by which sparse attention chooses what to attend to (DeepSeek-V3.2)."""
    experts: Experts | None = None
    window_tokens: int | None = None
    windowed_layers: int = 0
    """Layers that attend to the last `window_tokens` only."""
    max_len_tokens: int = 131_072

    # ------------------------------------------------------------------ the parts of a layer

    @property
    def kv_projection_parameters(self) -> int:
        """What makes keys and values of one layer; not split among more than `kv_heads` devices.

        With latent attention: both projections down, which no device can do without.
        """
        if self.latent is None:
            return 2 * self.hidden * self.kv_heads * self.head_dim
        latent_width = self.latent.kv_rank + self.latent.rope_dim + (self.latent.query_rank or 0)
        return self.hidden * latent_width

    @property
    def attention_parameters(self) -> int:
        """The attention part of one layer."""
        if self.latent is None:
            return 2 * self.hidden * self.heads * self.head_dim + self.kv_projection_parameters
        latent = self.latent
        query_from = latent.query_rank or self.hidden
        query = query_from * self.heads * (latent.nope_dim + latent.rope_dim)
        key_value = latent.kv_rank * self.heads * (latent.nope_dim + latent.value_dim)
        output = self.heads * latent.value_dim * self.hidden
        return self.kv_projection_parameters + query + key_value + output

    @property
    def ffn_parameters(self) -> int:
        """The feed-forward part of one layer without experts."""
        return self._ffn(self.ffn_width)

    @property
    def expert_parameters(self) -> int:
        """One expert of one layer; 0 without experts."""
        return self._ffn(self.experts.width) if self.experts else 0

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    def _ffn(self, width: int) -> int:
        return (3 if self.gated_ffn else 2) * self.hidden * width

    # ------------------------------------------------------------------ weights

    @property
    def common_layer_parameters(self) -> int:
        """What every token goes through, all layers together.

        Attention, plain feed-forwards, routers and shared experts.
        """
        dense_ffns = (self.layers - self.expert_layers) * self.ffn_parameters
        expert_layer_parameters = 0
        if self.experts:
            per_layer = self.hidden * self.experts.count
            per_layer += self.experts.shared * self.expert_parameters
            expert_layer_parameters = self.expert_layers * per_layer
        return self.layers * self.attention_parameters + dense_ffns + expert_layer_parameters

    @property
    def layer_parameters(self) -> int:
        """All layers together with all their experts; neither embeddings nor output."""
        count = self.experts.count if self.experts else 0
        return self.common_layer_parameters + self._expert_parameters_of(count)

    @property
    def active_layer_parameters(self) -> int:
        """Those of all layers that one token is multiplied with."""
        active = self.experts.active if self.experts else 0
        return self.common_layer_parameters + self._expert_parameters_of(active)

    @property
    def output_parameters(self) -> int:
        """The matrix from the last hidden state to the vocabulary, also where it is tied."""
        return self.vocab * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Embeddings and output as they are stored: once when tied."""
        return self.output_parameters * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layer_parameters + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """As models are advertised: all but the experts that a token does not go through."""
        return self.active_layer_parameters + self.embedding_parameters

    def touched_parameters(self, tokens: float) -> float:
        """Those of all layers that a step with so many tokens has to read; without the output.

        Each token is taken to choose its experts independently of the others and evenly, so that of
        E experts E (1 - (1 - k/E)^tokens) are expected to be chosen by someone.
        Source: expectation of independent choices; NVIDIA "Beyond the Buzz" (2506.05508) alike.
        """
        if self.experts is None:
            return float(self.common_layer_parameters)
        count, active = self.experts.count, self.experts.active
        touched_experts = count * (1.0 - (1.0 - active / count) ** tokens)
        return self.common_layer_parameters + self._expert_parameters_of(touched_experts)

    def _expert_parameters_of(self, experts: float) -> int:
        return round(self.expert_layers * experts * self.expert_parameters)

    # ------------------------------------------------------------------ KV cache

    def kv_layer_bytes(self, dtype: Dtype) -> float:
        """What one layer keeps of one token: keys and values, or what they are unpacked from.

        Scales are part of it where each head of a token has its own (8 and 4 bits by integers, 4 by
        floating point), and so are an indexer's keys, in FP8. Latent attention with an indexer
        keeps its rotary part in 16 bits beside an FP8 latent, and in 8 beside an FP4 one.
        Source: 2 x heads x dimension for grouped queries (2305.13245); DeepSeek-V2 (2405.04434),
        §2.1.3: d_c + d_rope; vLLM 0.32's specs: `MLAAttention.get_kv_cache_spec` (656 and 352 bytes
        for 512 + 64), `DeepseekV32IndexerCache` (132 for 128), `TritonAttentionBackend` and
        `FlashInferBackend.customize_spec`.
        """
        if self.latent is None:
            head_bytes = self.head_dim * DTYPE_BYTES[dtype] + _scale_bytes(self.head_dim, dtype)
            return 2 * self.kv_heads * head_bytes
        rank, rope = self.latent.kv_rank, self.latent.rope_dim
        if self.indexer_dim is None:
            return (rank + rope) * DTYPE_BYTES[dtype]
        indexer_bytes = self.indexer_dim + _FP32_BYTES * (self.indexer_dim // _FP8_BLOCK)
        match dtype:
            case Dtype.FP8:
                latent_bytes = (
                    rank + _FP32_BYTES * (rank // _FP8_BLOCK) + rope * DTYPE_BYTES[Dtype.BF16]
                )
            case Dtype.FP4:
                latent_bytes = rank * DTYPE_BYTES[dtype] + _scale_bytes(rank, dtype) + rope
            case _:
                latent_bytes = (rank + rope) * DTYPE_BYTES[dtype]
        return latent_bytes + indexer_bytes

    def kv_token_bytes(self, dtype: Dtype) -> float:
        """What one token takes in all layers, on all devices together, each value counted once.

        Layers with a window count in full; see `kv_bytes`.
        """
        return self.layers * self.kv_layer_bytes(dtype)

    def kv_bytes(self, tokens: int, dtype: Dtype) -> float:
        """What one request of so many tokens takes; windowed layers keep their window only."""
        layer_tokens = self.layers * tokens
        if self.window_tokens is not None:
            layer_tokens -= self.windowed_layers * max(0, tokens - self.window_tokens)
        return layer_tokens * self.kv_layer_bytes(dtype)


def _scale_bytes(values: int, dtype: Dtype) -> float:
    """Of so many numbers of one head and token."""
    match dtype:
        case Dtype.INT8 | Dtype.INT4:
            return _FP32_BYTES
        case Dtype.FP4:
            return values / _FP4_BLOCK
        case Dtype.FP32 | Dtype.BF16 | Dtype.FP16 | Dtype.FP8:
            return 0
        case _:
            assert_never(dtype)


def from_config(config: Mapping[str, object], *, name: str) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; `name` is what errors call it.

    Raises:
        UnknownModel: a key is missing or senseless, or the architecture is none that is known here.
    """
    config_json = ConfigJson(config, name)
    hidden = config_json.count("hidden_size", "n_embd", "d_model")
    heads = config_json.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = config_json.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    latent = _latent(config_json)
    window_tokens, windowed_layers = config_json.window_layout(layers)
    head_dim = latent.nope_dim + latent.rope_dim if latent else config_json.head_dim(hidden, heads)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if latent else config_json.kv_heads(heads),
        head_dim=head_dim,
        ffn_width=config_json.ffn_width(hidden),
        vocab=config_json.count("vocab_size", "padded_vocab_size"),
        gated_ffn=config_json.gated_ffn,
        tied_embeddings=config_json.tied_embeddings,
        latent=latent,
        indexer_dim=config_json.optional_count("index_head_dim") if latent else None,
        experts=_experts(config_json, layers),
        window_tokens=window_tokens,
        windowed_layers=windowed_layers,
        max_len_tokens=config_json.max_len_tokens,
    )


def weights_dtype(config: Mapping[str, object]) -> Dtype:
    """How a `config.json` says that most weights are stored."""
    return ConfigJson(config, "").weights_dtype


def _latent(config_json: ConfigJson) -> LatentAttention | None:
    if config_json.optional_count("kv_lora_rank") is None:
        return None
    return LatentAttention(
        kv_rank=config_json.count("kv_lora_rank"),
        rope_dim=config_json.count("qk_rope_head_dim"),
        nope_dim=config_json.count("qk_nope_head_dim"),
        value_dim=config_json.count("v_head_dim"),
        query_rank=config_json.optional_count("q_lora_rank"),
    )


def _experts(config_json: ConfigJson, layers: int) -> Experts | None:
    count = config_json.optional_count(
        "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
    )
    if count is None or count == 1:
        return None
    active = config_json.count(
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"
    )
    width = config_json.count("moe_intermediate_size", "expert_hidden_size", "intermediate_size")
    return Experts(
        count=count,
        active=active,
        width=width,
        shared=config_json.shared_experts(width),
        dense_layers=config_json.dense_layers(layers),
    )
