"""A leg inside a simulated engine, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from baton.domain.handoff import CacheUse, Leg, LegKind
from baton.domain.kv_events import BlockHash
from baton.simulator.engine.commands import SimKvHandle
from baton.simulator.engine.leg_timer import LegTimer
from baton.simulator.engine.tokens import TokenStream


class LegRunState(Enum):
    """Where a leg is; `baton.simulator.engine.core` lists the transitions."""

    WAITING = auto()
    FETCHING = auto()
    READY = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class LegRun:
    """A leg and its progress."""

    leg: Leg
    kv_handle: SimKvHandle | None
    tokens: list[int]
    end_tokens: int
    token_stream: TokenStream
    hashes: list[BlockHash] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached_blocks: int = 0
    host_blocks: int = 0
    """Blocks behind the cached blocks that are to be loaded from the host tier."""
    computed_tokens: int = 0
    local_hit_tokens: int = 0
    """Tokens in the local prefix cache when the leg was placed."""
    cached_tokens: int | None = None
    """Prompt tokens from a cache or a pull when the leg first ran; None before."""
    first_output_sent: bool = False
    timer: LegTimer
    state: LegRunState = LegRunState.WAITING

    @property
    def missing_tokens(self) -> int:
        """Tokens to compute before the next can be sampled."""
        return len(self.tokens) - self.computed_tokens

    def cache_use(self, cached_now_tokens: int) -> CacheUse:
        """Report the cache use of its prompt, of which `cached_now_tokens` are cached now."""
        cached_tokens = self.cached_tokens or 0
        return CacheUse(
            cached_tokens - self.local_hit_tokens, max(0, cached_now_tokens - cached_tokens)
        )

    @property
    def expected_missing_tokens(self) -> int:
        """`missing_tokens`; before the first step, at most those that the coordinator expects."""
        missing = self.missing_tokens
        return (
            missing
            if self.cached_tokens is not None
            else min(missing, self.leg.uncached_prompt_tokens)
        )

    @property
    def is_streaming(self) -> bool:
        """Whether a client waits for its next token, as after the first."""
        has_more_tokens = self.leg.kind is not LegKind.PREFILL and self.leg.max_tokens > 1
        return has_more_tokens and self.generated_tokens > 0 and self.missing_tokens == 1

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that this leg has generated."""
        return len(self.tokens) - len(self.leg.prompt_token_ids)
