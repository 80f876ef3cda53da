"""Reads traces of arrivals and lengths in CSV, as Azure, BurstGPT, Vidur and Splitwise do."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from baton.domain.errors import BadTrace
from baton.simulator.workloads.lines import (
    NS_PER_S,
    assembled,
    finite,
    nanoseconds,
    numbered,
    parsed,
    since_first,
    tokens,
)
from baton.simulator.workloads.trace import Trace, TraceRequest

_LEAP_SECOND = 60

_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9})\d*)?"
    r"(?:Z|([+-])(\d\d):?(\d\d))?"
)


def date_ns(text: str) -> int:
    """Nanoseconds since 1970 of a date such as `2023-11-16 18:17:03.9799600`, UTC unless it says.

    Raises:
        ValueError: it is no such date.
    """
    found = _DATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"time is {text!r}, wanted a date such as 2023-11-16 18:17:03.9799600")
    year, month, day, hour, minute, second = (int(found[i]) for i in range(1, 7))
    # Both calls of `calendar` raise ValueError where there is no such month or year; a day too many
    # would be one of the next month.
    last_day = calendar.monthrange(year, month)[1]
    limits = ((day, last_day), (hour, 23), (minute, 59), (second, _LEAP_SECOND))
    if not day or any(got > most for got, most in limits):
        raise ValueError(f"time is {text!r}: there is no such day, hour, minute or second")
    seconds = calendar.timegm((year, month, day, hour, minute, second))
    if found[8]:
        ahead = int(found[9]) * 3600 + int(found[10]) * 60
        seconds -= ahead if found[8] == "+" else -ahead
    return seconds * NS_PER_S + int((found[7] or "").ljust(9, "0"))


def seconds_ns(text: str) -> int:
    """Nanoseconds of a number of seconds.

    Raises:
        ValueError: it is no number.
    """
    return nanoseconds(finite(text, "time"))


@dataclass(frozen=True, slots=True)
class _Layout:
    time: str
    prompt: str
    output: str
    clock: Callable[[str], int]


_LAYOUTS = (
    # Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace of 2023 and 2024.
    _Layout("timestamp", "contexttokens", "generatedtokens", date_ns),
    # Source: HPMLL/BurstGPT data/.
    _Layout("timestamp", "request tokens", "response tokens", seconds_ns),
    # Source: microsoft/vidur data/processed_traces, those with arrivals.
    _Layout("arrived_at", "num_prefill_tokens", "num_decode_tokens", seconds_ns),
    # Source: Mutinifni/splitwise-sim traces/.
    _Layout("arrival_timestamp", "prompt_size", "token_size", seconds_ns),
)


def recognises(header: str) -> bool:
    """Whether a CSV file that begins with this line is one that `read` reads."""
    return _layout_of(header) is not None


def read(lines: Iterable[str], name: str, *, skip_bad: bool = False) -> Trace:
    """A trace from CSV, its first line naming the columns; it begins with its first arrival.

    A request that generated nothing counts as one token: an engine samples at least one.

    Raises:
        BadTrace: a line is bad, unless `skip_bad`; unknown columns; no requests.
    """
    rows = header_and_rows(lines, name)
    header = next(rows)[1]
    layout = _layout_of(header)
    if layout is None:
        raise BadTrace(name, 1, f"unknown columns: {header.strip()[:100]}")
    columns = columns_of(header)

    def parse(line: str) -> tuple[int, int, int]:
        cells = cells_of(line, columns)
        return (
            layout.clock(cells[layout.time]),
            tokens(cells[layout.prompt], layout.prompt, at_least=1),
            max(tokens(cells[layout.output], layout.output), 1),
        )

    good, skipped = parsed(rows, name, parse, skip_bad=skip_bad)
    times_s = since_first([at_ns for at_ns, _, _ in good])
    requests = [
        TraceRequest(at_s, prompt, output)
        for at_s, (_, prompt, output) in zip(times_s, good, strict=True)
    ]
    return assembled(name, requests, skipped_lines=skipped)


def header_and_rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a CSV file, the first of them naming the columns.

    Raises:
        BadTrace: there are no lines.
    """
    found = False
    for number, line in numbered(lines):
        if found or line.strip():
            found = True
            yield number, line
    if not found:
        raise BadTrace(name, 0, "is empty")


def columns_of(header: str) -> dict[str, int]:
    """Where each column is, by its name in lower case."""
    names = header.lstrip("\ufeff").strip().split(",")
    return {one.strip().strip('"').lower(): place for place, one in enumerate(names)}


def cells_of(line: str, columns: Mapping[str, int]) -> dict[str, str]:
    """The cells of a row, by the name of their column.

    Raises:
        ValueError: there are too few, or too many.
    """
    cells = line.strip().split(",")
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} cells, wanted {len(columns)}, as many as columns")
    return {name: cells[place].strip().strip('"') for name, place in columns.items()}


def _layout_of(header: str) -> _Layout | None:
    names = set(columns_of(header))
    fitting = (one for one in _LAYOUTS if {one.time, one.prompt, one.output} <= names)
    return next(fitting, None)
