"""A leg inside a counted engine, and how far it has come."""

from __future__ import annotations

from enum import IntEnum

from baton.domain.handoff import CacheUse, Leg, LegKind, LegOutput
from baton.domain.hashed_prompt import TokenIds
from baton.domain.request import FinishReason
from baton.simulator.engine.commands import SimTicket
from baton.simulator.engine.leg_timer import Watch
from baton.simulator.workloads.trace import output_of


class RunState(IntEnum):
    """Where a leg is; `baton.simulator.v1.core` tells the edges."""

    HELD = 0
    """Too many pull already: it waits beside the queue."""
    WAITING = 1
    TRANSFER = 2
    READY = 3
    RUNNING = 4
    ENDED = 5


class Run:
    """A leg and how far it has come. Not a dataclass: there are many, and steps change them."""

    __slots__ = (
        "arrived",
        "cached_tokens",
        "computed",
        "hashes",
        "held",
        "in_batch",
        "is_prefill",
        "leg",
        "leg_id",
        "limit",
        "own_tokens",
        "private",
        "prompt",
        "pulls",
        "reason",
        "reported",
        "scheduled",
        "state",
        "ticket",
        "tokens",
        "usual",
        "watch",
    )

    def __init__(
        self,
        leg: Leg,
        ticket: SimTicket | None,
        *,
        longest: int,
        arrived: bool = False,
        queued_at_s: float | None = None,
    ) -> None:
        self.leg = leg
        self.leg_id = leg.leg_id
        self.prompt: TokenIds = leg.prompt_token_ids
        self.ticket = ticket
        """Not yet pulled."""
        self.pulls = ticket is not None
        """Whether it takes one of the places of those that pull: until its first output."""
        self.arrived = arrived
        """Whether the KV of all tokens but the last is here as soon as there are blocks for it."""
        self.is_prefill = leg.kind is LegKind.PREFILL
        self.tokens = len(self.prompt)
        """All that are known: the prompt's and those generated since."""
        self.limit, self.reason = _ending(leg, longest)
        """It ends when so many are known, and why."""
        self.computed = 0
        """How many of them are in the KV cache when the step under way began."""
        self.scheduled = 0
        """How many the step under way computes."""
        self.hashes: list[int] = []
        """Of the leading full blocks, as far as they were needed."""
        self.held = 0
        """Leading blocks that are in the prefix cache, this run being one of their users."""
        self.private = 0
        """Blocks behind those, nobody else's."""
        self.cached_tokens = -1
        """Tokens that it had not to compute itself; -1 before it first ran."""
        self.own_tokens = 0
        """Those of them that were in the prefix cache when it was first placed."""
        self.reported = False
        self.watch = Watch(queued_at_s)
        self.usual = LegOutput(leg.leg_id, (0,))
        """What a step produces for it that is neither its first nor its last."""
        self.in_batch = False
        """Whether a pipeline's batch with it is under way."""
        self.state = RunState.WAITING

    @property
    def blocks(self) -> int:
        """All blocks it has."""
        return self.held + self.private

    def cache_use(self, kept_tokens: int) -> CacheUse:
        """What is said of its prompt, of which the prefix cache holds so many tokens now."""
        return CacheUse(
            self.cached_tokens - self.own_tokens, max(0, kept_tokens - self.cached_tokens)
        )

    @property
    def streams(self) -> bool:
        """Whether somebody waits for each token after its first."""
        return not self.is_prefill and self.leg.max_tokens > 1

    @property
    def to_compute(self) -> int:
        """Tokens that this engine will have to compute before the next one can be drawn.

        How much of a prompt is cached shows when it begins; before, it is what was expected.
        """
        missing = self.tokens - self.computed
        if self.arrived:
            return 1
        if self.ticket is not None:
            missing = max(1, missing - self.ticket.tokens)
        return missing if self.cached_tokens >= 0 else min(missing, max(1, self.leg.to_compute))


def _ending(leg: Leg, longest: int) -> tuple[int, FinishReason]:
    """How many tokens a leg will know when it ends, at most `longest`, and why it ends then."""
    prompt = len(leg.prompt_token_ids)
    in_all = output_of(leg.payload)
    if leg.kind is LegKind.PREFILL:
        last = leg.gives_token and in_all is not None and in_all - leg.resumed_tokens <= 1
        return prompt + 1, FinishReason.STOP if last else FinishReason.LENGTH
    most = min(prompt + leg.max_tokens, longest)
    if in_all is None:
        return most, FinishReason.LENGTH
    end = prompt + max(1, in_all - leg.resumed_tokens)
    return (end, FinishReason.STOP) if end < most else (most, FinishReason.LENGTH)
