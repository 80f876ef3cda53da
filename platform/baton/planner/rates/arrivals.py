"""Traffic at any rate, made of a trace: stretches of it, laid over each other or thinned.

Times are never compressed, which would change how bursts compare to the mean. Two samples at nearly
the same rate have nearly the same requests, so that differences between fleets are not those of
chance (common random numbers).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple
from zlib import crc32

from baton.simulator.workloads.trace import Trace, TraceRequest

_KEPT_BITS = (1 << 60) - 1
_FAR_OFF = 0.2
"""Of what was asked for: where whole sessions are more or fewer requests by more than that, single
requests are drawn."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace to draw samples from."""

    trace: Trace
    seed: int = 0

    def sample(self, rate_per_s: float, requests: int) -> Trace:
        """About so many requests that arrive at about that rate, from time 0 on.

        As many copies of the trace as the rate needs, each from a moment of its own on (behind its
        end it begins anew) and with prompts of its own; each keeps the share of its sessions that
        makes up the rate. None where the stretches have none, as in a long pause.
        """
        trace, window_s = self.trace, requests / rate_per_s
        copies = max(1, ceil(rate_per_s / trace.rate_per_s))
        share = rate_per_s / trace.rate_per_s / copies
        drawn = random.Random(self.seed)  # noqa: S311 - a simulation
        stretches = [
            _Stretch(copy, drawn.random() * trace.span_s, drawn.getrandbits(32))
            for copy in range(copies)
        ]
        there = [one for each in stretches for one in _within(trace, each, window_s)]
        found = [_own(one) for one in _kept(there, share)]
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


class _Arrival(NamedTuple):
    """A request of a stretch, before any are left out."""

    request: TraceRequest
    number: int
    """In the trace."""
    at_s: float
    stretch: _Stretch
    lap: int


def _within(trace: Trace, stretch: _Stretch, window_s: float) -> Iterator[_Arrival]:
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
        yield _Arrival(one, index, at_s, stretch, lap)
        index += 1


def _kept(there: Sequence[_Arrival], share: float) -> list[_Arrival]:
    """About that share of the requests.

    The thinning is by session: half a conversation would share nothing with itself. But a few
    sessions cannot make every share up: a fifth of three is none of them, or a third.
    """
    limit, wanted = share * (1 << 32), share * len(there)
    whole = [one for one in there if _draw(one.stretch.salt, _session(one)) < limit]
    if abs(len(whole) - wanted) <= _FAR_OFF * wanted:
        return whole
    return [one for one in there if _draw(one.stretch.salt, one.number) < limit]


def _session(one: _Arrival) -> int | str:
    """What it is drawn with: its session, or itself where it has none."""
    return one.number if one.request.session_id is None else one.request.session_id


def _draw(salt: int, who: int | str) -> int:
    """32 even bits for a request or a session, the same in every process."""
    number = who if isinstance(who, int) else crc32(who.encode())
    return hash((salt, number)) & 0xFFFFFFFF


def _own(arrival: _Arrival) -> TraceRequest:
    """A request as its copy has it: nothing is shared between copies."""
    one, tag = arrival.request, (arrival.stretch.copy, arrival.lap)
    if not any(tag):
        return one._replace(at_s=arrival.at_s)
    return one._replace(
        at_s=arrival.at_s,
        block_ids=tuple(hash((tag, block)) & _KEPT_BITS for block in one.block_ids),
        session_id=None if one.session_id is None else f"{one.session_id}/{tag[0]}.{tag[1]}",
    )
