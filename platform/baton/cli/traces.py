"""The requests that a verb is given: a file of any known format, or a workload by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.domain.errors import BadTrace, OperatorError

if TYPE_CHECKING:
    from baton.simulator.workloads.trace import Trace


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


def _remedy(error: BadTrace) -> str:
    if error.line > 1:
        return "correct the line, or leave out all that are bad with --skip-bad"
    return "name a trace in one of these formats, or correct this one"


def make_workload(name: str, *, rate_per_s: float, duration_s: float, seed: int = 0) -> Trace:
    """The workload of that name.

    Raises:
        TraceUnusable: there is none, or not with these figures.
    """
    from baton.simulator.workloads.presets import synthetic  # here: keeps --help fast

    try:
        made = synthetic(name, rate_per_s=rate_per_s, duration_s=duration_s, seed=seed)
    except ValueError as error:
        raise TraceUnusable(str(error), "correct --workload, --rate or --duration") from error
    if not len(made):
        what = f"workload {name!r}: no request arrives within {duration_s:g} s at {rate_per_s:g}/s"
        raise TraceUnusable(what, "give a longer --duration or a higher --rate")
    return made
