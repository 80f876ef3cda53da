"""Changes the rate or length of traces without changing their character.

The rate changes by leaving out requests or by superposing copies. `compress` changes time, which
keeps the bursts' shape but shortens them in engine steps. Source: ServeGen and DistServe scale
traces so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from baton.simulator.workloads.trace import Trace, TraceRequest


def superpose(trace: Trace, copies: float, rng: random.Random) -> Trace:
    """The trace and copies of it, shifted in time; a fractional copy keeps that share of requests.

    Less than one copy leaves out requests, whole sessions at a time. A copy is rotated by a random
    time, so that the rate stays even. Copies share no blocks and no sessions. With the same `rng`,
    the requests of fewer copies are a subset of those of more.
    """
    if not 0 < copies < math.inf:
        raise ValueError(f"copies is {copies}, expected a number above 0")
    whole_copies = math.ceil(copies)
    requests: list[TraceRequest] = []
    for number in range(whole_copies):
        share = 1.0 if number < whole_copies - 1 else copies - number
        shift_s = rng.random() * _period_s(trace) if number else 0.0
        requests += _shifted_copy(trace, number, shift_s, share, rng)
    requests.sort(key=lambda request: request.at_s)
    return _with_requests(trace, requests)


def at_rate(trace: Trace, rate_per_s: float, rng: random.Random) -> Trace:
    """The trace, thinned or superposed to a mean rate.

    With the same `rng`, the requests at a lower rate are a subset of those at a higher rate: rates
    are compared without other randomness.
    """
    if not trace.rate_per_s:
        raise ValueError(f"trace {trace.name!r} has no rate to scale: all arrive at once")
    return superpose(trace, rate_per_s / trace.rate_per_s, rng)


def compress(trace: Trace, factor: float) -> Trace:
    """All arrivals `factor` times as fast; see the module for the effect on bursts."""
    if not 0 < factor < math.inf:
        raise ValueError(f"factor is {factor}, expected a number above 0")
    return _with_requests(
        trace, (request._replace(at_s=request.at_s / factor) for request in trace.requests)
    )


def cut(trace: Trace, from_s: float = 0.0, until_s: float = math.inf) -> Trace:
    """The requests from `from_s` until before `until_s`, with times relative to `from_s`."""
    return _with_requests(
        trace,
        (
            request._replace(at_s=request.at_s - from_s)
            for request in trace.requests
            if from_s <= request.at_s < until_s
        ),
    )


def first(trace: Trace, requests: int) -> Trace:
    """The first requests of the trace."""
    return _with_requests(trace, trace.requests[:requests])


def _with_requests(trace: Trace, requests: Iterable[TraceRequest]) -> Trace:
    return replace(trace, requests=tuple(requests))


def _thinned(
    requests: Iterable[TraceRequest], keep_fraction: float, rng: random.Random
) -> Iterator[TraceRequest]:
    draw_by_session: dict[str, float] = {}
    for request in requests:
        draw = rng.random()
        if request.session_id is not None:
            draw = draw_by_session.setdefault(request.session_id, draw)
        if draw < keep_fraction:
            yield request


def _shifted_copy(
    trace: Trace, number: int, shift_s: float, share: float, rng: random.Random
) -> Iterator[TraceRequest]:
    if not number:
        yield from _thinned(trace.requests, share, rng)
        return
    first_s = trace.requests[0].at_s if trace.requests else 0.0
    ids_offset, period_s = number * _ids_span(trace), _period_s(trace)
    for request in _thinned(trace.requests, share, rng):
        session = request.session_id
        yield request._replace(
            at_s=first_s + (request.at_s - first_s + shift_s) % period_s,
            block_ids=tuple(block + ids_offset for block in request.block_ids),
            session_id=session if session is None else f"{session}~{number}",
        )


def _ids_span(trace: Trace) -> int:
    lowest = min(
        (min(request.block_ids) for request in trace.requests if request.block_ids), default=0
    )
    highest = max(
        (max(request.block_ids) for request in trace.requests if request.block_ids), default=0
    )
    return highest - lowest + 1


def _period_s(trace: Trace) -> float:
    """The span and one mean gap: repeated with this period, the trace keeps its rate."""
    return trace.span_s + 1 / trace.rate_per_s if trace.rate_per_s else 1.0
