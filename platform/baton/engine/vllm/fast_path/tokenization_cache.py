"""A cache of token ids of messages: a follow-up turn tokenizes only new messages.

Theory of operation: a fast tokenizer first cuts a text at its added tokens, and tokenizes the parts
between them separately. Chat templates put such tokens around every message. So a prompt is cut
before each of them, and only new pieces are tokenized: in the second turn of a long conversation,
only the last message.

Pieces are not independent with every tokenizer (some treat the start of a text differently), so
each tokenizer is tested before use. Others are left to vLLM.

The cache has scopes like the prefix cache. Otherwise the time for a prompt would reveal another
tenant's messages.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import chain, pairwise
from threading import Lock
from typing import Any, TypeAlias

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from vllm.utils.async_utils import make_async

from baton.engine.vllm.patches import table

_VllmObject: TypeAlias = Any
"""An object of vLLM or transformers, which mypy does not follow."""
Encode = Callable[[list[str]], Iterable[Sequence[int]]]
"""Token ids of each text, without tokens at the start or end of a sequence."""
CAPACITY_BYTES = 64 * 2**20
"""Of a frontend's cache: some ten million tokens of English."""
_ENTRY_BYTES = 256
"""Approximate size of an entry without its text and ids."""
_MAX_ENTRY_FRACTION = 0.125
"""Of the capacity; a larger piece is not cached, because it would evict many others."""
_SAMPLES = (
    "hello world",
    " leading",
    "trailing ",
    "\n\nlines\n",
    "  ",
    "Über",
    "1 2",
    "\u4f60",
    "",
)
"""Texts that tokenizers treat differently, above all at their ends."""
SHORT_CHARS = 4096
"""Prose of this length blocks the event loop for about a millisecond; unknown words take longer."""
_MAX_SAMPLE_WORDS = 16
_VLLM_MODULE_PREFIX = "vllm.tokenizers."
"""Classes here copy a tokenizer or cache its vocabulary, without a change of its results."""


class TokenizationCache:
    """Pieces of prompts and their token ids; evicts the least recently used. Thread-safe."""

    def __init__(
        self, boundaries: re.Pattern[str], *, capacity_bytes: int = CAPACITY_BYTES
    ) -> None:
        """`boundaries` matches wherever a piece may begin, except at the start of a text."""
        self._boundaries = boundaries
        self._capacity_bytes = capacity_bytes
        self._ids: OrderedDict[tuple[str | None, str], array[int]] = OrderedDict()
        self._lock = Lock()
        self.cached_bytes = 0

    def tokenize(self, text: str, encode: Encode, *, scope: str | None) -> list[int]:
        """The token ids of a text; `encode` gets the pieces that are new to this scope."""
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
    # Text takes one, two or four bytes a character; whether it is ASCII is a cheap approximation.
    return len(piece) * (1 if piece.isascii() else 4) + ids.itemsize * len(ids) + _ENTRY_BYTES


# ------------------------------------------------------------------------------------ tokenizers
def find_boundaries(tokenizer: _VllmObject) -> re.Pattern[str] | None:
    """Where pieces of this tokenizer's prompts may begin; None if that is not certain."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not getattr(tokenizer, "is_fast", False) or not added:
        return None
    if getattr(tokenizer, "split_special_tokens", False):
        return None
    # The tokenizer looks for these first, and for the others in the text between them.
    exact = [token for token in added.values() if not token.normalized]
    if any(token.single_word or token.lstrip or token.rstrip for token in exact):
        return None
    words = sorted({token.content for token in exact if token.content}, key=len, reverse=True)
    if not words or not all(_is_boundary(tokenizer, word) for word in words):
        return None
    return re.compile("|".join(map(re.escape, words)))


def _is_boundary(tokenizer: _VllmObject, word: str) -> bool:
    """Whether the texts before this word and from it on are tokenized independently."""
    pieces = [*_SAMPLES[:1], *(word + sample for sample in _SAMPLES)]
    encode = make_encoder(tokenizer)
    (joined_ids,) = encode(["".join(pieces)])
    return list(joined_ids) == list(chain.from_iterable(encode(pieces)))


def make_encoder(tokenizer: _VllmObject) -> Encode:
    """An `Encode` by this tokenizer."""

    def encode(texts: list[str]) -> Iterable[Sequence[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    return encode


# ------------------------------------------------------------------------------------------ vLLM
def install_tokenization_cache(
    renderer: _VllmObject, scope: Callable[[], str | bool | None], encode: Encode | None = None
) -> TokenizationCache | None:
    """Give a renderer of vLLM a cache; None if its tokenizer does not allow it.

    `scope` is called in the task of a request: its cache scope, or False for a request that must
    not be cached. `encode` replaces the renderer's tokenizer.
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

    def tokenize(prompt: _VllmObject, params: _VllmObject, cache_scope: str | None) -> _VllmObject:
        options = params.get_encode_kwargs()
        if options["add_special_tokens"] or params.return_token_offsets:
            return original(prompt, params)
        ids = cache.tokenize(prompt["prompt"], encode, scope=cache_scope)
        if options["truncation"] and len(ids) > options["max_length"]:
            return original(prompt, params)  # the tokenizer decides which end to cut
        return {**prompt, "prompt_token_ids": ids}

    cached_async, original_async = (wrap_async(f, executor) for f in (tokenize, original))

    async def tokenize_async(prompt: _VllmObject, params: _VllmObject) -> _VllmObject:
        cache_scope = scope()
        if isinstance(cache_scope, bool):
            return await original_async(prompt, params)
        return await cached_async(prompt, params, cache_scope)

    is_installed = table.TOKENIZER.install(renderer, _tokenize_prompt_async=tokenize_async)
    return cache if is_installed else None


class FastEncoder:
    """Token ids of texts, equal to a transformers tokenizer's. Thread-safe.

    A tokenizer of transformers asks `tokenizers` (Rust) for ids with offsets, types and a mask.
    vLLM mostly uses only the ids; without the rest, tokenization takes two thirds of the time.

    Each tokenizer is tested before use. vLLM's way stays for tokenizers that change a text
    themselves, for requests with offsets, and for texts that are too long, because the tokenizer
    decides where to cut.

    A short text is tokenized in the event loop. In a thread it would wait for Python's lock, beside
    many streams for longer than its tokenization takes, and delay the streams too.
    """

    def __init__(self, tokenizer: _VllmObject) -> None:
        """Copy a tokenizer's Rust part, so that no other code changes its settings."""
        rust_tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        rust_tokenizer.no_truncation()
        rust_tokenizer.no_padding()
        rust_tokenizer.encode_special_tokens = bool(tokenizer.split_special_tokens)
        self._encode = rust_tokenizer.encode_batch_fast

    def __call__(self, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """The ids of each text."""
        encoded = self._encode(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]


def make_fast_encoder(tokenizer: _VllmObject) -> FastEncoder | None:
    """An encoder with this tokenizer's ids; None if that is not certain."""
    if not isinstance(tokenizer, TokenizersBackend) or not _is_plain(type(tokenizer)):
        return None
    try:
        encode = FastEncoder(tokenizer)
    except Exception:  # noqa: BLE001 - a tokenizer with parts in Python cannot be serialized
        return None
    words = sorted(token.content for token in tokenizer.added_tokens_decoder.values())
    samples = [*_SAMPLES, *(f"a{word}b {word}" for word in words[:_MAX_SAMPLE_WORDS])]
    samples.append("".join(samples))
    for add_special in (False, True):
        expected: Iterable[Sequence[int]] = tokenizer(samples, add_special_tokens=add_special)[
            "input_ids"
        ]
        if encode(samples, add_special_tokens=add_special) != [list(ids) for ids in expected]:
            return None
    return encode


def _is_plain(tokenizer_class: type) -> bool:
    """Whether only transformers' own methods pass texts to the Rust part."""
    classes = [
        cls for cls in tokenizer_class.__mro__ if not cls.__module__.startswith(_VLLM_MODULE_PREFIX)
    ]

    def defining_class(method: str) -> type | None:
        return next((class_ for class_ in classes if method in vars(class_)), None)

    call_owner, encode_owner = defining_class("__call__"), defining_class("_encode_plus")
    return call_owner is PreTrainedTokenizerBase and encode_owner is TokenizersBackend


def install_fast_tokenizer(renderer: _VllmObject) -> FastEncoder | None:
    """Have a renderer of vLLM tokenize this way; None if its tokenizer does not allow it."""
    encode = make_fast_encoder(renderer.tokenizer)
    if encode is None:
        return None
    original, executor = renderer._tokenize_prompt, renderer._executor  # noqa: SLF001

    def tokenize(prompt: _VllmObject, params: _VllmObject) -> _VllmObject:
        options = params.get_encode_kwargs()
        if params.return_token_offsets:
            return original(prompt, params)
        (ids,) = encode([prompt["prompt"]], add_special_tokens=options["add_special_tokens"])
        if options["truncation"] and len(ids) > options["max_length"]:
            return original(prompt, params)
        return {**prompt, "prompt_token_ids": ids}

    is_installed = table.TOKENIZER.install(
        renderer,
        _tokenize_prompt=tokenize,
        _tokenize_prompt_async=inline_if_short(tokenize, executor),
    )
    return encode if is_installed else None


def inline_if_short(
    tokenize: Callable[..., _VllmObject], executor: Executor
) -> Callable[..., Awaitable[_VllmObject]]:
    """Call a function of a prompt in the executor, or at once if its text is short."""
    in_thread = make_async(tokenize, executor)

    async def tokenize_async(prompt: _VllmObject, *args: _VllmObject) -> _VllmObject:
        if len(prompt["prompt"]) <= SHORT_CHARS:
            return tokenize(prompt, *args)
        return await in_thread(prompt, *args)

    return tokenize_async
