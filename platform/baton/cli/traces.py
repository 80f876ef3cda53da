"""The requests that a verb is given: a file of any known format, or a workload by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.domain.errors import BadTrace, OperatorError

if TYPE_CHECKING:
    from baton.simulator.workloads.trace import Trace


_WARM_UP_S = {"chat": 600.0}
"""Of workloads with sessions, how long before the first request that is kept they begin: 4 turns
of 39 s in the mean, 16 and more in one session of a hundred."""
_MOST_REQUESTS = 5_000_000
"""That are made up: some gigabytes of memory."""


class TraceUnusable(OperatorError):
    """A trace cannot be read, or there is nothing in it."""


def load_trace(
    path: Path, *, skip_bad: bool = False, rate_per_s: float | None = None, seed: int = 0
) -> Trace:
    """The trace in a file; `rate_per_s` is for formats that do not say when requests arrive.

    Raises:
        TraceUnusable: it cannot be read; says which line, and what is wrong with it.
    """
    from baton.simulator.workloads.formats import read_trace  # here: keeps --help fast

    try:
        with path.open(encoding="utf-8") as lines:
            read = read_trace(str(path), lines, skip_bad=skip_bad, rate_per_s=rate_per_s, seed=seed)
        return replace(read, name=path.name)
    except BadTrace as error:
        raise TraceUnusable(str(error), _remedy(error)) from error
    except UnicodeDecodeError as error:
        raise TraceUnusable(f"{path}: is no text: {error}", "name a file of UTF-8 text") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise TraceUnusable(f"{path}: cannot be read: {why}", "name a file that can be") from error


def load_or_pace(
    path: Path, *, skip_bad: bool, rate_per_s: float | None, seed: int
) -> tuple[Trace, bool]:
    """The trace in a file, and whether its arrivals were made at `rate_per_s`: it had none.

    Raises:
        TraceUnusable: it cannot be read.
    """
    try:
        return load_trace(path, skip_bad=skip_bad, seed=seed), False
    except TraceUnusable:
        if rate_per_s is None:
            raise
        # Perhaps it only does not say when requests arrive; if not, this says what is wrong.
        return load_trace(path, skip_bad=skip_bad, rate_per_s=rate_per_s, seed=seed), True


def _remedy(error: BadTrace) -> str:
    if error.line > 1:
        return "correct the line, or leave out all that are bad with --skip-bad"
    if "a rate" in error.what:
        return "give --rate, in requests per second"
    if not error.line:
        return "name another file, or correct this one"
    return "name a trace in one of these formats, or correct this one"


def make_workload(
    name: str,
    *,
    rate_per_s: float,
    duration_s: float | None = None,
    most: int | None = None,
    seed: int = 0,
) -> Trace:
    """The workload of that name, for so long or so many requests; one of the two may be left out.

    Conversations are under way when it begins: from an empty start it would take minutes until as
    many turns arrive as are asked for.

    Raises:
        TraceUnusable: there is none, or not with these figures.
    """
    if duration_s is None and most is None:
        raise ValueError("neither a duration nor a number of requests is given, wanted one")
    # A tenth more and a few, so that there are enough although arrivals are random.
    long_s = (1.1 * (most or 0) + 10) / rate_per_s if duration_s is None else duration_s
    made = _made(name, rate_per_s, long_s, seed)
    while duration_s is None and most is not None and len(made) < most:
        long_s *= 2
        made = _made(name, rate_per_s, long_s, seed)
    if not len(made):
        what = f"workload {name!r}: no request arrives within {long_s:g} s at {rate_per_s:g}/s"
        raise TraceUnusable(what, "give a longer --duration or a higher --rate")
    if most is not None:
        from baton.simulator.workloads.scaling import first  # here: keeps --help fast

        return first(made, most)
    return made


def _made(name: str, rate_per_s: float, duration_s: float, seed: int) -> Trace:
    from baton.simulator.workloads.presets import synthetic  # here: keeps --help fast
    from baton.simulator.workloads.scaling import cut

    if rate_per_s * duration_s > _MOST_REQUESTS:
        what = (
            f"workload {name!r}: {rate_per_s:g}/s for {duration_s:g} s are"
            f" {rate_per_s * duration_s:.3g} requests, more than {_MOST_REQUESTS:,}"
        )
        raise TraceUnusable(what, "give a lower --rate or a shorter --duration")
    before_s = _WARM_UP_S.get(name, 0.0)
    try:
        made = synthetic(name, rate_per_s=rate_per_s, duration_s=before_s + duration_s, seed=seed)
    except ValueError as error:
        raise TraceUnusable(str(error), "correct --workload, --rate or --duration") from error
    return cut(made, before_s) if before_s else made
