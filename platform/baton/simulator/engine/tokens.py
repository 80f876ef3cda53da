"""The simulated model: the next token is a pure function of all tokens before it.

Theory of operation: a sequence is a number in base 2^32 with a model-dependent leading digit,
modulo a 64-bit prime; a mixed form of that residue picks the next token. So a prompt continues the
same way on any replica and after any handoff or resume, and a lost, repeated or swapped token
changes the rest of a stream. One more token costs O(1).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from baton.simulator.engine.settings import FIRST_TOKEN_ID, SimSettings

_PRIME = 2**64 - 59
_MASK = 2**64 - 1
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
"""2^64 over the golden ratio. Source: Knuth, The Art of Computer Programming, vol. 3, §6.4."""
_DIGIT_BITS = 32


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as big-endian 32-bit integers."""
    packed = array("I", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def digest(data: bytes) -> bytes:
    """A 16-byte digest."""
    return blake2b(data, digest_size=16).digest()


def model_key(model: str, adapter: str | None) -> str:
    """Key of a model with an adapter; each adapter generates other tokens."""
    return model if adapter is None else f"{model}\0{adapter}"


class TokenStream:
    """A sequence's state, which determines its next token."""

    __slots__ = ("_eos_threshold", "_eos_token_id", "_id_range", "_state")

    def __init__(self, model: str, settings: SimSettings, token_ids: Sequence[int]) -> None:
        self._id_range = settings.vocab_size - FIRST_TOKEN_ID
        self._eos_token_id = settings.eos_token_id
        self._eos_threshold = int(settings.eos_probability * 2**32)
        seed = int.from_bytes(digest(model.encode()), "big")
        shift = pow(2, _DIGIT_BITS * len(token_ids), _PRIME)
        number = int.from_bytes(pack_tokens(token_ids), "big")
        self._state = (seed * shift + number) % _PRIME

    def corrupt(self) -> None:
        """Continue as after another prompt: the KV blocks are not this prompt's."""
        self._state = (self._state * _MULTIPLIER + 1) % _PRIME

    def next_token(self, *, may_end: bool) -> tuple[int, bool]:
        """Append and return the next token, and whether it ends the sequence."""
        mixed = self._state ^ (self._state >> 31)
        mixed = (mixed * _MULTIPLIER) & _MASK
        is_eos = may_end and (mixed & 0xFFFF_FFFF) < self._eos_threshold
        token = self._eos_token_id if is_eos else FIRST_TOKEN_ID + (mixed >> 32) % self._id_range
        self._state = ((self._state << _DIGIT_BITS) + token) % _PRIME
        return token, is_eos


def expected_tokens(
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    *,
    model: str,
    settings: SimSettings,
    min_tokens: int = 0,
) -> tuple[int, ...]:
    """The ids that every simulated engine of this model generates after this prompt.

    Fewer than `max_tokens` only where the context ends, or the sequence by `eos_probability`.
    """
    max_new_tokens = min(max_tokens, settings.max_len_tokens - len(prompt_token_ids))
    stream = TokenStream(model, settings, prompt_token_ids)
    generated: list[int] = []
    is_eos = False
    while len(generated) < max_new_tokens and not is_eos:
        token, is_eos = stream.next_token(may_end=len(generated) >= min_tokens)
        generated.append(token)
    return tuple(generated)
