"""Reads request logs of vLLM benchmarks, one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from baton.domain.errors import TraceInvalid
from baton.simulator.workloads.arrivals import TimeUnit
from baton.simulator.workloads.lines import (
    numbered_lines,
    parse_lines,
    parse_object,
    parse_tokens,
)
from baton.simulator.workloads.time_units import TimeColumn, build_timed_trace
from baton.simulator.workloads.trace import Trace


def read(
    lines: Iterable[str],
    name: str,
    *,
    ignore_invalid: bool = False,
    time_unit: TimeUnit | None = None,
) -> Trace:
    """A trace from lines with `input_toks`, `output_toks` and `arrival_time` or `arrival_time_ns`.

    It begins with its first arrival. Source: casys-kaist/LLMServingSim, bench and workloads.

    Raises:
        TraceInvalid: an invalid line, unless `ignore_invalid`; no requests; times of an unclear
            unit.
    """
    times = TimeColumn(name, "arrival_time", usual=TimeUnit.SECONDS, given=time_unit)
    times_ns = TimeColumn(
        name, "arrival_time_ns", usual=TimeUnit.NANOSECONDS, given=time_unit, is_fixed=True
    )

    def parse(line: str) -> tuple[bool, tuple[Decimal, int, int]]:
        fields = parse_object(line)
        column = times_ns if times_ns.field in fields else times
        row = (
            column.parse(fields.get(column.field)),
            parse_tokens(fields.get("input_toks"), "input_toks", minimum=1),
            max(parse_tokens(fields.get("output_toks"), "output_toks"), 1),
        )
        return column is times_ns, row

    rows, skipped = parse_lines(numbered_lines(lines), name, parse, ignore_invalid=ignore_invalid)
    if len({is_ns for is_ns, _ in rows}) > 1:
        problem = f"some lines have {times.field}, others {times_ns.field}: expected one of them"
        raise TraceInvalid(name, 0, problem)
    column = times_ns if rows and rows[0][0] else times
    return build_timed_trace(name, [row for _, row in rows], column, skipped_lines=skipped)
