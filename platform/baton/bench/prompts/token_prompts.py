"""Turns a trace's prompts into token ids: made up, but shared exactly where the trace says so."""

from __future__ import annotations

import random
from array import array
from functools import lru_cache

from baton.simulator.workloads.trace import TraceRequest

_KEPT_BLOCKS = 4096
"""A few megabytes: the blocks that are asked for again and again."""


class PromptMaker:
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
        self._shared = lru_cache(_KEPT_BLOCKS)(self._block)

    def prompt(self, one: TraceRequest, number: int) -> list[int]:
        """The token ids of request `number` of the trace."""
        size = self._block_tokens
        ids = one.block_ids[: -(-one.prompt_tokens // size)]
        made: list[int] = []
        for block in ids:
            made += self._shared(f"shared {block}")
        own = one.prompt_tokens - len(made)
        if own > 0:
            made += self._run(f"own {number}", own)
        return made[: one.prompt_tokens]

    def _block(self, name: str) -> list[int]:
        return self._run(name, self._block_tokens)

    def _run(self, name: str, tokens: int) -> list[int]:
        """Random ids, the same for the same name; fast, for prompts have up to a million."""
        rng = random.Random(f"{self._seed} {name}")  # noqa: S311 - made up, not secret
        drawn = array("I", rng.randbytes(4 * tokens))
        vocabulary = self._vocabulary
        return [one % vocabulary for one in drawn]
