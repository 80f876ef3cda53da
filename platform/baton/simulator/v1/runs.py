"""A leg inside a counted engine, and its progress."""

from __future__ import annotations

from enum import IntEnum

from baton.domain.handoff import CacheUse, Leg, LegKind, LegOutput
from baton.domain.hashed_prompt import TokenIds
from baton.domain.request import FinishReason
from baton.simulator.engine.commands import SimKvHandle
from baton.simulator.engine.leg_timer import LegTimer
from baton.simulator.workloads.trace import decode_output_tokens


class LegRunState(IntEnum):
    """Where a leg is; `baton.simulator.v1.core` lists the transitions."""

    PULL_QUEUED = 0
    """Waits outside the queue: `max_pulls` others pull."""
    WAITING = 1
    PULLING = 2
    READY = 3
    RUNNING = 4
    ENDED = 5


class LegRun:
    """A leg and its progress. A plain class with slots, for speed."""

    __slots__ = (
        "cached_tokens",
        "computed_tokens",
        "end_tokens",
        "finish_reason",
        "first_output_sent",
        "hashes",
        "in_batch",
        "is_prefill",
        "known_tokens",
        "kv_handle",
        "kv_preloaded",
        "leg",
        "leg_id",
        "local_hit_tokens",
        "needs_pull_slot",
        "plain_output",
        "private_blocks",
        "prompt",
        "scheduled_tokens",
        "shared_blocks",
        "state",
        "timer",
    )

    def __init__(
        self,
        leg: Leg,
        kv_handle: SimKvHandle | None,
        *,
        max_known_tokens: int,
        kv_preloaded: bool = False,
        queued_at_s: float | None = None,
    ) -> None:
        self.leg = leg
        self.leg_id = leg.leg_id
        self.prompt: TokenIds = leg.prompt_token_ids
        self.kv_handle = kv_handle
        """Of blocks that are still to be pulled."""
        self.needs_pull_slot = kv_handle is not None
        """Whether it counts against `max_pulls`, or will: until its blocks are here."""
        self.kv_preloaded = kv_preloaded
        """Whether it has the KV of all tokens but the last once there are blocks for it."""
        self.is_prefill = leg.kind is LegKind.PREFILL
        self.known_tokens = len(self.prompt)
        """Prompt tokens and generated tokens."""
        self.end_tokens, self.finish_reason = _end_condition(
            leg, self.known_tokens, max_known_tokens
        )
        """Known tokens at which it ends, and why."""
        self.computed_tokens = 0
        """Known tokens in the KV cache before the step under way."""
        self.scheduled_tokens = 0
        """Tokens that the step under way computes."""
        self.hashes: list[int] = []
        """Of the leading full blocks, as far as needed yet."""
        self.shared_blocks = 0
        """Leading blocks in the prefix cache, with this run among their users."""
        self.private_blocks = 0
        """Blocks behind those, used by this run only."""
        self.cached_tokens = -1
        """Prompt tokens from the cache or a pull; -1 before its first step."""
        self.local_hit_tokens = 0
        """Those that the local prefix cache held when it was first placed."""
        self.first_output_sent = False
        self.timer = LegTimer(queued_at_s)
        self.plain_output = LegOutput(leg.leg_id, (0,))
        """Its output of a step that is neither its first nor its last."""
        self.in_batch = False
        """Whether it is in a pipeline batch under way."""
        self.state = LegRunState.WAITING

    @property
    def blocks(self) -> int:
        """All its blocks."""
        return self.shared_blocks + self.private_blocks

    def cache_use(self, cached_now_tokens: int) -> CacheUse:
        """Report the cache use of its prompt, of which `cached_now_tokens` are cached now."""
        return CacheUse(
            self.cached_tokens - self.local_hit_tokens,
            max(0, cached_now_tokens - self.cached_tokens),
        )

    @property
    def is_streaming(self) -> bool:
        """Whether a client waits for each token after the first."""
        return not self.is_prefill and self.leg.max_tokens > 1

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that this engine must compute before the next can be sampled.

        Before the first step shows the cached tokens, it uses the coordinator's expectation.
        """
        missing = self.known_tokens - self.computed_tokens
        if self.kv_preloaded:
            return 1
        if self.kv_handle is not None:
            missing = max(1, missing - self.kv_handle.tokens)
        return (
            missing
            if self.cached_tokens >= 0
            else min(missing, max(1, self.leg.uncached_prompt_tokens))
        )


def _end_condition(leg: Leg, prompt_tokens: int, max_known_tokens: int) -> tuple[int, FinishReason]:
    """Known tokens at which a leg ends, at most `max_known_tokens`, and the reason."""
    output_tokens = decode_output_tokens(leg.payload)
    if leg.kind is LegKind.PREFILL:
        is_last_token = (
            leg.emits_first_token
            and output_tokens is not None
            and output_tokens - leg.resumed_tokens <= 1
        )
        return prompt_tokens + 1, FinishReason.STOP if is_last_token else FinishReason.LENGTH
    max_end_tokens = min(prompt_tokens + leg.max_tokens, max_known_tokens)
    if output_tokens is None:
        return max_end_tokens, FinishReason.LENGTH
    end_tokens = prompt_tokens + max(1, output_tokens - leg.resumed_tokens)
    return (
        (end_tokens, FinishReason.STOP)
        if end_tokens < max_end_tokens
        else (max_end_tokens, FinishReason.LENGTH)
    )
