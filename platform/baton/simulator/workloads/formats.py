"""Detects the format of a trace and reads it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, islice
from typing import assert_never

from baton.domain.errors import TraceInvalid
from baton.domain.names.words import count_text
from baton.simulator.workloads import (
    arrivals,
    csv_traces,
    lengths,
    mooncake,
    rate_series,
    vllm_log,
)
from baton.simulator.workloads.arrivals import TimeUnit
from baton.simulator.workloads.lines import parse_object
from baton.simulator.workloads.rate_series import WHOLE_TRACE, TraceLimits
from baton.simulator.workloads.trace import Trace, TraceRequest

_MAX_BLANK_LINES = 100


class TraceFormat(StrEnum):
    """Formats of trace files."""

    AZURE = "azure"
    MOONCAKE = "mooncake"
    """JSON lines with arrivals, lengths and block ids; baton's own format too."""
    VLLM_LOG = "vllm-log"
    """JSON lines that a benchmark of vLLM logged."""
    LENGTHS = "lengths"
    RATE_SERIES = "rate-series"


_TIMED_FORMATS = (TraceFormat.AZURE, TraceFormat.MOONCAKE, TraceFormat.VLLM_LOG)


def detect_format(first_line: str, name: str) -> TraceFormat:
    """The format of a file, by its first non-blank line.

    Raises:
        TraceInvalid: an unknown format.
    """
    if first_line.lstrip("\ufeff \t").startswith("{"):
        return _detect_json(first_line, name)
    for reader, format_ in (
        (csv_traces, TraceFormat.AZURE),
        (rate_series, TraceFormat.RATE_SERIES),
        (lengths, TraceFormat.LENGTHS),
    ):
        if reader.matches_header(first_line):
            return format_
    raise TraceInvalid(
        name,
        1,
        f"no known format begins with {first_line.strip()[:60]!r}: expected JSON lines with"
        " input_length and output_length, or CSV with TIMESTAMP,ContextTokens,GeneratedTokens",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a trace, and how much of it is needed."""

    ignore_invalid: bool = False
    """Leave out invalid lines."""
    time_unit: TimeUnit | None = None
    """Of numbers that are arrival times; None to decide it by the data."""
    rate_per_s: float | None = None
    """Of lengths without arrivals, and the mean of a rate series. Does not change other formats:
    `scaling.at_rate` does."""
    limits: TraceLimits = WHOLE_TRACE
    """The part of a rate series to generate."""
    seed: int = 0


def read_trace(name: str, lines: Iterable[str], options: ReadOptions | None = None) -> Trace:
    """The trace in a file of any known format, sorted by arrival (stably: see `reordered_lines`).

    Raises:
        TraceInvalid: an unknown format; an invalid line, unless `ignore_invalid`; no requests; a
            missing rate; times of an unclear unit.
    """
    options = options or ReadOptions()
    all_lines = iter(lines)
    head = list(islice(all_lines, _MAX_BLANK_LINES))
    first = next((line for line in head if line.strip()), "")
    if not first:
        problem = f"begins with {count_text(len(head), 'blank line')}" if head else "is empty"
        raise TraceInvalid(name, 0, f"{problem}: expected JSON lines or CSV, a request each")
    format_ = detect_format(first, name)
    rewound_lines = chain(head, all_lines)
    if options.time_unit is not None and format_ not in _TIMED_FORMATS:
        raise TraceInvalid(name, 0, "has no times of an unknown unit, and --time-unit is given")
    rng = random.Random(options.seed)  # noqa: S311 - seeded, not secret
    ignore_invalid, time_unit = options.ignore_invalid, options.time_unit
    match format_:
        case TraceFormat.AZURE:
            return csv_traces.read(
                rewound_lines, name, ignore_invalid=ignore_invalid, time_unit=time_unit
            )
        case TraceFormat.MOONCAKE:
            return mooncake.read(
                rewound_lines,
                name,
                ignore_invalid=ignore_invalid,
                time_unit=time_unit,
                seed=options.seed,
            )
        case TraceFormat.VLLM_LOG:
            return vllm_log.read(
                rewound_lines, name, ignore_invalid=ignore_invalid, time_unit=time_unit
            )
        case TraceFormat.LENGTHS:
            request_lengths, skipped = lengths.read(
                rewound_lines, name, ignore_invalid=ignore_invalid
            )
            if options.rate_per_s is None:
                raise TraceInvalid(
                    name, 0, "says lengths but not when requests arrive: give a rate"
                )
            times_s = arrivals.poisson(options.rate_per_s, rng)
            requests = (
                TraceRequest(next(times_s), *request_length) for request_length in request_lengths
            )
            return Trace(name=name, requests=tuple(requests), skipped_lines=skipped, is_paced=True)
        case TraceFormat.RATE_SERIES:
            windows, skipped = rate_series.read(rewound_lines, name, ignore_invalid=ignore_invalid)
            trace = rate_series.generate(
                windows, name, rng, rate_per_s=options.rate_per_s, limits=options.limits
            )
            is_paced = options.rate_per_s is not None
            return replace(trace, skipped_lines=skipped, is_paced=is_paced)
        case _:
            assert_never(format_)


def _detect_json(first_line: str, name: str) -> TraceFormat:
    try:
        fields = parse_object(first_line.lstrip("\ufeff"))
    except ValueError:
        # The other lines may be valid.
        is_vllm_log = '"input_toks"' in first_line
        return TraceFormat.VLLM_LOG if is_vllm_log else TraceFormat.MOONCAKE
    if "input_toks" in fields:
        return TraceFormat.VLLM_LOG
    if "input_length" in fields or "hash_ids" in fields or "timestamp" in fields:
        return TraceFormat.MOONCAKE
    raise TraceInvalid(name, 1, f"no known format has the fields {', '.join(fields)[:100]}")
