"""Closed-loop clients on an engine with enough memory, for comparison with measurements.

Theory of operation. `clients` requests are always in flight. Each step decodes for all running
requests and gives the rest of the token budget to prompts, in order of arrival. Runs of equal steps
are computed at once. All times are sums of `StepParts`: while the order of events stays the same,
results are linear in the factors on parts. Blocks never run out; the simulator's engine models
memory.

The frontend is one thread that all prompts and output tokens pass in order. When the engine gives
it more than it takes, tokens wait there, and so do the next prompts of the clients.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.roofline import StepParts

_UNBOUNDED_STEPS = 1 << 40
_ZERO = StepParts(*(0.0 for _ in StepParts._fields))


class StepPartsTiming(Protocol):
    """Duration of a step, by part."""

    def parts(self, batch: StepBatch) -> StepParts:
        """Parts whose sum is the duration of the step."""
        ...


class RequestLengths(NamedTuple):
    """Lengths of one request."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the prompt, in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Load of the engine, and its limits."""

    clients: int
    max_running_requests: int
    max_batched_tokens: int
    think_time_s: float = 0.003
    """From an answer's last token to the arrival of the client's next request; it misses a step."""
    max_prefill_delay_steps: int = 0
    """New prompts wait for at most this number of decode steps, so that more are computed together,
    """
    prefill_batch_tokens: int = 0
    """and until this number of prompt tokens waits."""
    mixes_steps: bool = True
    """Whether a step that prefills also decodes for running requests."""
    receive_interval_steps: int = 1
    """Decode steps after which the engine looks for new requests; it does after each prefill, too,
    and while it is idle. Source: SGLang, `--scheduler-recv-interval`."""
    prepares_ahead: bool = False
    """Whether a step is chosen when the one before it begins, and misses what arrives meanwhile.
    Source: SGLang, `event_loop_overlap`."""
    frontend_token_s: float = 0.0
    """Time of the frontend for each output token."""


class MeanLatencies(NamedTuple):
    """Means over requests, by part."""

    ttft: StepParts
    tpot: StepParts


@dataclass(slots=True)
class _Request:
    lengths: RequestLengths
    index: int
    computed_tokens: int = 0
    remaining_tokens: int = 0
    context_tokens: int = 0
    sent_at: StepParts = _ZERO
    first_token_at: StepParts = _ZERO


@dataclass(slots=True)
class _State:
    now_s: float = 0.0
    elapsed: StepParts = _ZERO
    unsent: deque[_Request] = field(default_factory=deque)
    sent: list[tuple[float, int, _Request]] = field(default_factory=list)
    """By time; not yet through the frontend."""
    frontend_free_at_s: float = 0.0
    arriving: list[tuple[float, int, _Request]] = field(default_factory=list)
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    delayed_steps: int = 0
    steps_since_received: int = 0
    ttfts: list[StepParts] = field(default_factory=list)
    tpots: list[StepParts] = field(default_factory=list)


def simulate_closed_loop(
    timing: StepPartsTiming, requests: Sequence[RequestLengths], loop: ClosedLoop
) -> MeanLatencies:
    """Run until all requests have ended.

    Raises:
        ValueError: there are no requests.
    """
    if not requests:
        raise ValueError("closed loop: got no requests, expected 1 or more")
    state = _State()
    state.unsent.extend(
        _Request(
            lengths,
            number,
            # The last token of a prompt is always computed.
            computed_tokens=max(0, min(lengths.cached_tokens, lengths.prompt_tokens - 1)),
        )
        for number, lengths in enumerate(requests)
    )
    for _ in range(min(loop.clients, len(requests))):
        _send_next(state, 0.0)
    while state.sent or state.arriving or state.waiting or state.running:
        _step(timing, state, loop)
    return MeanLatencies(_mean(state.ttfts), _mean(state.tpots))


def _send_next(state: _State, delay_s: float, lag_s: float = 0.0) -> None:
    """Send after `delay_s`, by a client that sees the engine's tokens `lag_s` later."""
    if state.unsent:
        request = state.unsent.popleft()
        request.sent_at = _later(state.elapsed, lag_s)
        heapq.heappush(state.sent, (state.now_s + lag_s + delay_s, request.index, request))


def _step(timing: StepPartsTiming, state: _State, loop: ClosedLoop) -> None:
    is_idle = not state.waiting and not state.running
    if is_idle:
        if not state.arriving:
            _pass_prompts(state, state.sent[0][0])
        begin_at_s = max(state.now_s, state.arriving[0][0])
        state.elapsed = _later(state.elapsed, begin_at_s - state.now_s)
        state.now_s = begin_at_s
        state.steps_since_received = 0
    _pass_prompts(state, state.now_s)
    if is_idle or not loop.prepares_ahead:
        _receive(state)
    is_delaying = _is_delaying_prefill(state, loop)
    chunks = [] if is_delaying else _chunks(state, loop)
    limits = _step_limits(state, loop, is_delaying=is_delaying)
    if loop.prepares_ahead and _receive(state):
        limits = limits[0], 1
    decodes = loop.mixes_steps or not chunks
    steps, first_s, duration = _timed_steps(
        timing, state.running if decodes else [], chunks, limits
    )
    state.delayed_steps = state.delayed_steps + steps if is_delaying else 0
    since_received = 0 if chunks else state.steps_since_received + steps
    state.steps_since_received = since_received % loop.receive_interval_steps
    state.elapsed = _add(state.elapsed, duration)
    tokens = sum(_finishes_prompt(request, chunk) for request, chunk in chunks)
    tokens += len(state.running) if decodes else 0
    lag_s = _pass(state, tokens * loop.frontend_token_s, steps, first_s, sum(duration))
    if decodes:
        _finish_decode_steps(state, steps, loop, lag_s)
    _finish_chunks(state, chunks, loop, lag_s)


def _pass_prompts(state: _State, until_s: float) -> None:
    """Let the prompts that were sent until then through the frontend."""
    while state.sent and state.sent[0][0] <= until_s:
        sent_at_s, index, request = heapq.heappop(state.sent)
        at_s = max(state.frontend_free_at_s, sent_at_s)
        heapq.heappush(state.arriving, (at_s, index, request))


def _pass(state: _State, work_s: float, steps: int, first_s: float, total_s: float) -> float:
    """End some steps, each with tokens for `work_s` of the frontend; how late the last come.

    Prompts are sent in the last step, if at all. The frontend has been busy since the first has
    ended, or was waiting for the last but one.
    """
    if steps > 1:
        last_s = 2 * total_s / steps - first_s
        earlier_at_s = state.now_s + total_s - last_s
        busy_at_s = max(state.frontend_free_at_s, state.now_s + first_s) + (steps - 1) * work_s
        state.frontend_free_at_s = max(busy_at_s, earlier_at_s + work_s) if work_s else 0.0
    state.now_s += total_s
    _pass_prompts(state, state.now_s)
    if not work_s:
        return 0.0
    state.frontend_free_at_s = max(state.frontend_free_at_s, state.now_s) + work_s
    return state.frontend_free_at_s - state.now_s


def _receive(state: _State) -> bool:
    """Whether requests were new, where the engine looks for them."""
    count = len(state.waiting)
    if not state.steps_since_received:
        while state.arriving and state.arriving[0][0] <= state.now_s:
            state.waiting.append(heapq.heappop(state.arriving)[2])
    return len(state.waiting) > count


def _is_delaying_prefill(state: _State, loop: ClosedLoop) -> bool:
    """Whether prompts wait for more prompts."""
    if (
        not state.waiting
        or not state.running
        or state.delayed_steps >= loop.max_prefill_delay_steps
    ):
        return False
    waiting_tokens = sum(
        request.lengths.prompt_tokens - request.computed_tokens for request in state.waiting
    )
    return waiting_tokens < loop.prefill_batch_tokens


def _step_limits(state: _State, loop: ClosedLoop, *, is_delaying: bool) -> tuple[float, int]:
    """Seconds and steps after which the next decision is due."""
    steps = loop.max_prefill_delay_steps - state.delayed_steps if is_delaying else _UNBOUNDED_STEPS
    if not (state.arriving or state.sent):
        return math.inf, steps
    if loop.receive_interval_steps > 1:
        return math.inf, min(steps, loop.receive_interval_steps - state.steps_since_received)
    next_at_s = min(queue[0][0] for queue in (state.arriving, state.sent) if queue)
    return next_at_s - state.now_s, steps


def _chunks(state: _State, loop: ClosedLoop) -> list[tuple[_Request, int]]:
    """Prompts and their chunk sizes of the next step."""
    free_tokens = loop.max_batched_tokens - (len(state.running) if loop.mixes_steps else 0)
    free_slots = loop.max_running_requests - len(state.running)
    chunks: list[tuple[_Request, int]] = []
    for request in state.waiting:
        if free_tokens <= 0 or len(chunks) >= free_slots:
            break
        chunk = min(free_tokens, request.lengths.prompt_tokens - request.computed_tokens)
        chunks.append((request, chunk))
        free_tokens -= chunk
    return chunks


def _timed_steps(
    timing: StepPartsTiming,
    decoding: list[_Request],
    chunks: list[tuple[_Request, int]],
    limits: tuple[float, int],
) -> tuple[int, float, StepParts]:
    """Number of steps that are taken at once, the seconds of the first, and the time of all."""
    running = len(decoding)
    context = sum(request.context_tokens for request in decoding)
    if chunks:
        mixed = timing.parts(
            StepBatch(
                prefill_tokens=sum(chunk for _, chunk in chunks),
                prefill_requests=len(chunks),
                prefill_pairs=sum(
                    attention_pairs(chunk, request.computed_tokens) for request, chunk in chunks
                ),
                prefill_context_tokens=sum(request.computed_tokens for request, _ in chunks),
                decode_requests=running,
                decode_context_tokens=context,
                finished_prefills=sum(
                    _finishes_prompt(request, chunk) for request, chunk in chunks
                ),
            )
        )
        return 1, sum(mixed), mixed
    until_s, max_steps = limits
    first = timing.parts(StepBatch(decode_requests=running, decode_context_tokens=context))
    steps = min(max_steps, *(request.remaining_tokens for request in decoding))
    first_s = sum(first)
    steps = max(1, min(steps, math.ceil(min(until_s / first_s, _UNBOUNDED_STEPS))))
    if steps == 1:
        return 1, first_s, first
    while True:  # steps get longer: until that time, there may be fewer than of the first's length
        last_context = context + running * (steps - 1)
        last = timing.parts(StepBatch(decode_requests=running, decode_context_tokens=last_context))
        duration = _scale(_add(first, last), steps / 2)
        if sum(duration) - sum(last) < until_s or steps == 2:  # noqa: PLR2004 - the first and last
            return steps, first_s, duration
        steps -= 1


def _finish_decode_steps(state: _State, steps: int, loop: ClosedLoop, lag_s: float) -> None:
    unfinished, seen_at = [], _later(state.elapsed, lag_s)
    for request in state.running:
        request.remaining_tokens -= steps
        request.context_tokens += steps
        if request.remaining_tokens > 0:
            unfinished.append(request)
            continue
        gaps = request.lengths.output_tokens - 1
        state.tpots.append(_scale(_subtract(seen_at, request.first_token_at), 1 / gaps))
        _send_next(state, loop.think_time_s, lag_s)
    state.running = unfinished


def _finish_chunks(
    state: _State, chunks: list[tuple[_Request, int]], loop: ClosedLoop, lag_s: float
) -> None:
    seen_at = _later(state.elapsed, lag_s)
    for request, chunk in chunks:
        is_last = _finishes_prompt(request, chunk)
        request.computed_tokens += chunk
        if not is_last:
            continue
        state.waiting.remove(request)
        request.first_token_at = seen_at
        state.ttfts.append(_subtract(seen_at, request.sent_at))
        request.context_tokens = request.lengths.prompt_tokens + 1
        request.remaining_tokens = request.lengths.output_tokens - 1
        if request.remaining_tokens > 0:
            state.running.append(request)
        else:
            _send_next(state, loop.think_time_s, lag_s)


def _finishes_prompt(request: _Request, chunk: int) -> bool:
    return request.computed_tokens + chunk >= request.lengths.prompt_tokens


# Written out for speed: each step adds parts several times.


def _later(at: StepParts, seconds: float) -> StepParts:
    return at._replace(unscaled_s=at.unscaled_s + seconds) if seconds else at


def _add(left: StepParts, right: StepParts) -> StepParts:
    a, b, c, d, e, f, g, h = left
    s, t, u, v, w, x, y, z = right
    return StepParts(a + s, b + t, c + u, d + v, e + w, f + x, g + y, h + z)


def _subtract(left: StepParts, right: StepParts) -> StepParts:
    return _add(left, _scale(right, -1.0))


def _scale(parts: StepParts, factor: float) -> StepParts:
    a, b, c, d, e, f, g, h = parts
    return StepParts(
        a * factor,
        b * factor,
        c * factor,
        d * factor,
        e * factor,
        f * factor,
        g * factor,
        h * factor,
    )


def _mean(values: Sequence[StepParts]) -> StepParts:
    if not values:
        return _ZERO
    return _scale(
        StepParts(*(sum(column) for column in zip(*values, strict=True))), 1 / len(values)
    )
