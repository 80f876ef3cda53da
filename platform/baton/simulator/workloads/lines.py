"""What the readers of traces share: lines one by one, and what is wrong with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from baton.domain.errors import BadTrace
from baton.simulator.workloads.trace import Trace, TraceRequest

_MOST_TOKENS = 100_000_000
"""A count beyond this is a mistake: ten times the longest context that any model has today."""

NS_PER_S = 1_000_000_000

T = TypeVar("T")


def parsed(
    lines: Iterable[tuple[int, str]],
    name: str,
    parse: Callable[[str], T],
    *,
    skip_bad: bool = False,
) -> tuple[list[T], int]:
    """What `parse` makes of each line that is not blank, and how many bad ones were left out.

    `lines` come with their numbers. `parse` raises ValueError for a bad line.

    Raises:
        BadTrace: a line is bad, unless `skip_bad`.
    """
    good: list[T] = []
    skipped = 0
    for number, line in lines:
        if not line.strip():
            continue
        try:
            good.append(parse(line))
        except ValueError as wrong:
            if not skip_bad:
                raise BadTrace(name, number, str(wrong)) from wrong
            skipped += 1
    return good, skipped


def assembled(
    name: str,
    requests: Sequence[TraceRequest],
    *,
    skipped_lines: int,
    block_tokens: int = 512,
) -> Trace:
    """A trace of requests in any order: those that arrive at the same time keep theirs.

    Raises:
        BadTrace: there are no requests.
    """
    if not requests:
        raise BadTrace(name, 0, f"holds no requests, and {skipped_lines} lines that were skipped")
    times = [one.at_s for one in requests]
    latest = accumulate(times, max)
    return Trace(
        name=name,
        requests=tuple(sorted(requests, key=lambda one: one.at_s)),
        block_tokens=block_tokens,
        skipped_lines=skipped_lines,
        reordered_lines=sum(at < so_far for at, so_far in zip(times, latest, strict=True)),
    )


def since_first(times_ns: Sequence[int]) -> list[float]:
    """Seconds since the earliest of some times in whole nanoseconds.

    Whole, because seconds since 1970 with seven decimals do not fit a float.
    """
    first = min(times_ns, default=0)
    return [(at - first) / NS_PER_S for at in times_ns]


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, rounded after the seconds, which multiplied would lose the last digits."""
    whole = math.floor(seconds)
    return whole * NS_PER_S + round((seconds - whole) * NS_PER_S)


def mapping(line: str) -> dict[str, object]:
    """The JSON object on a line; the first of a file may begin with a mark of the byte order.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as wrong:
        raise ValueError(f"not JSON: {wrong}") from wrong
    if isinstance(value, dict):
        return value
    raise ValueError(f"got {type(value).__name__}, wanted a JSON object")


def tokens(value: object, what: str, *, at_least: int = 0) -> int:
    """A number of tokens, from text or a JSON value; `what` names it in the error.

    Raises:
        ValueError: it is no whole number, or one that cannot be right.
    """
    number = finite(value, what)
    if number != int(number) or not at_least <= number <= _MOST_TOKENS:
        raise ValueError(
            f"{what} is {value!r}, wanted a whole number from {at_least} to {_MOST_TOKENS}"
        )
    return int(number)


def finite(value: object, what: str) -> float:
    """A number, from text or a JSON value; `what` names it in the error.

    Raises:
        ValueError: it is none, or not a finite one.
    """
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    missing = value is None
    raise ValueError(f"{what} is missing" if missing else f"{what} is {value!r}, wanted a number")


def out_of_order(times: Sequence[float]) -> bool:
    """Whether any of some times is before the one in front of it."""
    return any(later < earlier for earlier, later in pairwise(times))


def numbered(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Lines with their numbers in the file, the first being 1."""
    return enumerate(lines, start=1)
