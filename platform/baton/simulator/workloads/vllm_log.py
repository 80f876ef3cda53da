"""Reads logs of requests, one JSON object a line, that a benchmark of vLLM left behind."""

from __future__ import annotations

from collections.abc import Iterable

from baton.simulator.workloads.lines import (
    assembled,
    finite,
    mapping,
    nanoseconds,
    numbered,
    parsed,
    since_first,
    tokens,
)
from baton.simulator.workloads.trace import Trace, TraceRequest


def read(lines: Iterable[str], name: str, *, skip_bad: bool = False) -> Trace:
    """A trace from lines with `input_toks`, `output_toks` and `arrival_time` or `arrival_time_ns`.

    It begins with its first arrival. Source: casys-kaist/LLMServingSim, bench and workloads.

    Raises:
        BadTrace: a line is bad, unless `skip_bad`; no requests.
    """
    good, skipped = parsed(numbered(lines), name, _parse, skip_bad=skip_bad)
    times_s = since_first([at_ns for at_ns, _, _ in good])
    requests = [
        TraceRequest(at_s, prompt, output)
        for at_s, (_, prompt, output) in zip(times_s, good, strict=True)
    ]
    return assembled(name, requests, skipped_lines=skipped)


def _parse(line: str) -> tuple[int, int, int]:
    fields = mapping(line)
    if "arrival_time_ns" in fields:
        at_ns = round(finite(fields["arrival_time_ns"], "arrival_time_ns"))
    else:
        at_ns = nanoseconds(finite(fields.get("arrival_time"), "arrival_time"))
    return (
        at_ns,
        tokens(fields.get("input_toks"), "input_toks", at_least=1),
        max(tokens(fields.get("output_toks"), "output_toks"), 1),
    )
