"""Reads CSV traces with arrivals and lengths: Azure, BurstGPT, Vidur and Splitwise."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from baton.domain.errors import TraceInvalid
from baton.simulator.workloads.lines import (
    NS_PER_S,
    build_timed_trace,
    numbered_lines,
    parse_lines,
    parse_number,
    parse_tokens,
    to_nanoseconds,
)
from baton.simulator.workloads.trace import Trace

_LEAP_SECOND = 60

_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9})\d*)?"
    r"(?:Z|([+-])(\d\d):?(\d\d))?"
)


def date_ns(text: str) -> int:
    """Nanoseconds since 1970 of a date such as `2023-11-16 18:17:03.9799600`, in UTC by default.

    Raises:
        ValueError: no such date.
    """
    match = _DATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"time is {text!r}, expected a date such as 2023-11-16 18:17:03.9799600")
    year, month, day, hour, minute, second = (int(match[i]) for i in range(1, 7))
    # `calendar` raises ValueError for a wrong month or year, but takes a wrong day.
    last_day = calendar.monthrange(year, month)[1]
    limits = ((day, last_day), (hour, 23), (minute, 59), (second, _LEAP_SECOND))
    if not day or any(got > most for got, most in limits):
        raise ValueError(f"time is {text!r}: there is no such day, hour, minute or second")
    seconds = calendar.timegm((year, month, day, hour, minute, second))
    if match[8]:
        utc_offset_s = int(match[9]) * 3600 + int(match[10]) * 60
        seconds -= utc_offset_s if match[8] == "+" else -utc_offset_s
    return seconds * NS_PER_S + int((match[7] or "").ljust(9, "0"))


def seconds_ns(text: str) -> int:
    """Nanoseconds of a number of seconds.

    Raises:
        ValueError: no number.
    """
    return to_nanoseconds(parse_number(text, "time"))


@dataclass(frozen=True, slots=True)
class _Layout:
    time: str
    prompt: str
    output: str
    parse_time: Callable[[str], int]


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


def matches_header(header: str) -> bool:
    """Whether `read` reads a CSV file with this first line."""
    return _find_layout(header) is not None


def read(lines: Iterable[str], name: str, *, ignore_invalid: bool = False) -> Trace:
    """A trace from CSV with a header; it begins with its first arrival.

    A request without output counts as one token: an engine samples at least one.

    Raises:
        TraceInvalid: an invalid line, unless `ignore_invalid`; unknown columns; no requests.
    """
    rows = header_and_rows(lines, name)
    header = next(rows)[1]
    layout = _find_layout(header)
    if layout is None:
        raise TraceInvalid(name, 1, f"unknown columns: {header.strip()[:100]}")
    columns = parse_columns(header)

    def parse(line: str) -> tuple[int, int, int]:
        cells = parse_cells(line, columns)
        return (
            layout.parse_time(cells[layout.time]),
            parse_tokens(cells[layout.prompt], layout.prompt, minimum=1),
            max(parse_tokens(cells[layout.output], layout.output), 1),
        )

    rows_read, skipped_lines = parse_lines(rows, name, parse, ignore_invalid=ignore_invalid)
    return build_timed_trace(name, rows_read, skipped_lines=skipped_lines)


def header_and_rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a CSV file from its header on.

    Raises:
        TraceInvalid: there are no lines.
    """
    has_header = False
    for number, line in numbered_lines(lines):
        if has_header or line.strip():
            has_header = True
            yield number, line
    if not has_header:
        raise TraceInvalid(name, 0, "is empty")


def parse_columns(header: str) -> dict[str, int]:
    """The index of each column, by its lower-case name."""
    names = header.lstrip("\ufeff").strip().split(",")
    return {column.strip().strip('"').lower(): place for place, column in enumerate(names)}


def parse_cells(line: str, columns: Mapping[str, int]) -> dict[str, str]:
    """The cells of a row, by column name.

    Raises:
        ValueError: another number of cells than columns.
    """
    cells = line.strip().split(",")
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} cells, expected {len(columns)}, as many as columns")
    return {name: cells[place].strip().strip('"') for name, place in columns.items()}


def _find_layout(header: str) -> _Layout | None:
    names = set(parse_columns(header))
    matching_layouts = (
        layout for layout in _LAYOUTS if {layout.time, layout.prompt, layout.output} <= names
    )
    return next(matching_layouts, None)
