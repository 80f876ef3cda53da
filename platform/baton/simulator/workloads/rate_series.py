"""Reads series of request rates, such as summaries of ServeGen, and makes traces of them."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from baton.domain.errors import TraceInvalid
from baton.simulator.workloads import arrivals
from baton.simulator.workloads.arrivals import RateStep
from baton.simulator.workloads.csv_traces import header_and_rows, parse_cells, parse_columns
from baton.simulator.workloads.lengths import Lognormal
from baton.simulator.workloads.lines import parse_lines, parse_number
from baton.simulator.workloads.trace import Trace, TraceRequest

_COLUMNS = ("t_s", "req_per_s", "mean_input_tokens", "mean_output_tokens")

_MAX_REQUESTS = 5_000_000
"""About a gigabyte. ServeGen's m-large has 236 million requests in its two weeks."""

_PROMPT_CV, _OUTPUT_CV = 1.5, 1.0
"""Spread of lengths inside a window, of which the series says only the mean.
Source: ServeGen (arXiv 2505.09999) §3: outputs are near exponential (cv 1), prompts have a
longer tail; 1.5 lies between Azure's and Mooncake's traces (1.0, 1.3) and ShareGPT (2.2)."""


class RateWindow(NamedTuple):
    """From `from_s` until the next window."""

    from_s: float
    rate_per_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float


def matches_header(header: str) -> bool:
    """Whether `read` reads a CSV file with this first line."""
    return set(_COLUMNS) <= set(parse_columns(header))


def read(
    lines: Iterable[str], name: str, *, ignore_invalid: bool = False
) -> tuple[tuple[RateWindow, ...], int]:
    """The windows of a CSV file, in order, and the number of skipped lines.

    Raises:
        TraceInvalid: an invalid line, unless `ignore_invalid`; other columns; no rows; out of
            order; several windows, all without length.
    """
    rows = header_and_rows(lines, name)
    header = next(rows)[1]
    if not matches_header(header):
        raise TraceInvalid(
            name, 1, f"expected columns {', '.join(_COLUMNS)}, got {header.strip()!r}"
        )
    columns = parse_columns(header)

    def parse(line: str) -> RateWindow:
        cells = parse_cells(line, columns)
        from_s, rate_per_s = (parse_number(cells[column], column) for column in _COLUMNS[:2])
        if rate_per_s == 0:  # without requests there are no lengths
            return RateWindow(
                from_s=from_s, rate_per_s=0.0, mean_prompt_tokens=1.0, mean_output_tokens=1.0
            )
        means = (parse_number(cells[column], column) for column in _COLUMNS[2:])
        window = RateWindow(from_s, rate_per_s, *means)
        if window.rate_per_s < 0 or min(window[2:]) < 1:
            raise ValueError("a rate below 0, or a mean length below 1 token")
        return window

    windows, skipped = parse_lines(rows, name, parse, ignore_invalid=ignore_invalid)
    if not windows or any(later.from_s < window.from_s for window, later in pairwise(windows)):
        raise TraceInvalid(
            name, 0, f"expected windows in order, got {len(windows)}, out of order if any"
        )
    first_s = windows[0].from_s
    if len(windows) > 1 and windows[-1].from_s == first_s:
        problem = (
            f"all {len(windows)} windows begin at {first_s:g} s: correct t_s, or leave one row"
        )
        raise TraceInvalid(name, 0, problem)
    return tuple(windows), skipped


def duration_s(windows: Sequence[RateWindow]) -> float:
    """Duration of all windows; the last has the median length."""
    widths = [later.from_s - window.from_s for window, later in pairwise(windows)]
    return windows[-1].from_s - windows[0].from_s + (median(widths) if widths else 600.0)


def mean_rate_per_s(windows: Sequence[RateWindow]) -> float:
    """Requests per second over all windows."""
    ends = [*(window.from_s for window in windows[1:]), windows[0].from_s + duration_s(windows)]
    total_requests = sum(
        window.rate_per_s * (end - window.from_s) for window, end in zip(windows, ends, strict=True)
    )
    return total_requests / duration_s(windows)


class TraceLimits(NamedTuple):
    """How much of a trace is needed, from its first arrival on; None for all."""

    duration_s: float | None = None
    requests: int | None = None
    thinned_to: int | None = None
    """About this number of requests, from all of the time: at a lower rate."""


WHOLE_TRACE = TraceLimits()


def generate(
    windows: Sequence[RateWindow],
    name: str,
    rng: random.Random,
    *,
    rate_per_s: float | None = None,
    limits: TraceLimits = WHOLE_TRACE,
) -> Trace:
    """Requests at the windows' rates, scaled to the mean `rate_per_s`, and no more than `limits`.

    Inside a window arrivals are Poisson and lengths lognormal around the window's means.

    Raises:
        TraceInvalid: more requests than fit into memory; no requests to scale.
    """
    total_s, series_rate_per_s = duration_s(windows), mean_rate_per_s(windows)
    if rate_per_s is not None and not series_rate_per_s:
        problem = f"every window asks for 0 requests, which is not scaled to {rate_per_s:g}/s"
        raise TraceInvalid(name, 0, f"{problem}: correct req_per_s")
    scale = 1.0 if rate_per_s is None else rate_per_s / series_rate_per_s
    if limits.thinned_to is not None:
        scale *= min(1.0, limits.thinned_to / max(1.0, series_rate_per_s * scale * total_s))
    first_s = windows[0].from_s
    steps = [
        RateStep(from_s=window.from_s - first_s, rate_per_s=window.rate_per_s * scale)
        for window in windows
    ]
    models = [
        (
            Lognormal(window.mean_prompt_tokens, _PROMPT_CV),
            Lognormal(window.mean_output_tokens, _OUTPUT_CV),
        )
        for window in windows
    ]
    starts = [step.from_s for step in steps]
    _check_size(name, steps, total_s, limits)
    requests: list[TraceRequest] = []
    for at_s in arrivals.piecewise_poisson(steps, total_s, rng):
        if _is_enough(requests, at_s, limits):
            break
        prompt, output = models[bisect_right(starts, at_s) - 1]
        requests.append(TraceRequest(at_s, prompt.draw(rng), output.draw(rng)))
    return Trace(name=name, requests=tuple(requests))


def _is_enough(requests: Sequence[TraceRequest], at_s: float, limits: TraceLimits) -> bool:
    """Whether no request at this time or later is needed."""
    if limits.requests is not None and len(requests) >= limits.requests:
        return True
    is_bounded = limits.duration_s is not None and bool(requests)
    return is_bounded and at_s >= requests[0].at_s + (limits.duration_s or 0.0)


def _check_size(name: str, steps: Sequence[RateStep], total_s: float, limits: TraceLimits) -> None:
    """Refuse what does not fit into memory, before it is made.

    Raises:
        TraceInvalid: it does not.
    """
    start_s = next((step.from_s for step in steps if step.rate_per_s), total_s)
    end_s = total_s if limits.duration_s is None else min(total_s, start_s + limits.duration_s)
    ends_s = [*(step.from_s for step in steps[1:]), total_s]
    expected = sum(
        step.rate_per_s * max(0.0, min(until_s, end_s) - step.from_s)
        for step, until_s in zip(steps, ends_s, strict=True)
    )
    if limits.requests is not None:
        expected = min(expected, limits.requests)
    if expected > _MAX_REQUESTS:
        total_requests = sum(
            step.rate_per_s * (until_s - step.from_s)
            for step, until_s in zip(steps, ends_s, strict=True)
        )
        rate_per_s = total_requests / total_s * _MAX_REQUESTS / expected
        raise TraceInvalid(
            name,
            0,
            f"asks for {expected:.3g} requests in {end_s - start_s:.0f} s, more than"
            f" {_MAX_REQUESTS}: serve less of it, or scale it with a rate below {rate_per_s:.3g}/s",
        )
