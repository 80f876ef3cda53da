"""Makes up conversations of several turns, each turn's prompt beginning with all that was said.

Theory of operation: a session is one growing text, cut into blocks. Turn k's prompt is a beginning
of it, its output the piece behind, and turn k+1's prompt begins with both; the ids of a turn cover
its prompt and its output, so that an engine which generated the output holds the blocks the next
turn asks for. The front of the text is the same in all sessions: the system prompt. A trace is open
loop, so when an answer is complete is assumed, at `answer_s_per_token`, and the think time follows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.simulator.workloads.generators import BLOCK_TOKENS
from baton.simulator.workloads.lengths import Lengths, Lognormal
from baton.simulator.workloads.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """What conversations are like."""

    turns: float
    """The mean number; each turn is the last with the same chance (a geometric law)."""
    system_tokens: int
    """In front of every prompt, the same for all."""
    message: Lognormal
    """Tokens that a user adds in a turn."""
    output: Lognormal
    think_s_mean: float
    think_s_cv: float = 1.0
    """Think times are lognormal."""
    answer_s_per_token: float = 0.03
    """How fast answers are assumed to come, beside the think time: 33 tokens/s, as one reads."""
    max_context_tokens: int = 1 << 15
    """A session ends before its prompt and output are longer than this."""

    def generate(
        self, name: str, starts_s: Iterable[float], rng: random.Random, *, until_s: float = math.inf
    ) -> Trace:
        """A session from each start, without the turns that begin at `until_s` or later.

        The number of sessions is that of starts; that of requests is about `turns` times as many.
        """
        requests: list[TraceRequest] = []
        next_block_id = self.system_tokens // BLOCK_TOKENS + 1
        for number, start_s in enumerate(starts_s):
            turns = list(self._turns(start_s, random.Random(rng.getrandbits(64))))  # noqa: S311
            ids = self._block_ids(turns, next_block_id)
            next_block_id += len(ids)
            requests += [
                TraceRequest(at_s, *lengths, ids[: -(-sum(lengths) // BLOCK_TOKENS)], f"s{number}")
                for at_s, lengths in turns
                if at_s < until_s
            ]
        requests.sort(key=lambda request: request.at_s)
        return Trace(name=name, requests=tuple(requests), block_tokens=BLOCK_TOKENS)

    def _turns(self, start_s: float, rng: random.Random) -> Iterator[tuple[float, Lengths]]:
        at_s, context_tokens = start_s, self.system_tokens
        while True:
            lengths = Lengths(context_tokens + self.message.draw(rng), self.output.draw(rng))
            if sum(lengths) > self.max_context_tokens and context_tokens > self.system_tokens:
                return
            yield at_s, lengths
            if rng.random() * self.turns < 1:
                return
            context_tokens = sum(lengths)
            at_s += lengths.output_tokens * self.answer_s_per_token + self._think_s(rng)

    def _think_s(self, rng: random.Random) -> float:
        log_variance = math.log1p(self.think_s_cv**2)
        return rng.lognormvariate(
            math.log(self.think_s_mean) - log_variance / 2, math.sqrt(log_variance)
        )

    def _block_ids(self, turns: list[tuple[float, Lengths]], next_block_id: int) -> tuple[int, ...]:
        """Ids of the blocks of a session's text, its own counted up from `next_block_id`."""
        shared = self.system_tokens // BLOCK_TOKENS
        blocks = -(-sum(turns[-1][1]) // BLOCK_TOKENS)
        return (*range(shared), *range(next_block_id, next_block_id + blocks - shared))


def session_rate_per_s(rate_per_s: float, conversations: Conversations) -> float:
    """Sessions per second that make about so many requests per second, context limits aside."""
    return rate_per_s / conversations.turns
