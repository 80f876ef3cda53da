"""Tells the formats of traces apart, and reads any of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from enum import StrEnum
from itertools import chain, islice
from typing import assert_never

from baton.domain.errors import BadTrace
from baton.simulator.workloads import arrivals, lengths, mooncake, rate_series, vllm_log
from baton.simulator.workloads import csv_traces as azure
from baton.simulator.workloads.lines import mapping
from baton.simulator.workloads.trace import Trace, TraceRequest

_MOST_BLANK_LINES = 100


class TraceFormat(StrEnum):
    """What a file may be."""

    AZURE = "azure"
    """CSV with arrivals and lengths."""
    MOONCAKE = "mooncake"
    """JSON lines with arrivals, lengths and the ids of blocks; baton's own format too."""
    VLLM_LOG = "vllm-log"
    """JSON lines that a benchmark of vLLM logged."""
    LENGTHS = "lengths"
    """CSV with lengths alone."""
    RATE_SERIES = "rate-series"
    """CSV with request rates over time."""


def detect(first_line: str, name: str) -> TraceFormat:
    """The format of a file, by its first line that is not blank.

    Raises:
        BadTrace: it is none of these.
    """
    if first_line.lstrip("\ufeff \t").startswith("{"):
        return _detect_json(first_line, name)
    for known, format_ in (
        (azure, TraceFormat.AZURE),
        (rate_series, TraceFormat.RATE_SERIES),
        (lengths, TraceFormat.LENGTHS),
    ):
        if known.recognises(first_line):
            return format_
    raise BadTrace(
        name,
        1,
        f"no known format begins with {first_line.strip()[:60]!r}: wanted JSON lines with"
        " input_length and output_length, or CSV with TIMESTAMP,ContextTokens,GeneratedTokens",
    )


def read_trace(
    name: str,
    lines: Iterable[str],
    *,
    skip_bad: bool = False,
    rate_per_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """The trace in a file of any known format, sorted by arrival (stably: see `reordered_lines`).

    Formats that say nothing of arrivals need `rate_per_s`; for those that do it changes nothing
    (`scaling.at_rate` does), except that a series of rates is scaled to it.

    Raises:
        BadTrace: unknown format; a line is bad, unless `skip_bad`; no requests; a rate is missing.
    """
    all_lines = iter(lines)
    head = list(islice(all_lines, _MOST_BLANK_LINES))
    first = next((line for line in head if line.strip()), "")
    if not first:
        blank = f"begins with {len(head)} blank lines" if head else "is empty"
        raise BadTrace(name, 0, f"{blank}: wanted JSON lines or CSV, a request each")
    format_ = detect(first, name)
    whole = chain(head, all_lines)
    rng = random.Random(seed)  # noqa: S311 - seeded, not secret
    match format_:
        case TraceFormat.AZURE:
            return azure.read(whole, name, skip_bad=skip_bad)
        case TraceFormat.MOONCAKE:
            return mooncake.read(whole, name, skip_bad=skip_bad, seed=seed)
        case TraceFormat.VLLM_LOG:
            return vllm_log.read(whole, name, skip_bad=skip_bad)
        case TraceFormat.LENGTHS:
            drawn, skipped = lengths.read(whole, name, skip_bad=skip_bad)
            if rate_per_s is None:
                raise BadTrace(name, 0, "says lengths but not when requests arrive: give a rate")
            times_s = arrivals.poisson(rate_per_s, rng)
            requests = (TraceRequest(next(times_s), *one) for one in drawn)
            return Trace(name=name, requests=tuple(requests), skipped_lines=skipped)
        case TraceFormat.RATE_SERIES:
            windows, skipped = rate_series.read(whole, name, skip_bad=skip_bad)
            return rate_series.generated(
                windows, name, rng, rate_per_s=rate_per_s, skipped_lines=skipped
            )
        case _:
            assert_never(format_)


def _detect_json(first_line: str, name: str) -> TraceFormat:
    try:
        fields = mapping(first_line.lstrip("\ufeff"))
    except ValueError:
        # The first line is broken, which does not make the rest another format.
        logged = '"input_toks"' in first_line
        return TraceFormat.VLLM_LOG if logged else TraceFormat.MOONCAKE
    if "input_toks" in fields:
        return TraceFormat.VLLM_LOG
    if "input_length" in fields or "hash_ids" in fields or "timestamp" in fields:
        return TraceFormat.MOONCAKE
    raise BadTrace(name, 1, f"no known format has the fields {', '.join(fields)[:100]}")
