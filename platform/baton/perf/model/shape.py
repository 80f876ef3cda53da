"""Shape of a model, and resulting sizes of weights and KV cache.

Parameters are those of the matrices. Biases, norms and learned positions are left out: below 1 % of
the known models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, assert_never

from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype

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
    """A mixture of experts instead of the feed-forward part of a layer."""

    count: int
    active: int
    """Chosen per token."""
    width: int
    """Of one expert's feed-forward."""
    shared: int = 0
    """Experts that every token passes through, in widths of one routed expert."""
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
    """1 with latent attention: all heads share it."""
    head_dim: int
    ffn_width: int
    vocab: int
    gated_ffn: bool = True
    """Three matrices (gate, up, down) instead of two."""
    tied_embeddings: bool = False
    latent: LatentAttention | None = None
    indexer_dim: int | None = None
    """Of the keys that select tokens for sparse attention (DeepSeek-V3.2)."""
    indexer_layers: int | None = None
    """Layers with such keys, which others share (GLM-5.2); None: each has its own."""
    experts: Experts | None = None
    window_tokens: int | None = None
    windowed_layers: int = 0
    """Layers that attend only to the last `window_tokens`."""
    max_len_tokens: int = 131_072
    left_out: tuple[str, ...] = field(default=(), compare=False)
    """Parts of the model whose weights are not counted."""

    # ------------------------------------------------------------------ the parts of a layer

    @property
    def kv_projection_parameters(self) -> int:
        """Of one layer's keys and values; at most `kv_heads` devices split these.

        With latent attention: both down-projections, copied to each device.
        """
        if self.latent is None:
            return 2 * self.hidden * self.kv_heads * self.head_dim
        latent_width = self.latent.kv_rank + self.latent.rope_dim + (self.latent.query_rank or 0)
        return self.hidden * latent_width

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
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
        """Of one layer without experts."""
        return self._ffn(self.ffn_width)

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer; 0 without experts."""
        return self._ffn(self.experts.width) if self.experts else 0

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    def _ffn(self, width: int) -> int:
        return (3 if self.gated_ffn else 2) * self.hidden * width

    # ------------------------------------------------------------------ weights

    @property
    def common_layer_parameters(self) -> int:
        """Of all layers, without embeddings and routed experts: those that every token uses."""
        dense_ffns = (self.layers - self.expert_layers) * self.ffn_parameters
        expert_layer_parameters = 0
        if self.experts:
            per_layer = self.hidden * self.experts.count
            per_layer += self.experts.shared * self.expert_parameters
            expert_layer_parameters = self.expert_layers * per_layer
        return self.layers * self.attention_parameters + dense_ffns + expert_layer_parameters

    @property
    def layer_parameters(self) -> int:
        """Of all layers with all experts, without embeddings and output."""
        count = self.experts.count if self.experts else 0
        return self.common_layer_parameters + self._expert_parameters_of(count)

    @property
    def active_layer_parameters(self) -> int:
        """Of all layers, those that one token uses."""
        active = self.experts.active if self.experts else 0
        return self.common_layer_parameters + self._expert_parameters_of(active)

    @property
    def output_parameters(self) -> int:
        """The matrix from the last hidden state to the vocabulary, also when tied."""
        return self.vocab * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Embeddings and output as stored: once when tied."""
        return self.output_parameters * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layer_parameters + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """As models are advertised: without the experts that a token does not use."""
        return self.active_layer_parameters + self.embedding_parameters

    def touched_parameters(self, tokens: float) -> float:
        """Expected parameters of all layers that a step of `tokens` reads; without the output.

        Tokens are taken to choose experts independently and evenly. Of E experts, they touch E (1 -
        (1 - k/E)^tokens).

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
        """Bytes of one token in one layer, on average: keys and values, or their latent.

        They include scales where each head of a token has its own (8 and 4 bits by integers, 4 by
        floating point), and an indexer's keys in FP8. With an indexer, the rotary part has 16 bits
        beside an FP8 latent and 8 beside an FP4 latent.

        Source: 2 x heads x dimension for grouped queries (2305.13245); DeepSeek-V2 (2405.04434),
        §2.1.3: d_c + d_rope. vLLM 0.32's specs: `MLAAttention.get_kv_cache_spec` (656 and 352 bytes
        for 512 + 64), `DeepseekV32IndexerCache` (132 for 128), `TritonAttentionBackend` and
        `FlashInferBackend.customize_spec`.
        """
        if self.latent is None:
            head_bytes = self.head_dim * DTYPE_BYTES[dtype] + _scale_bytes(self.head_dim, dtype)
            return 2 * self.kv_heads * head_bytes
        rank, rope = self.latent.kv_rank, self.latent.rope_dim
        if self.indexer_dim is None:
            return (rank + rope) * DTYPE_BYTES[dtype]
        indexer_bytes: float = self.indexer_dim + _FP32_BYTES * (self.indexer_dim // _FP8_BLOCK)
        if self.indexer_layers is not None:
            indexer_bytes *= self.indexer_layers / self.layers
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
        """Bytes of one token in all layers and on all devices, each value counted once.

        Windowed layers count in full; see `kv_bytes`.
        """
        return self.layers * self.kv_layer_bytes(dtype)

    def kv_bytes(self, tokens: int, dtype: Dtype) -> float:
        """Bytes of one request of `tokens`; windowed layers keep only their window."""
        layer_tokens = self.layers * tokens
        if self.window_tokens is not None:
            layer_tokens -= self.windowed_layers * max(0, tokens - self.window_tokens)
        return layer_tokens * self.kv_layer_bytes(dtype)


def _scale_bytes(values: int, dtype: Dtype) -> float:
    """Scales of `values` numbers of one head and token."""
    match dtype:
        case Dtype.INT8 | Dtype.INT4:
            return _FP32_BYTES
        case Dtype.FP4:
            return values / _FP4_BLOCK
        case Dtype.FP32 | Dtype.BF16 | Dtype.FP16 | Dtype.FP8:
            return 0
        case _:
            assert_never(dtype)
