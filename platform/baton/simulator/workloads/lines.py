"""Parsing of trace lines, for all readers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from baton.domain.errors import TraceInvalid
from baton.domain.names.words import count_text
from baton.simulator.workloads.trace import Trace, TraceRequest

_MAX_TOKENS = 100_000_000
"""A larger count is an error: ten times the longest context of any model today."""

NS_PER_S = 1_000_000_000

T = TypeVar("T")


def parse_lines(
    lines: Iterable[tuple[int, str]],
    name: str,
    parse: Callable[[str], T],
    *,
    ignore_invalid: bool = False,
) -> tuple[list[T], int]:
    """The parsed non-blank lines, and the number of skipped invalid lines.

    `lines` come with their numbers. `parse` raises ValueError for an invalid line.

    Raises:
        TraceInvalid: an invalid line, unless `ignore_invalid`.
    """
    values: list[T] = []
    skipped_lines = 0
    for number, line in lines:
        if not line.strip():
            continue
        try:
            values.append(parse(line))
        except ValueError as error:
            if not ignore_invalid:
                raise TraceInvalid(name, number, str(error)) from error
            skipped_lines += 1
    return values, skipped_lines


def build_trace(
    name: str,
    requests: Sequence[TraceRequest],
    *,
    skipped_lines: int,
    block_tokens: int = 512,
    times: str = "",
) -> Trace:
    """A trace of requests in any order; sorts them stably.

    Raises:
        TraceInvalid: there are no requests.
    """
    if not requests:
        raise TraceInvalid(
            name, 0, f"holds no requests; skipped {count_text(skipped_lines, 'line')}"
        )
    arrivals_s = [request.at_s for request in requests]
    running_max = accumulate(arrivals_s, max)
    return Trace(
        name=name,
        requests=tuple(sorted(requests, key=lambda request: request.at_s)),
        block_tokens=block_tokens,
        times=times,
        skipped_lines=skipped_lines,
        reordered_lines=sum(
            at < so_far for at, so_far in zip(arrivals_s, running_max, strict=True)
        ),
    )


def seconds_since_first(times_ns: Sequence[int]) -> list[float]:
    """Seconds since the earliest of these times.

    Integers, because seconds since 1970 with seven decimals do not fit a float.
    """
    first = min(times_ns, default=0)
    return [(at - first) / NS_PER_S for at in times_ns]


def parse_object(line: str) -> dict[str, object]:
    """The JSON object on a line; the first line of a file may begin with a byte order mark.

    Raises:
        ValueError: the line is no JSON object.
    """
    try:
        value = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if isinstance(value, dict):
        return value
    raise ValueError(f"got {type(value).__name__}, expected a JSON object")


def parse_tokens(value: object, field: str, *, minimum: int = 0) -> int:
    """A number of tokens, from text or a JSON value; `field` names it in the error.

    Raises:
        ValueError: no whole number, or out of range.
    """
    number = parse_number(value, field)
    if number != int(number) or not minimum <= number <= _MAX_TOKENS:
        raise ValueError(
            f"{field} is {value!r}, expected a whole number from {minimum} to {_MAX_TOKENS}"
        )
    return int(number)


def parse_number(value: object, field: str) -> float:
    """A number, from text or a JSON value; `field` names it in the error.

    Raises:
        ValueError: no finite number.
    """
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    is_missing = value is None
    raise ValueError(
        f"{field} is missing" if is_missing else f"{field} is {value!r}, expected a number"
    )


def numbered_lines(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Lines with their numbers in the file, from 1."""
    return enumerate(lines, start=1)
