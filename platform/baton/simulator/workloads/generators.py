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


def independent(
    name: str, times_s: Iterable[float], lengths: LengthModel, rng: random.Random
) -> Trace:
    """A request at each time, none of which shares anything with another."""
    return Trace(name=name, requests=tuple(TraceRequest(at_s, *lengths(rng)) for at_s in times_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAgents:
    """Agents: each request is a long prompt that many share, something of its own, a short call.

    Which shared prompt it is follows a Zipf law: the k-th has a chance in proportion to
    1 / k^`skew`. Source: the shape of Mooncake's tool-agent trace (FAST'25 §4).
    """

    shared_prompts: int = 50
    skew: float = 1.0
    shared: Lognormal
    own: Lognormal
    output: Lognormal

    def generate(self, name: str, times_s: Iterable[float], rng: random.Random) -> Trace:
        """A request at each time."""
        heights = list(accumulate(1 / k**self.skew for k in range(1, self.shared_prompts + 1)))
        shared = [self.shared.draw(rng) for _ in heights]
        firsts = list(accumulate((_blocks(one) for one in shared), initial=1))
        fresh = firsts[-1]
        requests = []
        for at_s in times_s:
            which = bisect_right(heights, rng.random() * heights[-1])
            prompt_tokens = shared[which] + self.own.draw(rng)
            # A block that the shared prompt only begins has another id in each request.
            full = shared[which] // BLOCK_TOKENS
            own = _blocks(prompt_tokens) - full
            ids = (*range(firsts[which], firsts[which] + full), *range(fresh, fresh + own))
            fresh += own
            requests.append(TraceRequest(at_s, prompt_tokens, self.output.draw(rng), ids))
        return Trace(name=name, requests=tuple(requests), block_tokens=BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """For some time, requests of several kinds arrive, each with a share of the rate."""

    duration_s: float
    rate_per_s: float
    shares: tuple[tuple[str, float], ...]
    """The kind of a request, and how often it is that, in any unit."""


def phased(
    name: str,
    phases: Sequence[Phase],
    kinds: dict[str, LengthModel],
    rng: random.Random,
) -> Trace:
    """Traffic whose rate and mix change with each phase; a request's kind is its `slo_class`."""
    ends_s = list(accumulate(one.duration_s for one in phases))
    steps = [
        RateStep(from_s=end_s - one.duration_s, rate_per_s=one.rate_per_s)
        for end_s, one in zip(ends_s, phases, strict=True)
    ]
    requests = []
    for at_s in arrivals.varying(steps, ends_s[-1], rng):
        # The sums of durations may round differently from the steps' beginnings.
        phase = phases[min(bisect_right(ends_s, at_s), len(phases) - 1)]
        names, weights = zip(*phase.shares, strict=True)
        kind = rng.choices(names, weights)[0]
        requests.append(TraceRequest(at_s, *kinds[kind](rng), slo_class=kind))
    return Trace(name=name, requests=tuple(requests))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
