"""The shape of a model: what its `config.json` says, and what follows for weights and KV."""

from __future__ import annotations

from dataclasses import dataclass


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
    head_dim: int
    ffn_width: int
    vocab: int
    gated_ffn: bool = True
    """Three matrices (gate, up, down) instead of two."""
    tied_embeddings: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    window_tokens: int | None = None
    windowed_layers: int = 0
    """Layers that attend to the last `window_tokens` only."""
    max_len_tokens: int = 131_072
