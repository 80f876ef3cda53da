"""Attention of one layer on one device: measured grids, unit costs by data sheets, decode curves.

Prefill attention counts pairs of tokens, decode attention bytes of keys and values. Source: as
`steps/kernels.py`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.efficiency import Efficiency
from baton.perf.hardware.kernel_fits import SPARSE_PROMPT_TOKENS, LogGrid
from baton.perf.model.layer_work import per_device
from baton.perf.model.layers import Attention

_NARROW_BYTES: Final = 2.0
"""Keys and values of fewer bytes are narrow."""
CONTEXTS: Final = tuple(2.0**octave for octave in range(1, 18))
"""Of a decode curve: 2, 4, ... 131,072 tokens."""
CHOSEN_TOKENS: Final = 2048
"""Layers with an indexer attend to at most this number of tokens. Source: `index_topk` of
DeepSeek-V3.2 and GLM-5."""

DecodeCurve = tuple[float, ...]
"""Seconds of one layer's decode attention at each of the contexts 2, 4, ... tokens."""


class PrefillAttention:
    """One layer's prefill attention on one device."""

    __slots__ = (
        "_grid",
        "_has_indexer",
        "_heads",
        "_is_sparse",
        "_launch_s",
        "_own",
        "_relative",
        "_scale",
        "_window_tokens",
    )

    def __init__(  # noqa: PLR0913 - read for every prompt: plain fields, no object for them
        self,
        *,
        grid: LogGrid | None,
        scale: float,
        is_sparse: bool,
        has_indexer: bool,
        heads: int,
        window_tokens: int | None,
        launch_s: float,
        own: AttentionCosts,
        relative: AttentionCosts | None,
    ) -> None:
        self._grid, self._scale, self._heads = grid, scale, heads
        self._is_sparse, self._has_indexer = is_sparse, has_indexer
        self._window_tokens, self._launch_s = window_tokens, launch_s
        self._own, self._relative = own, relative

    def seconds(self, tokens: int, pairs: float, ranks: int) -> float:
        """Of prompts with these tokens and pairs in all, spread over `ranks`; taken as alike."""
        if self._window_tokens is not None:
            pairs = min(pairs, tokens * self._window_tokens)
        if self._grid is None:
            return self._sheet_s(self._own, tokens, pairs, ranks)
        length = 2 * pairs / tokens - 1
        length = max(length, 1.0)
        if self._is_sparse:
            seconds = self._sparse_s(self._grid, tokens / ranks, length)
        else:
            heads = self._heads * tokens / ranks / length
            seconds = self._scale * self._grid.at_two(length, heads)
        if self._relative is None:
            return seconds
        own_s = self._sheet_s(self._own, tokens, pairs, ranks)
        return seconds * own_s / self._sheet_s(self._relative, tokens, pairs, ranks)

    def _sparse_s(self, grid: LogGrid, tokens: float, length: float) -> float:
        if not self._has_indexer:
            length = min(length, CHOSEN_TOKENS)
        return self._launch_s + grid.at_two(length, self._heads) * tokens / SPARSE_PROMPT_TOKENS

    def _sheet_s(self, costs: AttentionCosts, tokens: int, pairs: float, ranks: int) -> float:
        index_s = pairs / ranks * costs.index_s
        if self._is_sparse:
            pairs = min(pairs, tokens * CHOSEN_TOKENS)
        all_pairs = (pairs + tokens * costs.extra_pairs) / ranks
        return self._launch_s + all_pairs * costs.pair_s + index_s


def context_s(curve: DecodeCurve, context: float) -> float:
    """Seconds at a context, linear between the points of the curve and beyond them."""
    low, last = int(context).bit_length() - 2, len(curve) - 2
    if low > last:
        low = last
    elif low < 0:
        low = 0
    start = 2 << low
    return curve[low] + (curve[low + 1] - curve[low]) * (context - start) / start


class AttentionCosts(NamedTuple):
    """Unit costs of one layer's attention."""

    pair_s: float
    """Prefill: a pair of tokens, two products of a head's width."""
    extra_pairs: float
    """Prefill: fixed cost of each token, as a number of pairs."""
    token_s: float
    """Decode: an attended token, by bytes of keys and values or by tiles of queries, whichever is
    slower."""
    request_s: float
    """Decode: a request."""
    index_s: float
    """An indexer's score of a token, on each device for all of the indexer's heads."""


def has_chosen_latents(attention: Attention) -> bool:
    """Whether an indexer chooses the latents that are attended to."""
    has_indexer = attention.indexer is not None or attention.shares_indexer
    return has_indexer and attention.latent is not None


def attention_costs(
    device: Accelerator, attention: Attention, efficiency: Efficiency, *, tp: int, kv: Dtype
) -> AttentionCosts:
    """By the data sheet of a device, for one of `tp` devices."""
    heads, width = per_device(attention.heads, tp), DTYPE_BYTES[kv]
    narrow = width < _NARROW_BYTES
    if attention.latent is None:
        kv_heads = per_device(attention.kv_heads, tp)
        pair_width = 2 * attention.head_dim
        token_bytes = 2 * kv_heads * attention.head_dim * width
        group = max(efficiency.decode_tile, -(-attention.heads // attention.kv_heads))
        token_flops = 4 * kv_heads * group * attention.head_dim
    else:
        latent = attention.latent
        kv_heads, rank = 1, latent.kv_rank + latent.rope_dim
        pair_width = latent.nope_dim + latent.rope_dim + latent.value_dim
        token_bytes = rank * width
        token_flops = 2 * max(efficiency.decode_tile, heads) * (rank + latent.kv_rank)
    rate = device.flops_of(Dtype.BF16)
    indexer = attention.indexer
    index_width = 0 if indexer is None else indexer.heads * indexer.dim
    return AttentionCosts(
        pair_s=2 * heads * pair_width / (rate * efficiency.prefill_attention),
        extra_pairs=efficiency.prefill_extra_pairs_fp8
        if narrow
        else efficiency.prefill_extra_pairs,
        token_s=max(
            token_bytes / (device.memory_bytes_per_s * efficiency.decode_memory),
            token_flops / (rate * efficiency.decode_compute),
        ),
        request_s=kv_heads * efficiency.attention_pair_s,
        index_s=2 * index_width / (rate * efficiency.prefill_attention),
    )
