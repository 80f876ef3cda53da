"""Reads and writes traces in Mooncake's JSON lines, with baton's additions.

A line has `timestamp` (milliseconds, unless the data show another unit), `input_length`,
`output_length` and `hash_ids`, which name the prompt's blocks: equal ids mean equal blocks. Baton
adds the optional fields `at_s` (exact seconds, in place of the timestamp), `block_tokens`,
`session_id`, `slo_class` and `tenant`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from baton.domain.errors import TraceInvalid
from baton.domain.tenant import DEFAULT_TENANT
from baton.simulator.workloads.arrivals import TimeUnit
from baton.simulator.workloads.lines import (
    build_trace,
    numbered_lines,
    parse_lines,
    parse_number,
    parse_object,
    parse_tokens,
)
from baton.simulator.workloads.time_units import TimeColumn
from baton.simulator.workloads.trace import Trace, TraceRequest

_BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024)
"""Candidates if the file has no block size: Mooncake's own first (Source: FAST'25 §4), then those
of engines."""

_MIN_TICK_S = 0.5
"""Shorter rounding of arrivals does not change queueing: it is a few engine steps."""


class _Line(NamedTuple):
    request: TraceRequest
    """Its `at_s` is valid only if `timestamp` is None."""
    timestamp: Decimal | None
    block_tokens: int | None


def read(
    lines: Iterable[str],
    name: str,
    *,
    spread_s: float | None = None,
    seed: int = 0,
    ignore_invalid: bool = False,
    time_unit: TimeUnit | None = None,
) -> Trace:
    """A trace from JSON lines.

    Timestamps count from the first. Timestamps in ticks (Mooncake's are 3 s apart) are spread
    uniformly at random over the tick, in the order of the file: otherwise they would be artificial
    bursts. `spread_s` is the tick, by default inferred; 0 keeps the timestamps. Times in `at_s`
    stay as they are. The size of blocks is inferred where no line has `block_tokens`.

    Raises:
        TraceInvalid: an invalid line, unless `ignore_invalid`; an unknown block size; no requests;
            timestamps of an unclear unit.
    """
    column = TimeColumn(name, "timestamp", usual=TimeUnit.MILLISECONDS, given=time_unit)
    parsed_lines, skipped = parse_lines(
        numbered_lines(lines),
        name,
        lambda line: _parse(line, column),
        ignore_invalid=ignore_invalid,
    )
    if len({line.timestamp is None for line in parsed_lines}) > 1:
        raise TraceInvalid(
            name, 0, "some lines have at_s, others a timestamp: expected one of them"
        )
    if time_unit is not None and any(line.timestamp is None for line in parsed_lines):
        raise TraceInvalid(name, 0, "at_s names its unit, and --time-unit is given")
    declared_sizes = {line.block_tokens for line in parsed_lines if line.block_tokens is not None}
    if len(declared_sizes) > 1:
        raise TraceInvalid(name, 0, f"lines say different block_tokens: {sorted(declared_sizes)}")
    block_size_tokens = next(iter(declared_sizes), None) or _infer_block_size(parsed_lines, name)
    timestamped = [
        (line.request, line.timestamp) for line in parsed_lines if line.timestamp is not None
    ]
    times_s = column.seconds([timestamp for _, timestamp in timestamped])
    times_s = _spread(times_s, spread_s, random.Random(seed))  # noqa: S311 - seeded, not secret
    requests = [line.request for line in parsed_lines if line.timestamp is None]
    requests += [
        request._replace(at_s=at_s) for (request, _), at_s in zip(timestamped, times_s, strict=True)
    ]
    return build_trace(
        name,
        requests,
        skipped_lines=skipped,
        block_tokens=block_size_tokens,
        times=column.note,
    )


def write(trace: Trace) -> Iterator[str]:
    """The lines of a trace, without line ends; `read` inverts it."""
    for request in trace.requests:
        fields: dict[str, object] = {
            "timestamp": round(request.at_s * 1000),
            "at_s": request.at_s,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
        }
        if request.block_ids:
            fields |= {"hash_ids": request.block_ids, "block_tokens": trace.block_tokens}
        if request.session_id is not None:
            fields["session_id"] = request.session_id
        if request.slo_class is not None:
            fields["slo_class"] = request.slo_class
        if request.tenant != DEFAULT_TENANT:
            fields["tenant"] = request.tenant
        yield json.dumps(fields, separators=(",", ":"))


def _parse(line: str, column: TimeColumn) -> _Line:
    fields = parse_object(line)
    at_s = fields.get("at_s")
    if at_s is None and fields.get("timestamp") is None and "delay" in fields:
        raise ValueError("has a delay after an answer, expected a timestamp: a replay is open loop")
    request = TraceRequest(
        at_s=0.0 if at_s is None else parse_number(at_s, "at_s"),
        prompt_tokens=parse_tokens(fields.get("input_length"), "input_length", minimum=1),
        output_tokens=max(parse_tokens(fields.get("output_length"), "output_length"), 1),
        block_ids=_parse_ids(fields.get("hash_ids")),
        session_id=_parse_text(fields.get("session_id"), "session_id"),
        slo_class=_parse_text(fields.get("slo_class"), "slo_class"),
        tenant=_parse_text(fields.get("tenant"), "tenant") or DEFAULT_TENANT,
    )
    if request.at_s < 0:
        raise ValueError(f"at_s is {request.at_s}, expected at least 0")
    size = fields.get("block_tokens")
    return _Line(
        request,
        None if at_s is not None else column.parse(fields.get("timestamp")),
        None if size is None else parse_tokens(size, "block_tokens", minimum=1),
    )


def _parse_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"hash_ids is {str(value)[:40]}, expected a list of whole numbers")
    return tuple(value)


def _parse_text(value: object, field: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise ValueError(f"{field} is {value!r}, expected text")


def _infer_block_size(lines: Sequence[_Line], name: str) -> int:
    """The size with which most prompts have as many ids as blocks, full blocks or all.

    If hardly any match, ids may name only a prefix of each prompt, in Mooncake's blocks.
    """
    requests = [line.request for line in lines if line.request.block_ids]

    def matches(size: int) -> int:
        return sum(
            len(request.block_ids)
            in {request.prompt_tokens // size, -(-request.prompt_tokens // size)}
            for request in requests
        )

    best = max(_BLOCK_SIZES, key=matches)
    if matches(best) * 2 >= len(requests):
        return best
    default_size = _BLOCK_SIZES[0]
    if all(
        (len(request.block_ids) - 1) * default_size < request.prompt_tokens for request in requests
    ):
        return default_size
    raise TraceInvalid(
        name,
        0,
        f"hash_ids fit no block size of {sorted(_BLOCK_SIZES)}: say block_tokens in the lines",
    )


def _spread(times_s: list[float], spread_s: float | None, rng: random.Random) -> list[float]:
    """Times spread over their ticks; those of one tick stay in their order."""
    ticks = sorted(set(times_s))
    width_s = _tick_width_s(ticks, len(times_s)) if spread_s is None else spread_s
    if not width_s:
        return times_s
    next_tick_s = dict(pairwise([*ticks, float("inf")]))
    indices_by_time = sorted(range(len(times_s)), key=times_s.__getitem__)
    spread = list(times_s)
    for tick_s, group in groupby(indices_by_time, key=times_s.__getitem__):
        indices = list(group)
        spread_width_s = min(width_s, next_tick_s[tick_s] - tick_s)
        offsets = sorted(rng.random() * spread_width_s for _ in indices)
        for place, offset_s in zip(indices, offsets, strict=True):
            spread[place] = tick_s + offset_s
    return spread


def _tick_width_s(ticks: Sequence[float], requests: int) -> float:
    """The distance of ticks; 0 if times are not in ticks."""
    gaps_s = [later - earlier for earlier, later in pairwise(ticks)]
    width_s = median(gaps_s) if gaps_s and len(ticks) * 2 <= requests else 0.0
    return width_s if width_s >= _MIN_TICK_S else 0.0
