"""Reads request logs of vLLM benchmarks, one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable

from baton.simulator.workloads.lines import (
    build_timed_trace,
    numbered_lines,
    parse_lines,
    parse_number,
    parse_object,
    parse_tokens,
    to_nanoseconds,
)
from baton.simulator.workloads.trace import Trace


def read(lines: Iterable[str], name: str, *, ignore_invalid: bool = False) -> Trace:
    """A trace from lines with `input_toks`, `output_toks` and `arrival_time` or `arrival_time_ns`.

    It begins with its first arrival. Source: casys-kaist/LLMServingSim, bench and workloads.

    Raises:
        TraceInvalid: an invalid line, unless `ignore_invalid`; no requests.
    """
    rows, skipped = parse_lines(numbered_lines(lines), name, _parse, ignore_invalid=ignore_invalid)
    return build_timed_trace(name, rows, skipped_lines=skipped)


def _parse(line: str) -> tuple[int, int, int]:
    fields = parse_object(line)
    if "arrival_time_ns" in fields:
        at_ns = round(parse_number(fields["arrival_time_ns"], "arrival_time_ns"))
    else:
        at_ns = to_nanoseconds(parse_number(fields.get("arrival_time"), "arrival_time"))
    return (
        at_ns,
        parse_tokens(fields.get("input_toks"), "input_toks", minimum=1),
        max(parse_tokens(fields.get("output_toks"), "output_toks"), 1),
    )
