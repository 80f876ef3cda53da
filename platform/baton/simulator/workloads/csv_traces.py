"""Reads CSV traces with arrivals and lengths: Azure, BurstGPT, Vidur and Splitwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from baton.domain.errors import TraceInvalid
from baton.simulator.workloads.arrivals import TimeUnit
from baton.simulator.workloads.lines import (
    numbered_lines,
    parse_lines,
    parse_tokens,
)
from baton.simulator.workloads.time_units import TimeColumn, build_timed_trace
from baton.simulator.workloads.trace import Trace


@dataclass(frozen=True, slots=True)
class _Layout:
    time: str
    prompt: str
    output: str
    usual_unit: TimeUnit | None
    """None where times are dates."""


_LAYOUTS = (
    # Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace of 2023 and 2024.
    _Layout("timestamp", "contexttokens", "generatedtokens", None),
    # Source: HPMLL/BurstGPT data/.
    _Layout("timestamp", "request tokens", "response tokens", TimeUnit.SECONDS),
    # Source: microsoft/vidur data/processed_traces, those with arrivals.
    _Layout("arrived_at", "num_prefill_tokens", "num_decode_tokens", TimeUnit.SECONDS),
    # Source: Mutinifni/splitwise-sim traces/.
    _Layout("arrival_timestamp", "prompt_size", "token_size", TimeUnit.SECONDS),
)


def matches_header(header: str) -> bool:
    """Whether `read` reads a CSV file with this first line."""
    return _find_layout(header) is not None


def read(
    lines: Iterable[str],
    name: str,
    *,
    ignore_invalid: bool = False,
    time_unit: TimeUnit | None = None,
) -> Trace:
    """A trace from CSV with a header; it begins with its first arrival.

    A request without output counts as one token: an engine samples at least one.

    Raises:
        TraceInvalid: an invalid line, unless `ignore_invalid`; unknown columns; no requests; times
            of an unclear unit.
    """
    rows = header_and_rows(lines, name)
    header = next(rows)[1]
    layout = _find_layout(header)
    if layout is None:
        raise TraceInvalid(name, 1, f"unknown columns: {header.strip()[:100]}")
    columns = parse_columns(header)
    times = TimeColumn(name, layout.time, usual=layout.usual_unit, given=time_unit)

    def parse(line: str) -> tuple[Decimal, int, int]:
        cells = parse_cells(line, columns)
        return (
            times.parse(cells[layout.time]),
            parse_tokens(cells[layout.prompt], layout.prompt, minimum=1),
            max(parse_tokens(cells[layout.output], layout.output), 1),
        )

    rows_read, skipped_lines = parse_lines(rows, name, parse, ignore_invalid=ignore_invalid)
    return build_timed_trace(name, rows_read, times, skipped_lines=skipped_lines)


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
