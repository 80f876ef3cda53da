"""Reads and writes traces in JSON lines, as Mooncake publishes them, with baton's own additions.

A line has `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, which name
the prompt's blocks: equal ids mean equal blocks. Baton adds `at_s` (the time in seconds, exact, in
place of the timestamp), `block_tokens`, `session_id`, `slo_class` and `tenant`, each only where
there is something to say, so every file of Mooncake's is one of baton's, and others can read
baton's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from baton.domain.errors import BadTrace
from baton.domain.tenant import DEFAULT_TENANT
from baton.simulator.workloads.lines import (
    assembled,
    finite,
    mapping,
    numbered,
    parsed,
    since_first,
    tokens,
)
from baton.simulator.workloads.trace import Trace, TraceRequest

_NS_PER_MS = 1_000_000

_BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024)
"""Where a file does not say. First Mooncake's own (Source: FAST'25 §4), then what engines use."""

_TICK_AT_LEAST_S = 0.5
"""Arrivals rounded to less than this queue like those that were not: it is a few engine steps."""


class _Line(NamedTuple):
    request: TraceRequest
    """Its time is right only if the line has `at_s`."""
    at_ns: int | None
    block_tokens: int | None


def read(
    lines: Iterable[str],
    name: str,
    *,
    spread_s: float | None = None,
    block_tokens: int | None = None,
    seed: int = 0,
    skip_bad: bool = False,
) -> Trace:
    """A trace from JSON lines.

    Timestamps count from the first one. Those that come in ticks, as Mooncake's do each 3 s, are
    spread evenly at random over the tick, in the order of the file: as they stand they would be
    bursts that never were. `spread_s` is the tick, found in the timestamps unless given; 0 leaves
    them alone. Times in `at_s` are taken as they are. `block_tokens` is found in the lines too.

    Raises:
        BadTrace: a line is bad, unless `skip_bad`; blocks of no known size; no requests.
    """
    good, skipped = parsed(numbered(lines), name, _parse, skip_bad=skip_bad)
    said = {one.block_tokens for one in good if one.block_tokens is not None}
    if len(said) > 1:
        raise BadTrace(name, 0, f"lines say different block_tokens: {sorted(said)}")
    size = block_tokens or next(iter(said), None) or _block_size(good, name)
    stamped = [one for one in good if one.at_ns is not None]
    times_s = since_first([one.at_ns for one in stamped if one.at_ns is not None])
    times_s = _spread(times_s, spread_s, random.Random(seed))  # noqa: S311 - seeded, not secret
    requests = [one.request for one in good if one.at_ns is None]
    requests += [
        one.request._replace(at_s=at_s) for one, at_s in zip(stamped, times_s, strict=True)
    ]
    return assembled(name, requests, skipped_lines=skipped, block_tokens=size)


def write(trace: Trace) -> Iterator[str]:
    """The lines of a trace, without line ends; `read` gives the same requests back."""
    for one in trace.requests:
        fields: dict[str, object] = {
            "timestamp": round(one.at_s * 1000),
            "at_s": one.at_s,
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
        }
        if one.block_ids:
            fields |= {"hash_ids": one.block_ids, "block_tokens": trace.block_tokens}
        if one.session_id is not None:
            fields["session_id"] = one.session_id
        if one.slo_class is not None:
            fields["slo_class"] = one.slo_class
        if one.tenant != DEFAULT_TENANT:
            fields["tenant"] = one.tenant
        yield json.dumps(fields, separators=(",", ":"))


def _parse(line: str) -> _Line:
    fields = mapping(line)
    at_s = fields.get("at_s")
    if at_s is None and fields.get("timestamp") is None and "delay" in fields:
        raise ValueError("has a delay after an answer, wanted a timestamp: a replay is open loop")
    request = TraceRequest(
        at_s=0.0 if at_s is None else finite(at_s, "at_s"),
        prompt_tokens=tokens(fields.get("input_length"), "input_length", at_least=1),
        output_tokens=max(tokens(fields.get("output_length"), "output_length"), 1),
        block_ids=_ids(fields.get("hash_ids")),
        session_id=_text(fields.get("session_id"), "session_id"),
        slo_class=_text(fields.get("slo_class"), "slo_class"),
        tenant=_text(fields.get("tenant"), "tenant") or DEFAULT_TENANT,
    )
    if request.at_s < 0:
        raise ValueError(f"at_s is {request.at_s}, wanted at least 0")
    size = fields.get("block_tokens")
    return _Line(
        request,
        None
        if at_s is not None
        else round(finite(fields.get("timestamp"), "timestamp") * _NS_PER_MS),
        None if size is None else tokens(size, "block_tokens", at_least=1),
    )


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise ValueError(f"hash_ids is {str(value)[:40]}, wanted a list of whole numbers")
    return tuple(value)


def _text(value: object, what: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise ValueError(f"{what} is {value!r}, wanted text")


def _block_size(lines: Sequence[_Line], name: str) -> int:
    """The size with which most prompts have as many ids as blocks, full ones or all.

    Where hardly any has, ids may name only a beginning of each prompt, in Mooncake's blocks.
    """
    known = [one.request for one in lines if one.request.block_ids]

    def fitting(size: int) -> int:
        return sum(
            len(one.block_ids) in {one.prompt_tokens // size, -(-one.prompt_tokens // size)}
            for one in known
        )

    best = max(_BLOCK_SIZES, key=fitting)
    if fitting(best) * 2 >= len(known):
        return best
    most = _BLOCK_SIZES[0]
    if all((len(one.block_ids) - 1) * most < one.prompt_tokens for one in known):
        return most
    raise BadTrace(
        name,
        0,
        f"hash_ids fit no block size of {sorted(_BLOCK_SIZES)}: say block_tokens in the lines",
    )


def _spread(times_s: list[float], spread_s: float | None, rng: random.Random) -> list[float]:
    """Times that do not all fall on a tick any more; those of one tick stay in their order."""
    ticks = sorted(set(times_s))
    width_s = _tick(ticks, len(times_s)) if spread_s is None else spread_s
    if not width_s:
        return times_s
    until = dict(pairwise([*ticks, float("inf")]))
    in_order = sorted(range(len(times_s)), key=times_s.__getitem__)
    spread = list(times_s)
    for tick_s, group in groupby(in_order, key=times_s.__getitem__):
        places = list(group)
        room_s = min(width_s, until[tick_s] - tick_s)
        offsets = sorted(rng.random() * room_s for _ in places)
        for place, offset_s in zip(places, offsets, strict=True):
            spread[place] = tick_s + offset_s
    return spread


def _tick(ticks: Sequence[float], requests: int) -> float:
    """How far apart ticks are; 0 if times do not look as if they came in ticks."""
    gaps_s = [later - earlier for earlier, later in pairwise(ticks)]
    width_s = median(gaps_s) if gaps_s and len(ticks) * 2 <= requests else 0.0
    return width_s if width_s >= _TICK_AT_LEAST_S else 0.0
