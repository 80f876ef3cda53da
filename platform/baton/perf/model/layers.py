"""Layers of a model: their matrices, and the bytes that they keep of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, assert_never

from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype

_FP32_BYTES: Final = 4
_HALF_BYTES: Final = 2
_FP8_BLOCK: Final = 128
"""Numbers of a latent or of an indexer's key that share a scale."""
_OVERLAPPING_RATIO: Final = 4
_VECTOR_SCALES: Final = 8
_FP4_BLOCK: Final = 16
"""Numbers that share a scale of one byte."""


class Part(StrEnum):
    """The use of a matrix, which decides its format and the devices that have it."""

    ATTENTION = "attention"
    """Queries and output."""
    KEY_VALUE = "key_value"
    """Keys and values; with latent attention the down-projections."""
    INDEXER = "indexer"
    COMPRESSOR = "compressor"
    """To the inputs of compressed keys."""
    STATE = "state"
    """Layers that keep a state instead of keys and values."""
    FFN = "ffn"
    SHARED_EXPERTS = "shared_experts"
    EXPERTS = "experts"
    EXPERT_LATENT = "expert_latent"
    """To and from the narrower input of routed experts."""
    ROUTER = "router"
    EMBEDDING = "embedding"
    OUTPUT = "output"


class Module(NamedTuple):
    """A matrix, or one of each expert, by its name within the layer."""

    name: str
    part: Part
    inputs: int
    outputs: int
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Of all copies."""
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """How the weights of a model are stored."""

    dtype: Dtype
    """Of most weights."""
    label: str
    """The same with its bits, where `dtype` has no member for them."""
    bytes_by_part: Mapping[Part, float]
    """Of one parameter, with its share of scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): one compressed key-value per token for all heads."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Selects tokens for sparse attention by small keys of its own (DeepSeek-V3.2)."""

    dim: int
    heads: int
    is_plain: bool = False
    """Keys have 16 bits (MiniMax-M3), not 8 with scales."""

    @property
    def key_bytes(self) -> int:
        """Of one token in one layer."""
        if self.is_plain:
            return _HALF_BYTES * self.dim
        return self.dim + _FP32_BYTES * (self.dim // _FP8_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Keys of which one stands for `ratio` tokens, beside the latest tokens (DeepSeek-V4).

    One vector of a head is both key and value of all heads. The output is projected in two steps.
    """

    ratio: int
    """0: only the latest tokens."""
    query_rank: int
    output_rank: int
    output_groups: int
    latest_tokens: int
    """Whose vectors are kept as they are."""
    rope_dim: int

    @property
    def overlap(self) -> int:
        """Inputs of a compressed key, in multiples of `ratio`. Source: `DeepseekCompressor`."""
        return 2 if self.ratio == _OVERLAPPING_RATIO else 1

    def compressor(self, name: str, hidden: int, dim: int) -> Iterator[Module]:
        """The matrices that give compressed keys of `dim` numbers, and their weights."""
        for matrix in ("kv_proj", "gate_proj") if self.ratio else ():
            yield Module(name + matrix, Part.COMPRESSOR, hidden, self.overlap * dim)

    def inputs_bytes(self, dim: int) -> int:
        """Of one request: the inputs of the next compressed key, in 32 bits."""
        return 2 * (self.overlap * dim) * _FP32_BYTES * self.overlap * self.ratio


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
    latent: int | None = None
    """Numbers of a token that routed experts see; None: all."""
    shared_width: int | None = None
    """Of all shared experts, where it is no multiple of `width`."""

    @property
    def all_shared_width(self) -> int:
        """Of the feed-forward that all shared experts are together."""
        return self.shared * self.width if self.shared_width is None else self.shared_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of one layer, which keeps keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Of one head's values; None: as of its keys."""
    latent: LatentAttention | None = None
    indexer: Indexer | None = None
    shares_indexer: bool = False
    """Tokens are those that another layer's indexer selects."""
    window_tokens: int | None = None
    gated: bool = False
    """The output is multiplied with a gate, as wide as the queries."""
    keys_are_values: bool = False
    """One projection for both; both are kept."""
    compression: Compression | None = None
    shares_kv: bool = False
    """Keys and values are those of an earlier layer."""
    keeps_heads: bool = False
    """The cache has the heads' keys and values, not their latent."""

    def modules(self, hidden: int) -> Iterator[Module]:
        """The matrices; at most `kv_heads` devices split those of keys and values."""
        if self.latent is not None:
            yield from self._latent_modules(hidden, self.latent)
        elif self.compression is not None:
            yield from self._compressed_modules(hidden, self.compression)
        else:
            values, kv_heads = self.value_dim or self.head_dim, self.kv_heads
            queries = (2 if self.gated else 1) * self.heads * self.head_dim
            yield Module("self_attn.q_proj", Part.ATTENTION, hidden, queries)
            if not self.shares_kv:
                yield Module("self_attn.k_proj", Part.KEY_VALUE, hidden, kv_heads * self.head_dim)
            if not (self.keys_are_values or self.shares_kv):
                yield Module("self_attn.v_proj", Part.KEY_VALUE, hidden, kv_heads * values)
            yield Module("self_attn.o_proj", Part.ATTENTION, self.heads * values, hidden)
        if (indexer := self.indexer) is not None:
            source = self.latent or self.compression
            query_from = (source.query_rank if source else None) or hidden
            name, part = "self_attn.indexer.", Part.INDEXER
            yield Module(name + "wq_b", part, query_from, indexer.heads * indexer.dim)
            if self.compression is None:
                yield Module(name + "wk", part, hidden, indexer.dim)
            else:
                yield from self.compression.compressor(name, hidden, indexer.dim)
            yield Module(name + "weights_proj", part, hidden, indexer.heads)

    def _latent_modules(self, hidden: int, latent: LatentAttention) -> Iterator[Module]:
        queries = self.heads * (latent.nope_dim + latent.rope_dim)
        kv_width, rank = latent.kv_rank + latent.rope_dim, latent.query_rank
        unpacked = self.heads * (latent.nope_dim + latent.value_dim)
        outputs = (2 if self.gated else 1) * self.heads * latent.value_dim
        if rank is None:
            yield Module("self_attn.q_proj", Part.ATTENTION, hidden, queries)
        else:
            yield Module("self_attn.q_a_proj", Part.KEY_VALUE, hidden, rank)
            yield Module("self_attn.q_b_proj", Part.ATTENTION, rank, queries)
        yield Module("self_attn.kv_a_proj_with_mqa", Part.KEY_VALUE, hidden, kv_width)
        yield Module("self_attn.kv_b_proj", Part.ATTENTION, latent.kv_rank, unpacked)
        yield Module("self_attn.o_proj", Part.ATTENTION, outputs, hidden)

    def _compressed_modules(self, hidden: int, compression: Compression) -> Iterator[Module]:
        queries, rank = self.heads * self.head_dim, compression.query_rank
        outputs = compression.output_groups * compression.output_rank
        yield Module("self_attn.q_a_proj", Part.KEY_VALUE, hidden, rank)
        yield Module("self_attn.q_b_proj", Part.ATTENTION, rank, queries)
        yield Module("self_attn.kv_proj", Part.KEY_VALUE, hidden, self.head_dim)
        group_inputs = queries // compression.output_groups
        yield Module("self_attn.o_a_proj", Part.ATTENTION, group_inputs, outputs)
        yield Module("self_attn.o_b_proj", Part.ATTENTION, outputs, hidden)
        yield from compression.compressor("self_attn.compressor.", hidden, self.head_dim)

    def fixed_bytes(self, dtype: Dtype) -> float:
        """Bytes of one request, however long it is: the latest tokens and inputs of compression.

        Source: `DeepseekV4SWACache` and `CompressorStateCache` of vLLM 0.32.
        """
        if (compression := self.compression) is None:
            return 0.0
        inputs_bytes = compression.inputs_bytes(self.head_dim)
        if self.indexer is not None:
            inputs_bytes += compression.inputs_bytes(self.indexer.dim)
        return compression.latest_tokens * self._vector_bytes(dtype, compression) + inputs_bytes

    def _vector_bytes(self, dtype: Dtype, compression: Compression) -> float:
        """Of a token's only vector: in FP8 with its rotary part in 16 bits, and 8 scales."""
        if dtype is Dtype.FP8:
            return self.head_dim + compression.rope_dim + _VECTOR_SCALES
        return self.head_dim * DTYPE_BYTES[dtype]

    def kv_share(self, tp: int) -> float:
        """Share of the keys and values on one of `tp` devices, which copy KV heads if need be."""
        return -(-self.kv_heads // tp) / self.kv_heads

    def kv_bytes(self, dtype: Dtype) -> float:
        """Bytes of one token: keys and values, or their latent.

        They include scales where each head of a token has its own (8 and 4 bits by integers, 4 by
        floating point), and an indexer's keys in FP8. With an indexer, the rotary part has 16 bits
        beside an FP8 latent and 8 beside an FP4 latent.

        Source: 2 x heads x dimension for grouped queries (2305.13245); DeepSeek-V2 (2405.04434),
        §2.1.3: d_c + d_rope. vLLM 0.32's specs: `MLAAttention.get_kv_cache_spec` (656 and 352 bytes
        for 512 + 64), `DeepseekV32IndexerCache` (132 for 128), `TritonAttentionBackend` and
        `FlashInferBackend.customize_spec`.
        """
        if self.shares_kv:
            return 0.0
        indexer_bytes = self.indexer.key_bytes if self.indexer else 0
        if (compression := self.compression) is not None:
            kept_bytes = self._vector_bytes(dtype, compression) + indexer_bytes
            return kept_bytes / compression.ratio if compression.ratio else 0.0
        if self.latent is None or self.keeps_heads:
            head_bytes = sum(
                dim * DTYPE_BYTES[dtype] + _scale_bytes(dim, dtype)
                for dim in (self.head_dim, self.value_dim or self.head_dim)
            )
            return self.kv_heads * head_bytes + indexer_bytes
        rank, rope = self.latent.kv_rank, self.latent.rope_dim
        if self.indexer is None and not self.shares_indexer:
            return (rank + rope) * DTYPE_BYTES[dtype]
        match dtype:
            case Dtype.FP8:
                scales_bytes = _FP32_BYTES * (rank // _FP8_BLOCK)
                latent_bytes = rank + scales_bytes + rope * DTYPE_BYTES[Dtype.BF16]
            case Dtype.FP4:
                latent_bytes = rank * DTYPE_BYTES[dtype] + _scale_bytes(rank, dtype) + rope
            case _:
                latent_bytes = (rank + rope) * DTYPE_BYTES[dtype]
        return latent_bytes + indexer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInput:
    """Embeddings that each layer has of its own, beside the hidden state (Gemma 4 E2B)."""

    width: int
    vocab: int

    def modules(self, hidden: int) -> Iterator[Module]:
        """The layer's part of the embeddings, and the matrices that mix them in."""
        yield Module("embed_tokens_per_layer", Part.EMBEDDING, self.vocab, self.width)
        yield Module("per_layer_model_projection", Part.FFN, hidden, self.width)
        yield Module("per_layer_input_gate", Part.FFN, hidden, self.width)
        yield Module("per_layer_projection", Part.FFN, self.width, hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMixer:
    """Linear attention, a state-space model or a convolution: a state instead of keys and values.

    A request keeps `state_bytes` in each layer, however long it is.
    """

    name: str
    """Of its kind, as "gated delta net"."""
    matrices: tuple[Module, ...]
    state_bytes: int
    """Of one request in one layer."""
    heads: int = 0
    """Of values; 0 for a convolution."""
    key_dim: int = 0
    """Of one head: its state has `key_dim` x `value_dim` numbers."""
    value_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer; any part may be missing, and a feed-forward may be beside experts."""

    attention: Attention | None = None
    state: StateMixer | None = None
    ffn_width: int = 0
    experts: Experts | None = None
    token_input: TokenInput | None = None

    @property
    def fixed_bytes(self) -> float:
        """Of one request, however long it is."""
        state_bytes = self.state.state_bytes if self.state else 0
        return state_bytes + (self.attention.fixed_bytes(Dtype.FP8) if self.attention else 0)

    def modules(self, hidden: int, *, gated: bool) -> Iterator[Module]:
        """All matrices; a feed-forward that is `gated` has three."""
        if self.attention is not None:
            yield from self.attention.modules(hidden)
        if self.state is not None:
            yield from self.state.matrices
        if self.ffn_width:
            yield from _ffn("mlp.", Part.FFN, hidden, self.ffn_width, gated=gated)
        if self.token_input is not None:
            yield from self.token_input.modules(hidden)
        if (experts := self.experts) is None:
            return
        seen = experts.latent or hidden
        for module in _ffn("mlp.experts.0.", Part.EXPERTS, seen, experts.width, gated=gated):
            yield module._replace(copies=experts.count)
        if width := experts.all_shared_width:
            name = "mlp.shared_experts."
            yield from _ffn(name, Part.SHARED_EXPERTS, hidden, width, gated=gated)
        if experts.latent is not None:
            yield Module("mlp.fc1_latent_proj", Part.EXPERT_LATENT, hidden, seen)
            yield Module("mlp.fc2_latent_proj", Part.EXPERT_LATENT, seen, hidden)
        yield Module("mlp.gate", Part.ROUTER, hidden, experts.count)


def _ffn(name: str, part: Part, hidden: int, width: int, *, gated: bool) -> Iterator[Module]:
    if gated:
        yield Module(name + "gate_proj", part, hidden, width)
    yield Module(name + "up_proj", part, hidden, width)
    yield Module(name + "down_proj", part, width, hidden)


# --------------------------------------------------------------------------- states
# Convolutions keep their last inputs in the model's 16 bits. Source: vLLM 0.32, its layers for the
# matrices, `model_executor/layers/mamba/mamba_utils.py` for the states.


def gated_delta_net(  # noqa: PLR0913 - each is a dimension
    hidden: int,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int = 128,
    value_dim: int = 128,
    kernel: int = 4,
    is_fp32: bool = True,
) -> StateMixer:
    """Linear attention of Qwen3-Next and Qwen3.5, whose states have 32 or 16 bits."""
    keys_width, values_width = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * keys_width + values_width
    number_bytes = _FP32_BYTES if is_fp32 else _HALF_BYTES
    return StateMixer(
        name="gated delta net",
        matrices=(
            _state_matrix("in_proj_qkv", hidden, mixed),
            _state_matrix("in_proj_z", hidden, values_width),
            _state_matrix("in_proj_b", hidden, value_heads),
            _state_matrix("in_proj_a", hidden, value_heads),
            _state_matrix("out_proj", values_width, hidden),
        ),
        state_bytes=(kernel - 1) * mixed * _HALF_BYTES
        + value_heads * value_dim * key_dim * number_bytes,
        heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def delta_attention(hidden: int, *, heads: int, head_dim: int, kernel: int) -> StateMixer:
    """Kimi delta attention, whose states have 32 bits."""
    width = heads * head_dim
    return StateMixer(
        name="Kimi delta attention",
        matrices=(
            *(_attention_matrix(name, hidden, width) for name in ("q_proj", "k_proj", "v_proj")),
            _attention_matrix("b_proj", hidden, heads),
            *(_attention_matrix(name, hidden, head_dim) for name in ("f_a_proj", "g_a_proj")),
            *(_attention_matrix(name, head_dim, width) for name in ("f_b_proj", "g_b_proj")),
            _attention_matrix("o_proj", width, hidden),
        ),
        state_bytes=(kernel - 1) * 3 * width * _HALF_BYTES
        + heads * head_dim * head_dim * _FP32_BYTES,
        heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def mamba_2(  # noqa: PLR0913 - each is a dimension
    hidden: int,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    kernel: int,
    is_fp32: bool,
) -> StateMixer:
    """State space of Nemotron-H, Bamba, Granite 4 and Falcon-H1, with 32 or 16 bits."""
    width = heads * head_dim
    mixed = width + 2 * groups * state_size
    number_bytes = _FP32_BYTES if is_fp32 else _HALF_BYTES
    return StateMixer(
        name="Mamba 2",
        matrices=(
            _state_matrix("in_proj", hidden, width + mixed + heads),
            _state_matrix("out_proj", width, hidden),
        ),
        state_bytes=(kernel - 1) * mixed * _HALF_BYTES + width * state_size * number_bytes,
        heads=heads,
        key_dim=state_size,
        value_dim=head_dim,
    )


def mamba_1(hidden: int, *, width: int, rank: int, state_size: int, kernel: int) -> StateMixer:
    """State space of Jamba; `rank` is that of the step."""
    return StateMixer(
        name="Mamba",
        matrices=(
            _state_matrix("in_proj", hidden, 2 * width),
            _state_matrix("x_proj", width, rank + 2 * state_size),
            _state_matrix("dt_proj", rank, width),
            _state_matrix("out_proj", width, hidden),
        ),
        state_bytes=(kernel - 1 + state_size) * width * _HALF_BYTES,
        heads=1,
        key_dim=state_size,
        value_dim=width,
    )


def short_convolution(hidden: int, *, kernel: int) -> StateMixer:
    """Gated convolution of LFM2."""
    return StateMixer(
        name="short convolution",
        matrices=(
            _state_matrix("in_proj", hidden, 3 * hidden),
            _state_matrix("out_proj", hidden, hidden),
        ),
        state_bytes=(kernel - 1) * hidden * _HALF_BYTES,
    )


def _state_matrix(name: str, inputs: int, outputs: int) -> Module:
    return Module(f"linear_attn.{name}", Part.STATE, inputs, outputs)


def _attention_matrix(name: str, inputs: int, outputs: int) -> Module:
    return Module(f"self_attn.{name}", Part.STATE, inputs, outputs)


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
