"""Makes traces up: independent requests, agents with tools, and traffic whose nature changes."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from baton.simulator.workloads import arrivals
from baton.simulator.workloads.arrivals import RateStep
from baton.simulator.workloads.lengths import LengthModel, Lognormal
from baton.simulator.workloads.trace import Trace, TraceRequest

BLOCK_TOKENS = 16
"""Of the blocks that made-up prompts are told apart by: what engines use most."""


def independent_requests(
    name: str, times_s: Iterable[float], lengths: LengthModel, rng: random.Random
) -> Trace:
    """A request at each time, none of which shares anything with another."""
    return Trace(name=name, requests=tuple(TraceRequest(at_s, *lengths(rng)) for at_s in times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAgents:
    """Agents: each request is a long prompt that many share, something of its own, a short call.

    Which shared prompt it is follows a Zipf law: the k-th has a chance in proportion to
    1 / k^`zipf_exponent`. Source: the shape of Mooncake's tool-agent trace (FAST'25 §4).
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
            accumulate((_blocks_for(shared_token) for shared_token in shared_tokens), initial=1)
        )
        next_block_id = first_block_ids[-1]
        requests = []
        for at_s in times_s:
            prompt_index = bisect_right(cumulative_weights, rng.random() * cumulative_weights[-1])
            prompt_tokens = shared_tokens[prompt_index] + self.own_prompt.draw(rng)
            # A block that the shared prompt only begins has another id in each request.
            shared_blocks = shared_tokens[prompt_index] // BLOCK_TOKENS
            own_blocks = _blocks_for(prompt_tokens) - shared_blocks
            ids = (
                *range(
                    first_block_ids[prompt_index], first_block_ids[prompt_index] + shared_blocks
                ),
                *range(next_block_id, next_block_id + own_blocks),
            )
            next_block_id += own_blocks
            requests.append(TraceRequest(at_s, prompt_tokens, self.output.draw(rng), ids))
        return Trace(name=name, requests=tuple(requests), block_tokens=BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPhase:
    """For some time, requests of several kinds arrive, each with a share of the rate."""

    duration_s: float
    rate_per_s: float
    shares: tuple[tuple[str, float], ...]
    """The kind of a request, and how often it is that, in any unit."""


def phased_traffic(
    name: str,
    phases: Sequence[TrafficPhase],
    kinds: dict[str, LengthModel],
    rng: random.Random,
) -> Trace:
    """Traffic whose rate and mix change with each phase; a request's kind is its `slo_class`."""
    ends_s = list(accumulate(other.duration_s for other in phases))
    steps = [
        RateStep(from_s=end_s - each_phase.duration_s, rate_per_s=each_phase.rate_per_s)
        for end_s, each_phase in zip(ends_s, phases, strict=True)
    ]
    requests = []
    for at_s in arrivals.piecewise_poisson(steps, ends_s[-1], rng):
        # The sums of durations may round differently from the steps' beginnings.
        phase = phases[min(bisect_right(ends_s, at_s), len(phases) - 1)]
        names, weights = zip(*phase.shares, strict=True)
        kind = rng.choices(names, weights)[0]
        requests.append(TraceRequest(at_s, *kinds[kind](rng), slo_class=kind))
    return Trace(name=name, requests=tuple(requests))


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
