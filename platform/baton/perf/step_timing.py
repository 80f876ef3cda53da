"""The port through which the simulator and the planner ask how long one engine step takes."""

from __future__ import annotations

from typing import Protocol

from baton.domain.value import Value


class StepBatch(Value, kw_only=False):
    """What one engine step computes, as sums over the requests in it."""

    prefill_tokens: int = 0
    """Prompt tokens computed: the chunks of this step."""
    prefill_requests: int = 0
    """Requests with a chunk in this step."""
    prefill_pairs: float = 0.0
    """Pairs of a computed token and one it attends to: for a chunk of q tokens behind p that are
    there already, q * p + q * (q + 1) / 2."""
    prefill_context_tokens: int = 0
    """Tokens that were there before the chunks and are read by them: the sum of those p."""
    decode_requests: int = 0
    decode_context_tokens: int = 0
    """Tokens that the decoding requests attend to, all together."""
    finished_prefills: int = 0
    """Chunks that end their prompt: those, like decodes, need the output layer and a sampler."""

    @property
    def tokens(self) -> int:
        """All tokens that go through the model in this step."""
        return self.prefill_tokens + self.decode_requests


class StepTiming(Protocol):
    """How long one step of an engine takes; pure and deterministic.

    Monotonic in each part of the batch, and near to linear in `decode_context_tokens`: a body may
    compute many decode steps at once and take the mean of the first and the last.
    """

    def step_s(self, batch: StepBatch) -> float:
        """From the batch being chosen to its tokens being there, in seconds; more than 0."""
        ...


def attention_pairs(tokens: int, prefix_tokens: int) -> float:
    """`StepBatch.prefill_pairs` of one chunk of `tokens` behind `prefix_tokens` others."""
    return tokens * prefix_tokens + tokens * (tokens + 1) / 2
