"""`EngineTiming` from a model of steps, for pools that have not reported yet.

Unlike the linear fit, it includes that prefill attention grows with the square of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.perf.step_timing import StepBatch, StepTiming, attention_pairs
from baton.perf.steps.step_costs import prefill_budget_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledTiming:
    """`EngineTiming` over a `StepTiming`.

    A prompt's first steps are full chunks; its last step is the rest. A step is linear in the
    tokens before its chunk, so the mean of the first and last full chunk is the mean of all. Steps
    of a queue of prompts are taken to be alike.
    """

    steps: StepTiming
    max_batched_tokens: int
    """Tokens of one step, decodes included."""
    max_batched_tokens_while_decoding: int | None = None
    """The same for steps with decodes; None: no lower limit."""
    host_block_s: float
    """Time to load one block from host memory."""

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """Time to compute `tokens` prompt tokens, in chunks, beside `running` decodes."""
        if tokens <= 0:
            return 0.0
        chunk_budget_tokens = prefill_budget_tokens(
            self.max_batched_tokens, self.max_batched_tokens_while_decoding, running
        )
        has_many_prompts = 0 < length_tokens < tokens
        if tokens <= chunk_budget_tokens and not has_many_prompts:  # mostly
            return self._chunk_s(tokens, 0, running, context_tokens, is_last=True)
        batch = (running, context_tokens, length_tokens)
        if tokens <= chunk_budget_tokens:
            return self._mixed_s(tokens, *batch)
        full_chunks, last_chunk_tokens = divmod(tokens, chunk_budget_tokens)
        if not last_chunk_tokens:
            full_chunks, last_chunk_tokens = full_chunks - 1, chunk_budget_tokens
        if has_many_prompts:
            return full_chunks * self._mixed_s(chunk_budget_tokens, *batch) + self._mixed_s(
                last_chunk_tokens, *batch
            )
        seconds = self._chunk_s(
            last_chunk_tokens,
            full_chunks * chunk_budget_tokens,
            running,
            context_tokens,
            is_last=True,
        )
        if full_chunks:
            first_s = self._chunk_s(chunk_budget_tokens, 0, running, context_tokens)
            last_s = self._chunk_s(
                chunk_budget_tokens,
                (full_chunks - 1) * chunk_budget_tokens,
                running,
                context_tokens,
            )
            seconds += full_chunks * (first_s + last_s) / 2
        return seconds

    def _mixed_s(self, tokens: int, running: int, context_tokens: int, length_tokens: int) -> float:
        """One step with `tokens` of prompts of one length, at an average position in them."""
        # A token attends to itself and, on average, to half of the others of its prompt.
        pairs = tokens * (length_tokens + 1) / 2
        prefix_tokens = max(0, length_tokens - tokens) // 2
        prompts = max(1, round(tokens / length_tokens))
        finished_prompts = min(prompts, tokens // length_tokens)
        return self.steps.step_s(
            StepBatch(
                tokens, prompts, pairs, prefix_tokens, running, context_tokens, finished_prompts
            )
        )

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        """One step that decodes for `running` requests and prefills nothing."""
        return self.steps.step_s(StepBatch(0, 0, 0.0, 0, running, context_tokens))

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        """Time that a second request adds to each step; the first pays for reading the weights."""
        two_requests_s = self.step_s(running=2, context_tokens=context_tokens + 1)
        return max(0.0, two_requests_s - self.step_s(running=1, context_tokens=1))

    def host_load_s(self, blocks: int) -> float:
        """Time to load blocks from host memory into the KV cache."""
        return max(0, blocks) * self.host_block_s

    def _chunk_s(
        self,
        tokens: int,
        prefix_tokens: int,
        running: int,
        context_tokens: int,
        *,
        is_last: bool = False,
    ) -> float:
        pairs = attention_pairs(tokens, prefix_tokens)
        return self.steps.step_s(
            StepBatch(tokens, 1, pairs, prefix_tokens, running, context_tokens, int(is_last))
        )
