"""An engine's timing for decisions, from a model of its steps: what a pool has before it reports.

Unlike the linear fit it sees that attention over a prompt grows with the prompt's square.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.perf.step_timing import StepBatch, StepTiming, chunk_pairs
from baton.perf.steps.step_costs import prompt_room


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
    decode_step_tokens: int | None = None
    """How many, where anybody decodes; None: as many."""
    host_block_s: float
    """To bring one block from the host's memory."""

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """Until `tokens` prompt tokens are computed, in chunks, beside `running` decodes."""
        if tokens <= 0:
            return 0.0
        room = prompt_room(self.max_batched_tokens, self.decode_step_tokens, running)
        several = 0 < length_tokens < tokens
        batch = (running, context_tokens, length_tokens)
        if tokens <= room:  # mostly
            if several:
                return self._mixed_s(tokens, *batch)
            return self._chunk_s(tokens, 0, running, context_tokens, ends=True)
        full, left = divmod(tokens, room)
        if not left:
            full, left = full - 1, room
        if several:
            return full * self._mixed_s(room, *batch) + self._mixed_s(left, *batch)
        seconds = self._chunk_s(left, full * room, running, context_tokens, ends=True)
        if full:
            first_s = self._chunk_s(room, 0, running, context_tokens)
            last_s = self._chunk_s(room, (full - 1) * room, running, context_tokens)
            seconds += full * (first_s + last_s) / 2
        return seconds

    def _mixed_s(self, tokens: int, running: int, context_tokens: int, length_tokens: int) -> float:
        """One step with so many tokens of prompts of one length, at whatever place in them."""
        # A token attends to itself and, on average, to half of the others of its prompt.
        pairs = tokens * (length_tokens + 1) / 2
        before = max(0, length_tokens - tokens) // 2
        prompts = max(1, round(tokens / length_tokens))
        ends = min(prompts, tokens // length_tokens)
        return self.steps.step_s(
            StepBatch(tokens, prompts, pairs, before, running, context_tokens, ends)
        )

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        """One step that decodes for `running` requests and prefills nothing."""
        return self.steps.step_s(StepBatch(0, 0, 0.0, 0, running, context_tokens))

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        """What one more request with so much context adds to each step.

        To a step that decodes for one already: the first pays for reading the weights.
        """
        more = self.step_s(running=2, context_tokens=context_tokens + 1)
        return max(0.0, more - self.step_s(running=1, context_tokens=1))

    def host_load_s(self, blocks: int) -> float:
        """To bring blocks from the host's memory into the KV cache."""
        return max(0, blocks) * self.host_block_s

    def _chunk_s(
        self, tokens: int, before: int, running: int, context_tokens: int, *, ends: bool = False
    ) -> float:
        pairs, finished = chunk_pairs(tokens, before), int(ends)
        return self.steps.step_s(
            StepBatch(tokens, 1, pairs, before, running, context_tokens, finished)
        )
