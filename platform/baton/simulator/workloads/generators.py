"""Generates traces: independent requests, agents with tools, and phased traffic."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from baton.simulator.workloads import arrivals
from baton.simulator.workloads.arrivals import RateStep
from baton.simulator.workloads.lengths import LengthModel, Lengths, Lognormal
from baton.simulator.workloads.trace import Trace, TraceRequest

BLOCK_TOKENS = 16
"""Tokens of a block in generated prompts: the usual block size of engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Parameters of conversations.

    Theory of operation: a session is one growing text, cut into blocks. Turn k's prompt is a prefix
    of it, followed by its output; turn k+1's prompt begins with both. The ids of a turn cover
    prompt and output, so that an engine that generated the output holds the blocks of the next
    turn. All sessions share the system prompt. The trace is open loop: answers take
    `answer_s_per_token`, then the think time follows.
    """

    turns: float
    """Mean number of turns; geometrically distributed."""
    system_tokens: int
    """Length of the system prompt that all sessions share."""
    message: Lognormal
    output: Lognormal
    think_s_mean: float
    think_s_cv: float = 1.0
    """Think times are lognormal."""
    answer_s_per_token: float = 0.03
    """Assumed time per output token: 33 tokens/s, about reading speed."""
    max_context_tokens: int = 1 << 15
    """A session ends before its prompt and output exceed this."""

    def generate(
        self, name: str, starts_s: Iterable[float], rng: random.Random, *, until_s: float = math.inf
    ) -> Trace:
        """A session from each start, without turns at `until_s` or later.

        There are about `turns` requests per session.
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
        """Block ids of a session's text; its own count up from `next_block_id`."""
        shared = self.system_tokens // BLOCK_TOKENS
        blocks = -(-sum(turns[-1][1]) // BLOCK_TOKENS)
        return (*range(shared), *range(next_block_id, next_block_id + blocks - shared))


def independent_requests(
    name: str, times_s: Iterable[float], lengths: LengthModel, rng: random.Random
) -> Trace:
    """A request at each time, without shared blocks."""
    return Trace(name=name, requests=tuple(TraceRequest(at_s, *lengths(rng)) for at_s in times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAgents:
    """Agents: each prompt is a long shared prompt and a short text of its own; outputs are short.

    Shared prompts follow a Zipf law: the k-th has a probability proportional to 1 /
    k^`zipf_exponent`. Source: the shape of Mooncake's tool-agent trace (FAST'25 §4).
    """

    shared_prompts: int = 50
    zipf_exponent: float = 1.0
    shared_prompt: Lognormal
    own_prompt: Lognormal
    output: Lognormal

    def generate(self, name: str, times_s: Iterable[float], rng: random.Random) -> Trace:
        """A request at each time."""
        cumulative_weights = list(
            accumulate(1 / k**self.zipf_exponent for k in range(1, self.shared_prompts + 1))
        )
        shared_tokens = [self.shared_prompt.draw(rng) for _ in cumulative_weights]
        first_block_ids = list(
            accumulate((_blocks_for(tokens) for tokens in shared_tokens), initial=1)
        )
        next_block_id = first_block_ids[-1]
        requests = []
        for at_s in times_s:
            prompt_index = bisect_right(cumulative_weights, rng.random() * cumulative_weights[-1])
            prompt_tokens = shared_tokens[prompt_index] + self.own_prompt.draw(rng)
            # A partly shared block has another id in each request.
            shared_blocks = shared_tokens[prompt_index] // BLOCK_TOKENS
            own_blocks = _blocks_for(prompt_tokens) - shared_blocks
            ids = (
                *range(
                    first_block_ids[prompt_index], first_block_ids[prompt_index] + shared_blocks
                ),
                *range(next_block_id, next_block_id + own_blocks),
            )
            next_block_id += own_blocks
            requests.append(
                TraceRequest(
                    at_s=at_s,
                    prompt_tokens=prompt_tokens,
                    output_tokens=self.output.draw(rng),
                    block_ids=ids,
                )
            )
        return Trace(name=name, requests=tuple(requests), block_tokens=BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPhase:
    """Requests of several kinds, each with a share of the rate, for some time."""

    duration_s: float
    rate_per_s: float
    shares: tuple[tuple[str, float], ...]


def phased_traffic(
    name: str,
    phases: Sequence[TrafficPhase],
    kinds: dict[str, LengthModel],
    rng: random.Random,
) -> Trace:
    """Traffic with another rate and mix in each phase; a request's kind is its `slo_class`."""
    ends_s = list(accumulate(phase.duration_s for phase in phases))
    steps = [
        RateStep(from_s=end_s - phase.duration_s, rate_per_s=phase.rate_per_s)
        for end_s, phase in zip(ends_s, phases, strict=True)
    ]
    requests = []
    for at_s in arrivals.piecewise_poisson(steps, ends_s[-1], rng):
        # Rounding may put an arrival behind the last end.
        phase = phases[min(bisect_right(ends_s, at_s), len(phases) - 1)]
        names, weights = zip(*phase.shares, strict=True)
        kind = rng.choices(names, weights)[0]
        requests.append(TraceRequest(at_s, *kinds[kind](rng), slo_class=kind))
    return Trace(name=name, requests=tuple(requests))


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def session_rate_per_s(rate_per_s: float, conversations: Conversations) -> float:
    """Sessions per second for this number of requests per second, without context limits."""
    return rate_per_s / conversations.turns
