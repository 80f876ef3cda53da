"""Reads series of request rates, as ServeGen's are summed up, and makes traces of them."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from baton.domain.errors import BadTrace
from baton.simulator.workloads import arrivals
from baton.simulator.workloads.arrivals import RateStep
from baton.simulator.workloads.csv_traces import cells_of, columns_of, header_and_rows
from baton.simulator.workloads.lengths import Lognormal
from baton.simulator.workloads.lines import finite, out_of_order, parsed
from baton.simulator.workloads.trace import Trace, TraceRequest

_COLUMNS = ("t_s", "req_per_s", "mean_input_tokens", "mean_output_tokens")

_MOST_REQUESTS = 5_000_000
"""As many fill about a gigabyte. ServeGen's m-large has 236 million in its two weeks."""

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


def recognises(header: str) -> bool:
    """Whether a CSV file that begins with this line is one that `read` reads."""
    return set(_COLUMNS) <= set(columns_of(header))


def read(
    lines: Iterable[str], name: str, *, skip_bad: bool = False
) -> tuple[tuple[RateWindow, ...], int]:
    """The windows of a CSV file with a row for each, in order; and how many lines were left out.

    Raises:
        BadTrace: a line is bad, unless `skip_bad`; other columns; no rows; not in order; several
            windows, all of no length.
    """
    rows = header_and_rows(lines, name)
    header = next(rows)[1]
    if not recognises(header):
        raise BadTrace(name, 1, f"wanted columns {', '.join(_COLUMNS)}, got {header.strip()!r}")
    columns = columns_of(header)

    def parse(line: str) -> RateWindow:
        cells = cells_of(line, columns)
        from_s, rate_per_s = (finite(cells[column], column) for column in _COLUMNS[:2])
        if rate_per_s == 0:  # then nobody has measured any lengths
            return RateWindow(from_s, 0.0, 1.0, 1.0)
        means = (finite(cells[column], column) for column in _COLUMNS[2:])
        window = RateWindow(from_s, rate_per_s, *means)
        if window.rate_per_s < 0 or min(window[2:]) < 1:
            raise ValueError("a rate below 0, or a mean length below 1 token")
        return window

    windows, skipped = parsed(rows, name, parse, skip_bad=skip_bad)
    if not windows or out_of_order([one.from_s for one in windows]):
        raise BadTrace(name, 0, f"wanted windows in order, got {len(windows)}, out of order if any")
    first_s = windows[0].from_s
    if len(windows) > 1 and windows[-1].from_s == first_s:
        what = f"all {len(windows)} windows begin at {first_s:g} s: correct t_s, or leave one row"
        raise BadTrace(name, 0, what)
    return tuple(windows), skipped


def duration_s(windows: Sequence[RateWindow]) -> float:
    """What the windows cover; the last one is as long as most are."""
    widths = [later.from_s - one.from_s for one, later in pairwise(windows)]
    return windows[-1].from_s - windows[0].from_s + (median(widths) if widths else 600.0)


def mean_rate(windows: Sequence[RateWindow]) -> float:
    """Requests per second over all of the windows."""
    ends = [*(one.from_s for one in windows[1:]), windows[0].from_s + duration_s(windows)]
    asked = sum(one.rate_per_s * (end - one.from_s) for one, end in zip(windows, ends, strict=True))
    return asked / duration_s(windows)


def generated(
    windows: Sequence[RateWindow],
    name: str,
    rng: random.Random,
    *,
    rate_per_s: float | None = None,
    skipped_lines: int = 0,
) -> Trace:
    """Requests that arrive at the windows' rates, all scaled so that the mean is `rate_per_s`.

    Inside a window arrivals are Poisson and lengths lognormal around the window's means.

    Raises:
        BadTrace: there would be too many requests for the memory of this machine; or none, which
            cannot be scaled.
    """
    whole_s, native_per_s = duration_s(windows), mean_rate(windows)
    if rate_per_s is not None and not native_per_s:
        what = f"every window asks for 0 requests, which is not scaled to {rate_per_s:g}/s"
        raise BadTrace(name, 0, f"{what}: correct req_per_s")
    scale = 1.0 if rate_per_s is None else rate_per_s / native_per_s
    wanted = native_per_s * scale * whole_s
    if wanted > _MOST_REQUESTS:
        raise BadTrace(
            name,
            0,
            f"asks for {wanted:.3g} requests in {whole_s:.0f} s, more than {_MOST_REQUESTS}:"
            f" scale it with a rate below {_MOST_REQUESTS / whole_s:.3g}/s",
        )
    first_s = windows[0].from_s
    steps = [
        RateStep(from_s=one.from_s - first_s, rate_per_s=one.rate_per_s * scale) for one in windows
    ]
    models = [
        (
            Lognormal(one.mean_prompt_tokens, _PROMPT_CV),
            Lognormal(one.mean_output_tokens, _OUTPUT_CV),
        )
        for one in windows
    ]
    starts = [one.from_s for one in steps]
    requests = []
    for at_s in arrivals.varying(steps, whole_s, rng):
        prompt, output = models[bisect_right(starts, at_s) - 1]
        requests.append(TraceRequest(at_s, prompt.draw(rng), output.draw(rng)))
    return Trace(name=name, requests=tuple(requests), skipped_lines=skipped_lines)
