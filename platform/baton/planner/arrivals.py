"""Traffic at any rate, made of a trace: stretches of it, laid over each other or thinned.

Times are never compressed, which would change how bursts compare to the mean. Two samples at nearly
the same rate have nearly the same requests, so that differences between fleets are not those of
chance (common random numbers).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from zlib import crc32

from baton.simulator.workloads.trace import Trace, TraceRequest

_KEPT_BITS = (1 << 60) - 1


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace to draw samples from."""

    trace: Trace
    seed: int = 0

    def sample(self, rate_per_s: float, requests: int) -> Trace:
        """About so many requests that arrive at about that rate, from time 0 on.

        As many copies of the trace as the rate needs, each from a moment of its own on (behind its
        end it begins anew) and with prompts of its own; each keeps the share of its sessions that
        makes up the rate.
        """
        trace, window_s = self.trace, requests / rate_per_s
        copies = max(1, ceil(rate_per_s / trace.rate_per_s))
        share = rate_per_s / trace.rate_per_s / copies
        drawn = random.Random(self.seed)  # noqa: S311 - a simulation
        found: list[TraceRequest] = []
        for copy in range(copies):
            stretch = _Stretch(copy, drawn.random() * trace.span_s, drawn.getrandbits(32))
            found.extend(_kept(trace, stretch, window_s, share))
        found.sort(key=lambda one: one.at_s)
        return replace(trace, requests=tuple(found))

    def scaled(self, *, prompts: float = 1.0, outputs: float = 1.0) -> Traffic:
        """The same with longer or shorter prompts, or outputs; what prompts share stays shared."""
        requests = tuple(
            one._replace(
                prompt_tokens=max(1, round(one.prompt_tokens * prompts)),
                output_tokens=max(1, round(one.output_tokens * outputs)),
            )
            for one in self.trace.requests
        )
        name = f"{self.trace.name} x{prompts:g} prompts x{outputs:g} outputs"
        return replace(self, trace=replace(self.trace, name=name, requests=requests))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Which copy of the trace, from where on, and what its sessions are drawn by."""

    copy: int
    start_s: float
    salt: int


def _kept(trace: Trace, stretch: _Stretch, window_s: float, share: float) -> Iterator[TraceRequest]:
    limit = share * (1 << 32)
    first_s, lap_s = trace.requests[0].at_s, trace.span_s + 1 / trace.rate_per_s
    index = bisect_left(trace.requests, first_s + stretch.start_s, key=lambda one: one.at_s)
    lap = 0
    while True:
        if index == len(trace.requests):
            index, lap = 0, lap + 1
        one = trace.requests[index]
        at_s = one.at_s - first_s - stretch.start_s + lap * lap_s
        if at_s >= window_s:
            return
        # The thinning is by session: half a conversation would share nothing with itself.
        who = index if one.session_id is None else one.session_id
        if _draw(stretch.salt, who) < limit:
            yield _own(one, at_s, stretch.copy, lap)
        index += 1


def _draw(salt: int, who: int | str) -> int:
    """32 even bits for a request or a session, the same in every process."""
    number = who if isinstance(who, int) else crc32(who.encode())
    return hash((salt, number)) & 0xFFFFFFFF


def _own(one: TraceRequest, at_s: float, copy: int, lap: int) -> TraceRequest:
    """A request as its copy has it: nothing is shared between copies."""
    if not copy and not lap:
        return one._replace(at_s=at_s)
    tag = (copy, lap)
    return one._replace(
        at_s=at_s,
        block_ids=tuple(hash((tag, block)) & _KEPT_BITS for block in one.block_ids),
        session_id=None if one.session_id is None else f"{one.session_id}/{copy}.{lap}",
    )
