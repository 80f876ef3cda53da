"""Traffic at any rate from a trace: segments of it, superposed or thinned.

Times are never compressed, which would change bursts relative to the mean. Samples at nearly the
same rate have nearly the same requests, so that fleets are compared with common random numbers.
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

_BLOCK_ID_MASK = (1 << 60) - 1
_MAX_SESSION_ERROR = 0.2
"""If thinning by session misses the requested number by a larger fraction, it draws single
requests."""


@dataclass(frozen=True, slots=True)
class TrafficSampler:
    """Draws samples from a trace."""

    trace: Trace
    seed: int = 0

    def sample(self, rate_per_s: float, requests: int) -> Trace:
        """About `requests` requests at about `rate_per_s`, from time 0 on.

        Superposes as many copies of the trace as the rate needs. Each has its own start (and wraps
        around), its own prompts, and a share of its sessions. May be empty, as in a long pause.
        """
        trace, window_s = self.trace, requests / rate_per_s
        copies = max(1, ceil(rate_per_s / trace.rate_per_s))
        keep_fraction = rate_per_s / trace.rate_per_s / copies
        rng = random.Random(self.seed)  # noqa: S311 - a simulation
        segments = [
            _Segment(copy, rng.random() * trace.span_s, rng.getrandbits(32))
            for copy in range(copies)
        ]
        arrivals = [
            segment_arrival
            for each in segments
            for segment_arrival in _segment_arrivals(trace, each, window_s)
        ]
        sampled = [_isolate_copy(arrival) for arrival in _thin(arrivals, keep_fraction)]
        sampled.sort(key=lambda request: request.at_s)
        return replace(trace, requests=tuple(sampled))

    def scaled(self, *, prompts: float = 1.0, outputs: float = 1.0) -> TrafficSampler:
        """The same with longer or shorter prompts or outputs; shared blocks stay shared."""
        requests = tuple(
            request._replace(
                prompt_tokens=max(1, round(request.prompt_tokens * prompts)),
                output_tokens=max(1, round(request.output_tokens * outputs)),
            )
            for request in self.trace.requests
        )
        name = f"{self.trace.name} x{prompts:g} prompts x{outputs:g} outputs"
        return replace(self, trace=replace(self.trace, name=name, requests=requests))


@dataclass(frozen=True, slots=True)
class _Segment:
    copy: int
    start_s: float
    salt: int


class _Arrival(NamedTuple):
    request: TraceRequest
    trace_index: int
    at_s: float
    segment: _Segment
    lap: int


def _segment_arrivals(trace: Trace, segment: _Segment, window_s: float) -> Iterator[_Arrival]:
    first_s, lap_s = trace.requests[0].at_s, trace.span_s + 1 / trace.rate_per_s
    index = bisect_left(trace.requests, first_s + segment.start_s, key=lambda request: request.at_s)
    lap = 0
    while True:
        if index == len(trace.requests):
            index, lap = 0, lap + 1
        request = trace.requests[index]
        at_s = request.at_s - first_s - segment.start_s + lap * lap_s
        if at_s >= window_s:
            return
        yield _Arrival(request=request, trace_index=index, at_s=at_s, segment=segment, lap=lap)
        index += 1


def _thin(arrivals: Sequence[_Arrival], keep_fraction: float) -> list[_Arrival]:
    """About `keep_fraction` of the requests.

    Thins by session: half a conversation would share nothing with itself. A few sessions cannot
    make up every fraction: a fifth of three is none, or a third.
    """
    limit, target_count = keep_fraction * (1 << 32), keep_fraction * len(arrivals)
    kept_sessions = [
        arrival
        for arrival in arrivals
        if _hash_draw(arrival.segment.salt, _session_key(arrival)) < limit
    ]
    if abs(len(kept_sessions) - target_count) <= _MAX_SESSION_ERROR * target_count:
        return kept_sessions
    return [
        arrival
        for arrival in arrivals
        if _hash_draw(arrival.segment.salt, arrival.trace_index) < limit
    ]


def _session_key(arrival: _Arrival) -> int | str:
    """The session, or the request itself without one."""
    return arrival.trace_index if arrival.request.session_id is None else arrival.request.session_id


def _hash_draw(salt: int, key: int | str) -> int:
    """32 uniform bits for a request or a session, the same in every process."""
    number = key if isinstance(key, int) else crc32(key.encode())
    return hash((salt, number)) & 0xFFFFFFFF


def _isolate_copy(arrival: _Arrival) -> TraceRequest:
    """The request with block ids and session of its copy."""
    request, copy_tag = arrival.request, (arrival.segment.copy, arrival.lap)
    if not any(copy_tag):
        return request._replace(at_s=arrival.at_s)
    return request._replace(
        at_s=arrival.at_s,
        block_ids=tuple(hash((copy_tag, block)) & _BLOCK_ID_MASK for block in request.block_ids),
        session_id=None
        if request.session_id is None
        else f"{request.session_id}/{copy_tag[0]}.{copy_tag[1]}",
    )
