"""The requests that a verb is given: a file of any known format, or a workload by name."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from baton.domain.errors import OperatorError, TraceInvalid

if TYPE_CHECKING:
    from baton.simulator.workloads.arrivals import TimeUnit, UserLoad
    from baton.simulator.workloads.formats import ReadOptions
    from baton.simulator.workloads.trace import Trace


_WARM_UP_S = {"chat": 600.0}
"""How long before the first kept request sessions begin.

A session has 4 turns of 39 s in the mean, and one of a hundred has 16 or more.
"""
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_REQUESTS = 5_000_000
"""Limit of made requests: some gigabytes of memory."""


class TraceUnusable(OperatorError):
    """A trace cannot be read, or is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArgs:
    """Which requests to serve: a file, or a workload by name."""

    file: Path | None = None
    time_unit: TimeUnit | None = None
    """Of the file's arrival times; None to decide it by them."""
    workload: str | None = None
    users: UserLoad | None = None
    """Send the requests in a closed loop, instead of at their arrival times."""
    rate_per_s: float | None = None
    duration_s: float | None = None
    max_requests: int | None = None
    """Requests, at most."""
    scales: tuple[float, ...] = ()
    """Mean rates to bring the trace to, one run for each."""
    ignore_invalid: bool = False
    seed: int = 0


def load_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """The trace in a file, which may be compressed by gzip.

    Raises:
        TraceUnusable: it cannot be read.
    """
    from baton.simulator.workloads.formats import ReadOptions, read_trace  # keeps --help fast

    try:
        with _open_text(path) as lines:
            trace = read_trace(str(path), lines, options or ReadOptions())
        return replace(trace, name=path.name)
    except TraceInvalid as error:
        raise TraceUnusable(str(error), _remedy(error)) from error
    except UnicodeDecodeError as error:
        raise TraceUnusable(f"{path}: is no text: {error}", "name a file of UTF-8 text") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"{path}: is no whole gzip file: {error}"
        raise TraceUnusable(problem, "compress it again, or name the file of text") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceUnusable(
            f"{path}: cannot be read: {reason}", "name a file that can be"
        ) from error


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    if is_compressed:
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _remedy(error: TraceInvalid) -> str:
    if "--time-unit is given" in error.problem:
        return "leave out --time-unit"
    if "the unit of" in error.problem:
        return "give --time-unit: s, ms, us or ns"
    if error.line > 1:
        return "correct the line, or leave out all that are bad with --skip-bad"
    if "a rate" in error.problem:
        return "give --rate, in requests per second"
    if not error.line:
        return "name another file, or correct this one"
    return "name a trace in one of these formats, or correct this one"


def make_workload(
    name: str,
    *,
    rate_per_s: float | None,
    duration_s: float | None = None,
    max_requests: int | None = None,
    seed: int = 0,
    limit_option: str = "--requests",
) -> Trace:
    """The workload of that name, for a time or a number of requests; one may be left out.

    Sessions begin before the first kept request, so that its load is steady from the start.

    Raises:
        TraceUnusable: there is none, or not with these figures; or a rate or an end is missing.
    """
    if rate_per_s is None:
        raise TraceUnusable("--workload needs a rate", "give --rate, in requests per second")
    if duration_s is None and max_requests is None:
        raise TraceUnusable("--workload needs an end", f"give --duration or {limit_option}")
    # A tenth more and a few, so that there are enough although arrivals are random.
    span_s = (1.1 * (max_requests or 0) + 10) / rate_per_s if duration_s is None else duration_s
    trace = _generate(name, rate_per_s, span_s, seed)
    while duration_s is None and max_requests is not None and len(trace) < max_requests:
        span_s *= 2
        trace = _generate(name, rate_per_s, span_s, seed)
    if not len(trace):
        problem = f"workload {name!r}: no request arrives within {span_s:g} s at {rate_per_s:g}/s"
        raise TraceUnusable(problem, "give a longer --duration or a higher --rate")
    if max_requests is not None:
        from baton.simulator.workloads.scaling import first  # here: keeps --help fast

        return first(trace, max_requests)
    return trace


def _generate(name: str, rate_per_s: float, duration_s: float, seed: int) -> Trace:
    """Of that length, after the time in which sessions begin."""
    from baton.simulator.workloads.scaling import cut  # here: keeps --help fast

    _check_count(name, rate_per_s, duration_s)
    warm_up_s = _WARM_UP_S.get(name, 0.0)
    trace = _from_its_beginning(name, rate_per_s, warm_up_s + duration_s, seed)
    return cut(trace, warm_up_s) if warm_up_s else trace


def _check_count(name: str, rate_per_s: float, duration_s: float) -> None:
    if rate_per_s * duration_s > _MAX_REQUESTS:
        problem = (
            f"workload {name!r}: {rate_per_s:g}/s for {duration_s:g} s are"
            f" {rate_per_s * duration_s:.3g} requests, more than {_MAX_REQUESTS:,}"
        )
        raise TraceUnusable(problem, "give a lower --rate or a shorter --duration")


def _from_its_beginning(name: str, rate_per_s: float, duration_s: float, seed: int) -> Trace:
    from baton.simulator.workloads.presets import synthetic  # here: keeps --help fast

    try:
        return synthetic(name, rate_per_s=rate_per_s, duration_s=duration_s, seed=seed)
    except ValueError as error:
        raise TraceUnusable(str(error), "correct --workload, --rate or --duration") from error


# ------------------------------------------------------------------ what is simulated
_MIN_CYCLE_S = 1.0
"""A user's answer takes longer, so that the requests of a duration are not used up."""


_REQUESTS_OF_A_USER = 20
"""Beyond those that are asked for, so that no user runs out of sessions."""


def _requests_of_users(requests: RequestArgs, users: UserLoad) -> RequestArgs:
    """As many requests as the users can send, at any rate: they come when users send them."""
    cycle_s = users.think_s + _MIN_CYCLE_S
    count = requests.max_requests
    if count is None and requests.duration_s is not None:
        count = users.users + math.ceil(users.users * requests.duration_s / cycle_s)
    return replace(
        requests, rate_per_s=users.users / cycle_s, max_requests=count, duration_s=None, users=None
    )


def _whole_sessions(requests: RequestArgs, workload: str, users: UserLoad) -> Trace:
    """Sessions from their first request on: a user begins one, and takes over none.

    Of those that are under way at a moment, too many are long. There are enough for each user to
    begin several.
    """
    if requests.rate_per_s is None or requests.max_requests is None:
        raise TraceUnusable("--workload needs an end", "give --duration or --requests")
    span_s = (requests.max_requests + _REQUESTS_OF_A_USER * users.users) / requests.rate_per_s
    _check_count(workload, requests.rate_per_s, span_s)
    trace = _from_its_beginning(
        workload, requests.rate_per_s, span_s + _WARM_UP_S[workload], requests.seed
    )
    begun: dict[str | int | None, float] = {}
    for request in trace.requests:
        begun.setdefault(request.session_id, request.at_s)
    kept = tuple(each for each in trace.requests if begun[each.session_id] <= span_s)
    return replace(trace, requests=kept)


def requested_traces(requests: RequestArgs) -> list[Trace]:
    """The requests to simulate: one trace for each rate.

    Raises:
        TraceUnusable: they cannot be read or made, have no rate to scale, or none is left.
    """
    if (users := requests.users) is not None:
        requests = _requests_of_users(requests, users)
        if requests.file is not None:
            trace = _trace_from_file(requests, requests.file, requests.rate_per_s)
            return [_limit_trace(trace, requests)]
        if requests.workload in _WARM_UP_S:
            return [_whole_sessions(requests, requests.workload, users)]
    rates: Sequence[float | None] = requests.scales or (requests.rate_per_s,)
    if requests.file is None:
        return [_limit_trace(_trace_from_workload(requests, rate), requests) for rate in rates]
    trace = _trace_from_file(requests, requests.file, rates[0])
    # Of the file, so that the time is the same one however many requests a scale leaves out.
    start_s = trace.requests[0].at_s if trace.requests else 0.0
    if trace.is_paced:
        others = (_trace_from_file(requests, requests.file, rate) for rate in rates[1:])
        return [_limit_trace(paced, requests, start_s) for paced in (trace, *others)]
    scales = [rate for rate in rates if rate is not None]
    if not scales:
        return [_limit_trace(trace, requests, start_s)]
    if not trace.rate_per_s:
        problem = f"{requests.file}: its requests have no rate that could be changed"
        raise TraceUnusable(problem, "leave out --rate and --scale")
    return [
        _limit_trace(_at_rate(trace, rate, requests.seed), requests, start_s) for rate in scales
    ]


def _at_rate(trace: Trace, rate_per_s: float, seed: int) -> Trace:
    from random import Random  # here: keeps --help fast

    from baton.simulator.workloads import scaling

    return scaling.at_rate(trace, rate_per_s, Random(seed))  # noqa: S311 - a seed


def _trace_from_file(requests: RequestArgs, file: Path, rate_per_s: float | None) -> Trace:
    from baton.simulator.workloads.formats import ReadOptions  # here: keeps --help fast
    from baton.simulator.workloads.rate_series import TraceLimits

    options = ReadOptions(
        ignore_invalid=requests.ignore_invalid,
        time_unit=requests.time_unit,
        rate_per_s=rate_per_s,
        limits=TraceLimits(requests.duration_s, requests.max_requests),
        seed=requests.seed,
    )
    return load_trace(file, options)


def _trace_from_workload(requests: RequestArgs, rate_per_s: float | None) -> Trace:
    return make_workload(
        requests.workload or "",
        rate_per_s=rate_per_s,
        duration_s=requests.duration_s,
        max_requests=requests.max_requests,
        seed=requests.seed,
    )


def _limit_trace(trace: Trace, requests: RequestArgs, start_s: float = 0.0) -> Trace:
    from baton.simulator.workloads import scaling  # here: keeps --help fast

    if requests.duration_s is not None:
        trace = scaling.cut(trace, until_s=start_s + requests.duration_s)
    if requests.max_requests is not None:
        trace = scaling.first(trace, requests.max_requests)
    if not len(trace):
        raise TraceUnusable("no request is left", "give a longer --duration or more --requests")
    return trace
