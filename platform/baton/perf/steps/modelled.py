"""An engine's timing for decisions, from a model of its steps: what a pool has before it reports.

Unlike the linear fit it sees that attention over a prompt grows with the prompt's square.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.perf.step_timing import StepBatch, StepTiming, attention_pairs
from baton.perf.steps.step_costs import prefill_budget_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledTiming:
    """`EngineTiming` over a `StepTiming`.

    A prompt's first steps are full chunks and its last one is what is left. Few of them are looked
    at: chunks of one size differ by what lies before them only, in which a step is linear, so the
    first and the last full chunk tell the mean of all. Of a queue of prompts, steps are taken to be
    alike.
    """

    steps: StepTiming
    max_batched_tokens: int
    """How many tokens fit into one step, decodes included."""
    max_batched_tokens_while_decoding: int | None = None
    """How many, where anybody decodes; None: as many."""
    host_block_s: float
    """To bring one block from the host's memory."""

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """Until `tokens` prompt tokens are computed, in chunks, beside `running` decodes."""
        if tokens <= 0:
            return 0.0
        chunk_budget_tokens = prefill_budget_tokens(
            self.max_batched_tokens, self.max_batched_tokens_while_decoding, running
        )
        has_many_prompts = 0 < length_tokens < tokens
        batch = (running, context_tokens, length_tokens)
        if tokens <= chunk_budget_tokens:  # mostly
            if has_many_prompts:
                return self._mixed_s(tokens, *batch)
            return self._chunk_s(tokens, 0, running, context_tokens, is_last=True)
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
        """One step with so many tokens of prompts of one length, at whatever place in them."""
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
        """What one more request with so much context adds to each step.

        To a step that decodes for one already: the first pays for reading the weights.
        """
        two_requests_s = self.step_s(running=2, context_tokens=context_tokens + 1)
        return max(0.0, two_requests_s - self.step_s(running=1, context_tokens=1))

    def host_load_s(self, blocks: int) -> float:
        """To bring blocks from the host's memory into the KV cache."""
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
        pairs, finished = attention_pairs(tokens, prefix_tokens), int(is_last)
        return self.steps.step_s(
            StepBatch(tokens, 1, pairs, prefix_tokens, running, context_tokens, finished)
        )
