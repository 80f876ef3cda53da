"""Token ids of messages that were seen before: a follow-up turn tokenizes only what is new.

Theory of operation: before it does anything else a fast tokenizer cuts a text at its added tokens,
and tokenizes what lies between two of them by itself. Chat templates put such tokens around every
message. So a prompt is cut before each of them, and a piece that was met before is not tokenized
again: in the second turn of a long conversation that is everything but the last message.

That pieces are independent is not so with every tokenizer (some treat the beginning of a text in a
way of their own), and is tried on each before it is believed. What is not sure is left to vLLM.

Pieces are remembered for those among whom prefixes may be found, like KV blocks: how long a prompt
takes would otherwise tell what another tenant has sent.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from threading import Lock
from typing import Any, TypeAlias

from vllm.utils.async_utils import make_async

from baton.engine.vllm.fast_path.fast_tokenizer import SAMPLES, inline_if_short
from baton.engine.vllm.patches import table

VllmObject: TypeAlias = Any
"""What vLLM and transformers make, which is not followed."""
Encode = Callable[[list[str]], Iterable[Sequence[int]]]
"""Token ids of each of some texts, without tokens at the beginning or end of a sequence."""
CAPACITY_BYTES = 64 * 2**20
"""What a frontend remembers at most: some ten million tokens of English."""
_ENTRY_BYTES = 256
"""What an entry takes besides its text and its ids, about."""
_MAX_ENTRY_FRACTION = 0.125
"""Of the capacity; a larger piece is not remembered, for many others would have to go."""


class TokenizationCache:
    """Pieces of prompts and their token ids; the least recently used go first. Thread-safe."""

    def __init__(
        self, boundaries: re.Pattern[str], *, capacity_bytes: int = CAPACITY_BYTES
    ) -> None:
        """`boundaries` matches wherever a piece may begin, besides the beginning of a text."""
        self._boundaries = boundaries
        self._capacity_bytes = capacity_bytes
        self._ids: OrderedDict[tuple[str | None, str], array[int]] = OrderedDict()
        self._lock = Lock()
        self.cached_bytes = 0
        """What is remembered takes so much."""

    def tokenize(self, text: str, encode: Encode, *, scope: str | None) -> list[int]:
        """The token ids of a text; `encode` is asked for pieces that are new to this scope."""
        pieces = self._split(text)
        with self._lock:
            cached = {piece: self._get(scope, piece) for piece in pieces}
        ids_by_piece = {piece: ids.tolist() for piece, ids in cached.items() if ids is not None}
        new_pieces = [piece for piece, ids in cached.items() if ids is None]
        if new_pieces:
            encoded = dict(zip(new_pieces, encode(new_pieces), strict=True))
            ids_by_piece |= {piece: list(ids) for piece, ids in encoded.items()}
            packed = {piece: array("I", ids) for piece, ids in encoded.items()}
            with self._lock:
                for piece, ids in packed.items():
                    self._put(scope, piece, ids)
        return list(chain.from_iterable(ids_by_piece[piece] for piece in pieces))

    def _split(self, text: str) -> list[str]:
        offsets = [0, *(cut.start() for cut in self._boundaries.finditer(text)), len(text)]
        return [text[begin:end] for begin, end in pairwise(offsets) if begin < end]

    def _get(self, scope: str | None, piece: str) -> array[int] | None:
        ids = self._ids.get((scope, piece))
        if ids is not None:
            self._ids.move_to_end((scope, piece))
        return ids

    def _put(self, scope: str | None, piece: str, ids: array[int]) -> None:
        key, size = (scope, piece), _size_bytes(piece, ids)
        if key in self._ids or size > _MAX_ENTRY_FRACTION * self._capacity_bytes:
            return
        self._ids[key] = ids
        self.cached_bytes += size
        while self.cached_bytes > self._capacity_bytes:
            (_, oldest), evicted_ids = self._ids.popitem(last=False)
            self.cached_bytes -= _size_bytes(oldest, evicted_ids)


def _size_bytes(piece: str, ids: array[int]) -> int:
    # Text is held in one, two or four bytes a character; few are told by ASCII or not.
    return len(piece) * (1 if piece.isascii() else 4) + ids.itemsize * len(ids) + _ENTRY_BYTES


# ------------------------------------------------------------------------------------ tokenizers


def find_boundaries(tokenizer: VllmObject) -> re.Pattern[str] | None:
    """Where pieces of this tokenizer's prompts may begin; None: nowhere that is sure."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not getattr(tokenizer, "is_fast", False) or not added:
        return None
    if getattr(tokenizer, "split_special_tokens", False):
        return None
    # The tokenizer looks for all of these at once, and for the others in what lies between.
    exact = [token for token in added.values() if not token.normalized]
    if any(token.single_word or token.lstrip or token.rstrip for token in exact):
        return None
    words = sorted({token.content for token in exact if token.content}, key=len, reverse=True)
    if not words or not all(_is_boundary(tokenizer, word) for word in words):
        return None
    return re.compile("|".join(map(re.escape, words)))


def _is_boundary(tokenizer: VllmObject, word: str) -> bool:
    """Whether what comes before this word and what begins with it are tokenized independently."""
    pieces = [*SAMPLES[:1], *(word + sample for sample in SAMPLES)]
    encode = make_encoder(tokenizer)
    (joined_ids,) = encode(["".join(pieces)])
    return list(joined_ids) == list(chain.from_iterable(encode(pieces)))


def make_encoder(tokenizer: VllmObject) -> Encode:
    """What a memory asks for pieces."""

    def encode(texts: list[str]) -> Iterable[Sequence[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    return encode


# ------------------------------------------------------------------------------------------ vLLM


def install_tokenization_cache(
    renderer: VllmObject, scope: Callable[[], str | bool | None], encode: Encode | None = None
) -> TokenizationCache | None:
    """Have a renderer of vLLM's remember; None: its tokenizer is not one for it.

    `scope` is asked in the task of a request: among whose pieces its own may be found, or False for
    a request that wants nothing of it remembered. `encode` does what the renderer's tokenizer does.
    """
    tokenizer = renderer.tokenizer
    boundaries = find_boundaries(tokenizer)
    if boundaries is None:
        return None
    original, executor = renderer._tokenize_prompt, renderer._executor  # noqa: SLF001
    cache, wrap_async = (
        TokenizationCache(boundaries),
        make_async if encode is None else inline_if_short,
    )
    encode = encode or make_encoder(tokenizer)

    def tokenize(prompt: VllmObject, params: VllmObject, cache_scope: str | None) -> VllmObject:
        options = params.get_encode_kwargs()
        if options["add_special_tokens"] or params.return_token_offsets:
            return original(prompt, params)
        ids = cache.tokenize(prompt["prompt"], encode, scope=cache_scope)
        if options["truncation"] and len(ids) > options["max_length"]:
            return original(prompt, params)  # which end is cut off is the tokenizer's to say
        return {**prompt, "prompt_token_ids": ids}

    cached_async, original_async = (wrap_async(f, executor) for f in (tokenize, original))

    async def tokenize_async(prompt: VllmObject, params: VllmObject) -> VllmObject:
        cache_scope = scope()
        if isinstance(cache_scope, bool):
            return await original_async(prompt, params)
        return await cached_async(prompt, params, cache_scope)

    is_installed = table.TOKENIZER.install(renderer, _tokenize_prompt_async=tokenize_async)
    return cache if is_installed else None
