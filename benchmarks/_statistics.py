"""The arithmetic of benchmarks: streams out of bytes, percentiles, spreads and ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

Segment = tuple[float, bytes]
"""When bytes arrived, and which."""

_DONE = b"[DONE]"


class BadStreamError(ValueError):
    """A response that is not the complete event stream of a completion."""


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[object] = []
    usage: _Usage | None = None


_CHUNK_DECODER = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """What one streamed completion showed at the client."""

    ttft_s: float
    tpot_s: float
    max_itl_s: float
    tokens: int
    prompt_tokens: int
    chunks: int
    """Fewer than `tokens` where the server put the tokens of several steps into one event."""


def dechunk(segments: Sequence[Segment]) -> Iterator[Segment]:
    """The bodies of HTTP/1.1 chunks, each with the time at which its last byte had arrived.

    Raises:
        BadStreamError: it is not a chunked body, or not all of it.
    """
    data = b"".join(part for _, part in segments)
    ends: list[tuple[int, float]] = []
    total = 0
    for at_s, part in segments:
        total += len(part)
        ends.append((total, at_s))
    position, segment = 0, 0
    while True:
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            raise BadStreamError(f"the body breaks off after {len(data)} bytes")
        try:
            size = int(data[position:line_end].split(b";")[0], 16)
        except ValueError as error:
            raise BadStreamError(f"no chunk size: {data[position : position + 20]!r}") from error
        if size == 0:
            return
        begin, position = line_end + 2, line_end + 2 + size + 2
        if position > len(data):
            raise BadStreamError(f"the body breaks off after {len(data)} bytes")
        while ends[segment][0] < begin + size:
            segment += 1
        yield ends[segment][1], data[begin : begin + size]


def events(chunks: Iterable[Segment]) -> Iterator[Segment]:
    """The data of server-sent events, each with the time at which it was complete."""
    buffer = b""
    for at_s, body in chunks:
        *complete, buffer = (buffer + body).split(b"\n\n")
        for event in complete:
            if event.startswith(b"data: "):
                yield at_s, event[len(b"data: ") :]


def read_stream(sent_at_s: float, segments: Sequence[Segment]) -> StreamTimes:
    """What a completion's response says, given when its request was sent.

    The response must end with a usage event, for tokens are counted by the server.

    Raises:
        BadStreamError: it is an error, or not complete.
    """
    times_s: list[float] = []
    usage: _Usage | None = None
    is_done = False
    for at_s, data in events(dechunk(segments)):
        if data == _DONE:
            is_done = True
            continue
        try:
            chunk = _CHUNK_DECODER.decode(data)
        except msgspec.MsgspecError as error:
            raise BadStreamError(f"no completion chunk: {data[:120]!r}: {error}") from error
        usage = chunk.usage or usage
        if chunk.choices:
            times_s.append(at_s)
        elif chunk.usage is None:
            raise BadStreamError(f"no completion chunk: {data[:120]!r}")
    if not is_done or usage is None or not times_s:
        raise BadStreamError(f"{len(times_s)} token events, usage {usage}, done {is_done}")
    gaps_s = [b - a for a, b in pairwise(times_s)]
    return StreamTimes(
        ttft_s=times_s[0] - sent_at_s,
        tpot_s=(times_s[-1] - times_s[0]) / max(1, usage.completion_tokens - 1),
        max_itl_s=max(gaps_s, default=0.0),
        tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        chunks=len(times_s),
    )


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linear between the two nearest of the sorted values.

    Raises:
        ValueError: there are no values, or q is not from 0 to 1.
    """
    if not values or not 0 <= q <= 1:
        raise ValueError(f"quantile {q} of {len(values)} values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest."""
    return {f"p{q}": quantile(values, q / 100) for q in (50, 90, 99)} | {"max": max(values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatSpread:
    """A figure over the repeats: the median is what is quoted."""

    min: float
    median: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> RepeatSpread:
        """The spread of one figure's repeats."""
        return cls(min=min(values), median=quantile(values, 0.5), max=max(values))


def ratios(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Repeat by repeat.

    Raises:
        ValueError: not as many of one as of the other.
    """
    return [a / b for a, b in zip(values, baseline, strict=True)]


def cpu_used(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds by group of processes, between two readings; groups that did nothing too."""
    return {group: after[group] - before.get(group, 0.0) for group in after}


def us_per_token(cpu_s: float, tokens: int) -> float:
    """Microseconds of CPU per token.

    Raises:
        ValueError: there were no tokens.
    """
    if tokens <= 0:
        raise ValueError(f"CPU time per token of {tokens} tokens")
    return cpu_s / tokens * 1e6


def round_floats(value: object, digits: int = 6) -> object:
    """Plain values with floats rounded, all the way down."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: round_floats(inner, digits) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [round_floats(inner, digits) for inner in value]
    return value
