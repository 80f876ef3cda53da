"""Clients that send their next request when the last one ended, on an engine with enough memory.

Theory of operation. What calibration compares with measured rows. `clients` requests are under
way at any time; each step decodes for all who run and gives the rest of the token budget to prompts
in order of arrival. Steps that nothing can change in are taken at once. All times are sums of the
parts of steps (`StepParts`), so that what comes out says how it depends on each part: as long as
the order of things stays, times are linear in the factors on parts. Blocks never run out here; the
simulator's engine is the one that knows of memory.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from baton.perf.step_timing import StepBatch, chunk_pairs
from baton.perf.steps.roofline import StepParts

_FOREVER = 1 << 40
_ZERO = StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class PartedTiming(Protocol):
    """A step's seconds, by part."""

    def parts(self, batch: StepBatch) -> StepParts:
        """They add up to how long the step takes."""
        ...


class Lengths(NamedTuple):
    """One request."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How the engine is loaded."""

    clients: int
    max_running_requests: int
    max_batched_tokens: int
    away_s: float = 0.003
    """From an answer's last token to the client's next request being there: it misses a step."""
    skipped: int = 0
    """The first so many requests are not measured."""
    gather_steps: int = 0
    """New prompts wait for so many decode steps, so that more are computed together ..."""
    gather_tokens: int = 0
    """... unless so many tokens of prompts wait already."""


class Seen(NamedTuple):
    """Means over the requests, by part."""

    ttft: StepParts
    tpot: StepParts


@dataclass(slots=True)
class _Request:
    lengths: Lengths
    number: int
    computed: int = 0
    left: int = 0
    context: int = 0
    asked: StepParts = _ZERO
    first: StepParts = _ZERO


@dataclass(slots=True)
class _State:
    now_s: float = 0.0
    spent: StepParts = _ZERO
    to_come: deque[_Request] = field(default_factory=deque)
    coming: list[tuple[float, int, _Request]] = field(default_factory=list)
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    gathered_steps: int = 0
    ttfts: list[StepParts] = field(default_factory=list)
    tpots: list[StepParts] = field(default_factory=list)


def run(timing: PartedTiming, requests: Sequence[Lengths], loop: Loop) -> Seen:
    """Until all requests have ended.

    Raises:
        ValueError: there are no more requests than are skipped.
    """
    if len(requests) <= loop.skipped:
        raise ValueError(f"{len(requests)} requests, of which {loop.skipped} are not measured")
    state = _State()
    state.to_come.extend(_Request(one, number) for number, one in enumerate(requests))
    for _ in range(min(loop.clients, len(requests))):
        _next_comes(state, 0.0)
    while state.coming or state.waiting or state.running:
        _step(timing, state, loop)
    return Seen(_mean(state.ttfts), _mean(state.tpots))


def _next_comes(state: _State, away_s: float) -> None:
    if state.to_come:
        request = state.to_come.popleft()
        request.asked = state.spent
        heapq.heappush(state.coming, (state.now_s + away_s, request.number, request))


def _step(timing: PartedTiming, state: _State, loop: Loop) -> None:
    if not state.waiting and not state.running:
        state.now_s = max(state.now_s, state.coming[0][0])
    while state.coming and state.coming[0][0] <= state.now_s:
        state.waiting.append(heapq.heappop(state.coming)[2])
    gathering = _gathering(state, loop)
    chunks = [] if gathering else _chunks(state, loop)
    patience = _patience(state, loop, gathering=gathering)
    steps, spent = _spent(timing, state.running, chunks, patience)
    state.gathered_steps = state.gathered_steps + steps if gathering else 0
    state.spent = _plus(state.spent, spent)
    state.now_s += sum(spent)
    _decoded(state, steps, loop)
    _prefilled(state, chunks, loop)


def _gathering(state: _State, loop: Loop) -> bool:
    """Whether prompts wait for others to come."""
    if not state.waiting or not state.running or state.gathered_steps >= loop.gather_steps:
        return False
    waiting = sum(one.lengths.prompt_tokens - one.computed for one in state.waiting)
    return waiting < loop.gather_tokens


def _patience(state: _State, loop: Loop, *, gathering: bool) -> tuple[float, int]:
    """Seconds and steps after which something else may have to be done."""
    until_s = state.coming[0][0] - state.now_s if state.coming else math.inf
    return until_s, loop.gather_steps - state.gathered_steps if gathering else _FOREVER


def _chunks(state: _State, loop: Loop) -> list[tuple[_Request, int]]:
    """What of which prompts is computed in the next step."""
    room = loop.max_batched_tokens - len(state.running)
    places = loop.max_running_requests - len(state.running)
    chunks: list[tuple[_Request, int]] = []
    for request in state.waiting:
        if room <= 0 or len(chunks) >= places:
            break
        chunk = min(room, request.lengths.prompt_tokens - request.computed)
        chunks.append((request, chunk))
        room -= chunk
    return chunks


def _spent(
    timing: PartedTiming,
    decoding: list[_Request],
    chunks: list[tuple[_Request, int]],
    patience: tuple[float, int],
) -> tuple[int, StepParts]:
    """How many steps are taken at once, and what they take."""
    running = len(decoding)
    context = sum(one.context for one in decoding)
    if chunks:
        return 1, timing.parts(
            StepBatch(
                prefill_tokens=sum(chunk for _, chunk in chunks),
                prefill_requests=len(chunks),
                prefill_pairs=sum(chunk_pairs(chunk, one.computed) for one, chunk in chunks),
                prefill_context_tokens=sum(one.computed for one, _ in chunks),
                decode_requests=running,
                decode_context_tokens=context,
                finished_prefills=sum(_ends(one, chunk) for one, chunk in chunks),
            )
        )
    until_s, most_steps = patience
    first = timing.parts(StepBatch(decode_requests=running, decode_context_tokens=context))
    steps = min(most_steps, *(one.left for one in decoding))
    steps = max(1, min(steps, math.ceil(min(until_s / sum(first), _FOREVER))))
    if steps == 1:
        return 1, first
    context += running * (steps - 1)
    last = timing.parts(StepBatch(decode_requests=running, decode_context_tokens=context))
    return steps, _scaled(_plus(first, last), steps / 2)


def _decoded(state: _State, steps: int, loop: Loop) -> None:
    still = []
    for one in state.running:
        one.left -= steps
        one.context += steps
        if one.left > 0:
            still.append(one)
            continue
        if one.number >= loop.skipped:
            gaps = one.lengths.output_tokens - 1
            state.tpots.append(_scaled(_minus(state.spent, one.first), 1 / gaps))
        _next_comes(state, loop.away_s)
    state.running = still


def _prefilled(state: _State, chunks: list[tuple[_Request, int]], loop: Loop) -> None:
    for one, chunk in chunks:
        ends = _ends(one, chunk)
        one.computed += chunk
        if not ends:
            continue
        state.waiting.remove(one)
        one.first = state.spent
        if one.number >= loop.skipped:
            state.ttfts.append(_minus(state.spent, one.asked))
        one.context = one.lengths.prompt_tokens + 1
        one.left = one.lengths.output_tokens - 1
        if one.left > 0:
            state.running.append(one)
        else:
            _next_comes(state, loop.away_s)


def _ends(request: _Request, chunk: int) -> bool:
    return request.computed + chunk >= request.lengths.prompt_tokens


# Written out: a run adds parts up several times a step.


def _plus(one: StepParts, other: StepParts) -> StepParts:
    a, b, c, d, e, f = one
    u, v, w, x, y, z = other
    return StepParts(a + u, b + v, c + w, d + x, e + y, f + z)


def _minus(one: StepParts, other: StepParts) -> StepParts:
    return _plus(one, _scaled(other, -1.0))


def _scaled(parts: StepParts, factor: float) -> StepParts:
    a, b, c, d, e, f = parts
    return StepParts(a * factor, b * factor, c * factor, d * factor, e * factor, f * factor)


def _mean(values: Sequence[StepParts]) -> StepParts:
    if not values:
        return _ZERO
    return _scaled(
        StepParts(*(sum(column) for column in zip(*values, strict=True))), 1 / len(values)
    )
