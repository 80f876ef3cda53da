"""A leg inside a counted engine, and how far it has come."""

from __future__ import annotations

from enum import IntEnum

from baton.domain.handoff import CacheUse, Leg, LegKind, LegOutput
from baton.domain.hashed_prompt import TokenIds
from baton.domain.request import FinishReason
from baton.simulator.engine.commands import SimKvHandle
from baton.simulator.engine.leg_timer import LegTimer
from baton.simulator.workloads.trace import decode_output_tokens


class LegRunState(IntEnum):
    """Where a leg is; `baton.simulator.v1.core` tells the edges."""

    PULL_QUEUED = 0
    """Too many pull already: it waits beside the queue."""
    WAITING = 1
    PULLING = 2
    READY = 3
    RUNNING = 4
    ENDED = 5


class LegRun:
    """A leg and how far it has come. Not a dataclass: there are many, and steps change them."""

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
        """Not yet pulled."""
        self.needs_pull_slot = kv_handle is not None
        """Whether it takes one of the places of those that pull: until its first output."""
        self.kv_preloaded = kv_preloaded
        """Whether the KV of all tokens but the last is here as soon as there are blocks for it."""
        self.is_prefill = leg.kind is LegKind.PREFILL
        self.known_tokens = len(self.prompt)
        """All that are known: the prompt's and those generated since."""
        self.end_tokens, self.finish_reason = _end_condition(leg, max_known_tokens)
        """It ends when so many are known, and why."""
        self.computed_tokens = 0
        """How many of them are in the KV cache when the step under way began."""
        self.scheduled_tokens = 0
        """How many the step under way computes."""
        self.hashes: list[int] = []
        """Of the leading full blocks, as far as they were needed."""
        self.shared_blocks = 0
        """Leading blocks that are in the prefix cache, this run being one of their users."""
        self.private_blocks = 0
        """Blocks behind those, nobody else's."""
        self.cached_tokens = -1
        """Tokens that it had not to compute itself; -1 before it first ran."""
        self.local_hit_tokens = 0
        """Those of them that were in the prefix cache when it was first placed."""
        self.first_output_sent = False
        self.timer = LegTimer(queued_at_s)
        self.plain_output = LegOutput(leg.leg_id, (0,))
        """What a step produces for it that is neither its first nor its last."""
        self.in_batch = False
        """Whether a pipeline's batch with it is under way."""
        self.state = LegRunState.WAITING

    @property
    def blocks(self) -> int:
        """All blocks it has."""
        return self.shared_blocks + self.private_blocks

    def cache_use(self, cached_now_tokens: int) -> CacheUse:
        """What is said of its prompt, of which the prefix cache holds so many tokens now."""
        return CacheUse(
            self.cached_tokens - self.local_hit_tokens,
            max(0, cached_now_tokens - self.cached_tokens),
        )

    @property
    def is_streaming(self) -> bool:
        """Whether somebody waits for each token after its first."""
        return not self.is_prefill and self.leg.max_tokens > 1

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that this engine will have to compute before the next one can be drawn.

        How much of a prompt is cached shows when it begins; before, it is what was expected.
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


def _end_condition(leg: Leg, max_known_tokens: int) -> tuple[int, FinishReason]:
    """How many tokens a leg knows when it ends, at most `max_known_tokens`, and why it ends."""
    prompt_tokens = len(leg.prompt_token_ids)
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
