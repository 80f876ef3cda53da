"""Shape of a model, and resulting sizes of weights and KV cache.

Parameters are those of the matrices. Biases, norms, convolutions and learned positions are left
out: below 1 % of the known models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.layers import (
    Attention,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    Module,
    Part,
    StoredWeights,
)

_PAGE_TOKENS: Final = 16
_LATENT_PAGE_TOKENS: Final = 128
"""Multiples that attention kernels ask of a block of a model with states."""
_GROUP_RATIO: Final = 1.5
"""Up to this ratio, vLLM pads the rarer kind of layer to the number of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only model whose layers are alike, but for experts, windows and indexers.

    A hybrid, whose layers differ more than that, lists its `kinds` of layers and their `order`;
    `heads`, `kv_heads` and `head_dim` are then those of its attention, `ffn_width` the widest.
    """

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
    indexer: Indexer | None = None
    indexer_layers: int | None = None
    """Layers with an indexer, which others share (GLM-5.2); None: each has its own."""
    experts: Experts | None = None
    window_tokens: int | None = None
    windowed_layers: int = 0
    """Layers that attend only to the last `window_tokens`."""
    max_len_tokens: int = 131_072
    kinds: tuple[Layer, ...] = ()
    order: tuple[int, ...] = ()
    """The kind of each layer, by its position in `kinds`."""
    stored: StoredWeights | None = field(default=None, compare=False)
    """How the published weights are stored, where a config says so."""
    left_out: tuple[str, ...] = field(default=(), compare=False)
    """Parts of the model whose weights are not counted."""

    def __post_init__(self) -> None:
        if len(self.order) != (self.layers if self.kinds else 0):
            raise ValueError(
                f"{self.name}: got an order of {len(self.order)} layers, expected {self.layers}"
            )

    # ------------------------------------------------------------------ layers

    @property
    def is_hybrid(self) -> bool:
        """Whether layers differ by more than experts, windows and indexers."""
        return bool(self.kinds)

    def layer_counts(self, first: int = 0, end: int | None = None) -> Mapping[Layer, int]:
        """Layers of each kind, of all or of a range; layers without experts come first."""
        kinds, order = _layers_of(self)
        counts = Counter(order[first:end])
        return {kinds[position]: count for position, count in sorted(counts.items())}

    def part_parameters(self, layer: Layer) -> Mapping[Part, int]:
        """Parameters of a layer."""
        return _part_parameters(layer, self.hidden, self.gated_ffn)

    def modules(self) -> Iterator[tuple[int, Module]]:
        """All matrices of all layers, each with the position of its layer."""
        kinds, order = _layers_of(self)
        by_kind = [tuple(kind.modules(self.hidden, gated=self.gated_ffn)) for kind in kinds]
        for position, kind in enumerate(order):
            for module in by_kind[kind]:
                yield position, module

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values, of all tokens or of a window."""
        return sum(count for layer, count in self.layer_counts().items() if layer.attention)

    @property
    def state_layers(self) -> int:
        """Layers that keep a state of fixed size instead."""
        return sum(count for layer, count in self.layer_counts().items() if layer.state)

    # ------------------------------------------------------------------ the parts of a layer

    @property
    def kv_projection_parameters(self) -> int:
        """Of one layer's keys and values; at most `kv_heads` devices split these.

        With latent attention: both down-projections, copied to each device.
        """
        return self._attention_parts[Part.KEY_VALUE]

    @property
    def attention_parameters(self) -> int:
        """Of one layer, without an indexer."""
        return self._attention_parts[Part.KEY_VALUE] + self._attention_parts[Part.ATTENTION]

    @property
    def _attention_parts(self) -> Mapping[Part, int]:
        kinds, _ = _layers_of(self)
        return self.part_parameters(next(kind for kind in kinds if kind.attention))

    @property
    def ffn_parameters(self) -> int:
        """Of one layer without experts."""
        return (3 if self.gated_ffn else 2) * self.hidden * self.ffn_width

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer; 0 without experts."""
        if self.experts is None:
            return 0
        seen = self.experts.latent or self.hidden
        return (3 if self.gated_ffn else 2) * seen * self.experts.width

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(count for layer, count in self.layer_counts().items() if layer.experts)

    # ------------------------------------------------------------------ weights

    @property
    def common_layer_parameters(self) -> int:
        """Of all layers, without embeddings and routed experts: those that every token uses."""
        looked_up = sum(
            count * self.part_parameters(layer)[Part.EMBEDDING]
            for layer, count in self.layer_counts().items()
        )
        return self.layer_parameters - self.routed_parameters - looked_up

    @property
    def routed_parameters(self) -> int:
        """Of all routed experts of all layers."""
        count = self.experts.count if self.experts else 0
        return self._expert_parameters_of(count)

    @property
    def layer_parameters(self) -> int:
        """Of all layers with all experts, without embeddings and output."""
        return sum(
            count * sum(self.part_parameters(layer).values())
            for layer, count in self.layer_counts().items()
        )

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

    # ------------------------------------------------------------------ KV cache and states

    def kv_layer_bytes(self, dtype: Dtype) -> float:
        """Bytes of one token in one layer with attention, on average; see `Attention.kv_bytes`."""
        return self.kv_token_bytes(dtype) / self.attention_layers

    def kv_token_bytes(self, dtype: Dtype) -> float:
        """Bytes of one token in all layers and on all devices, each value counted once.

        Windowed layers count in full; see `kv_bytes`.
        """
        return sum(
            count * layer.attention.kv_bytes(dtype)
            for layer, count in self.layer_counts().items()
            if layer.attention
        )

    def kv_bytes(self, tokens: int, dtype: Dtype) -> float:
        """Bytes of one request of `tokens`; windowed layers keep only their window."""
        return self._device_kv_bytes(tokens, dtype, 1)

    @property
    def state_bytes(self) -> float:
        """Bytes of one request in all layers and on all devices, however long it is.

        States, and the latest tokens of compressed attention (in FP8, its usual type).
        """
        return sum(count * layer.fixed_bytes for layer, count in self.layer_counts().items())

    def state_block_tokens(self, dtype: Dtype, tp: int = 1) -> int:
        """Tokens of a block of the KV cache that is as large as one layer's state; 0 without.

        Source: `align_hybrid_block_size` of vLLM 0.32's `platforms/interface.py`.
        """
        layers = self.layer_counts()
        state_bytes = max((layer.state.state_bytes for layer in layers if layer.state), default=0)
        if not state_bytes:
            return 0
        step_tokens = _LATENT_PAGE_TOKENS if self.latent else _PAGE_TOKENS
        token_bytes = self.device_token_bytes(dtype, tp) / self.attention_layers
        return step_tokens * math.ceil(state_bytes / tp / (step_tokens * token_bytes))

    def device_token_bytes(self, dtype: Dtype, tp: int) -> float:
        """Bytes of one token in all layers on one of `tp` devices; windows count in full."""
        return sum(
            count * layer.attention.kv_bytes(dtype) * layer.attention.kv_share(tp)
            for layer, count in self.layer_counts().items()
            if layer.attention
        )

    def request_bytes(self, tokens: int, dtype: Dtype, tp: int = 1) -> float:
        """Bytes that vLLM allocates for one request of `tokens` on one of `tp` devices.

        With states, blocks of all layers have the size of a state. Each layer with attention has as
        many as its tokens need, each other layer one. vLLM groups layers in equal numbers, and pads
        the last group.

        Source: `_get_kv_cache_groups_uniform_page_size` of vLLM 0.32's `v1/core/kv_cache_utils.py`.
        """
        block_tokens = self.state_block_tokens(dtype, tp)
        if not block_tokens:
            return self._device_kv_bytes(tokens, dtype, tp) + self.state_bytes
        attention, states = self._grouped_layers
        layer_blocks = attention * -(-tokens // block_tokens) + states
        token_bytes = self.device_token_bytes(dtype, tp) / self.attention_layers
        return layer_blocks * block_tokens * token_bytes

    def _device_kv_bytes(self, tokens: int, dtype: Dtype, tp: int) -> float:
        kv_bytes = 0.0
        for layer, count in self.layer_counts().items():
            if (attention := layer.attention) is not None:
                kept_tokens = min(tokens, attention.window_tokens or tokens)
                token_bytes = attention.kv_bytes(dtype) * attention.kv_share(tp)
                kv_bytes += count * kept_tokens * token_bytes
        return kv_bytes

    @property
    def _grouped_layers(self) -> tuple[int, int]:
        """Layers with attention and with states, each filled up to whole groups."""
        attention, states = self.attention_layers, self.state_layers
        fewer, more = sorted((attention, states))
        group = more if more < _GROUP_RATIO * fewer else fewer
        return -(-attention // group) * group, -(-states // group) * group

    def block_tokens(self, least: int, dtype: Dtype, tp: int = 1) -> int:
        """Tokens of a block of the KV cache of which engines ask for `least`."""
        return max(least, self.state_block_tokens(dtype, tp))

    def request_blocks(self, block_tokens: int, dtype: Dtype) -> int:
        """Blocks of a request beside those of its tokens; a block spans all attention layers."""
        if self.state_layers:
            attention, states = self._grouped_layers
            return -(-states // attention)
        if not self.state_bytes:
            return 0
        return math.ceil(self.state_bytes / (block_tokens * self.kv_token_bytes(dtype)))


@lru_cache(maxsize=512)
def _part_parameters(layer: Layer, hidden: int, gated: bool) -> Mapping[Part, int]:  # noqa: FBT001 - a cache's key
    counts: Counter[Part] = Counter()
    for module in layer.modules(hidden, gated=gated):
        counts[module.part] += module.parameters
    return MappingProxyType({part: counts[part] for part in Part})


@lru_cache(maxsize=512)
def _layers_of(shape: ModelShape) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """Kinds of layers, and the kind of each layer.

    Layers without experts come first; windows and indexers are spread evenly.
    """
    if shape.kinds:
        return shape.kinds, shape.order
    layers, experts = shape.layers, shape.experts
    dense = layers if experts is None else min(layers, experts.dense_layers)
    indexers = layers if shape.indexer_layers is None else shape.indexer_layers
    kinds: dict[Layer, int] = {}
    order = []
    for position in range(layers):
        has_indexer = _is_nth(position, indexers, layers)
        is_windowed = _is_nth(position, shape.windowed_layers, layers)
        attention = Attention(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            latent=shape.latent,
            indexer=shape.indexer if has_indexer else None,
            shares_indexer=shape.indexer is not None and not has_indexer,
            window_tokens=shape.window_tokens if is_windowed else None,
        )
        is_dense = position < dense
        layer = Layer(
            attention=attention,
            ffn_width=shape.ffn_width if is_dense else 0,
            experts=None if is_dense else experts,
        )
        order.append(kinds.setdefault(layer, len(kinds)))
    return tuple(kinds), tuple(order)


def _is_nth(position: int, count: int, layers: int) -> bool:
    """Whether a layer is one of `count` that are spread over all."""
    return (position + 1) * count // layers > position * count // layers
