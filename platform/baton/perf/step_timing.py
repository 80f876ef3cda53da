"""The port through which the simulator and the planner ask how long one engine step takes."""

from __future__ import annotations

from typing import Protocol

from baton.domain.value import Value


class StepBatch(Value, kw_only=False):
    """Work of one engine step, as sums over its requests."""

    prefill_tokens: int = 0
    """Prompt tokens computed: the chunks of this step."""
    prefill_requests: int = 0
    """Requests with a chunk in this step."""
    prefill_pairs: float = 0.0
    """Pairs of a computed token and a token that it attends to. A chunk of q tokens behind p
    earlier tokens has q * p + q * (q + 1) / 2."""
    prefill_context_tokens: int = 0
    """Sum of p: tokens before the chunks, which the chunks read."""
    decode_requests: int = 0
    decode_context_tokens: int = 0
    """Tokens that the decoding requests attend to, in total."""
    finished_prefills: int = 0
    """Chunks that end their prompt; like decodes, these need the output layer and a sampler."""

    @property
    def tokens(self) -> int:
        """All tokens that pass through the model in this step."""
        return self.prefill_tokens + self.decode_requests


class StepTiming(Protocol):
    """Duration of one engine step; pure and deterministic.

    It is monotonic in each part of the batch and nearly linear in `decode_context_tokens`. Callers
    may compute many decode steps as the mean of the first and the last.
    """

    def step_s(self, batch: StepBatch) -> float:
        """Seconds from the choice of the batch to its tokens; more than 0."""
        ...


def attention_pairs(tokens: int, prefix_tokens: int) -> float:
    """`StepBatch.prefill_pairs` of one chunk of `tokens` behind `prefix_tokens` others."""
    return tokens * prefix_tokens + tokens * (tokens + 1) / 2
