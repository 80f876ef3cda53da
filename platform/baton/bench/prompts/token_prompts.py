"""Turns a trace's prompts into token ids: made up, but shared exactly where the trace says so."""

from __future__ import annotations

import random
from array import array
from functools import lru_cache

from baton.simulator.workloads.trace import TraceRequest

_CACHED_BLOCKS = 4096
"""A few megabytes: the blocks that are asked for again and again."""


class TokenPromptFactory:
    """Makes the token ids of prompts.

    Blocks with equal ids in the trace are equal runs of tokens; what a trace gives no id is like
    nothing else. What a model answers is its own, so a session's next prompt shares the earlier
    prompt with it, but not the earlier answer.
    """

    def __init__(self, *, block_tokens: int, vocabulary: int, seed: int | str = 0) -> None:
        if block_tokens < 1 or vocabulary < 1:
            raise ValueError(
                f"got blocks of {block_tokens} tokens and a vocabulary of {vocabulary}, wanted at"
                " least 1 of each"
            )
        self._block_tokens = block_tokens
        self._vocabulary = vocabulary
        self._seed = seed
        self._cached_block = lru_cache(_CACHED_BLOCKS)(self._block)

    def build_prompt(self, request: TraceRequest, index: int) -> list[int]:
        """The token ids of request `index` of the trace."""
        block_tokens = self._block_tokens
        ids = request.block_ids[: -(-request.prompt_tokens // block_tokens)]
        token_ids: list[int] = []
        for block in ids:
            token_ids += self._cached_block(f"shared {block}")
        own_tokens = request.prompt_tokens - len(token_ids)
        if own_tokens > 0:
            token_ids += self._random_ids(f"own {index}", own_tokens)
        return token_ids[: request.prompt_tokens]

    def _block(self, name: str) -> list[int]:
        return self._random_ids(name, self._block_tokens)

    def _random_ids(self, name: str, tokens: int) -> list[int]:
        """Random ids, the same for the same name; fast, for prompts have up to a million."""
        rng = random.Random(f"{self._seed} {name}")  # noqa: S311 - made up, not secret
        random_numbers = array("I", rng.randbytes(4 * tokens))
        vocabulary = self._vocabulary
        return [random_number % vocabulary for random_number in random_numbers]
