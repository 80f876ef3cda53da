"""The arithmetic of the comparison on real engines: from streams to ratios within a repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from benchmarks._load import Exchange
from benchmarks._statistics import (
    BadStreamError,
    RepeatSpread,
    StreamTimes,
    percentiles,
    quantile,
    ratios,
    read_stream,
)

SEQUENTIAL, POISSON = "alone", "poisson"
"""Loads: each request when the one before has ended; and at random times."""
QUANTILES = ("p50", "p90", "p99")
TIMES = ("ttft_s", "tpot_s")
PERCENT = 100.0
_MAX_PROBLEMS_SHOWN = 3
_WHOLE_MACHINE = frozenset({"machine", "steal"})

Metrics = Mapping[str, object]
Runs = Mapping[str, Sequence[Mapping[str, Metrics] | None]]
"""By contender, then repeat, then load; None where a visit failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ours, and what it is compared with."""

    ours: str
    theirs: str

    @property
    def name(self) -> str:
        """What the comparison is called in the results."""
        return f"{self.ours}_over_{self.theirs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """What became of one request."""

    is_long: bool
    """Whether its prompt was one of the long ones."""
    stream: StreamTimes | None
    error: str = ""

    @property
    def e2e_s(self) -> float | None:
        """From sending it to its last token."""
        if self.stream is None:
            return None
        return self.stream.ttft_s + self.stream.tpot_s * (self.stream.tokens - 1)


def read_result(exchange: Exchange, *, is_long: bool, max_tokens: int) -> RequestResult:
    """Read what came back; a stream that is cut short is a failure."""
    if exchange.error:
        return RequestResult(is_long=is_long, stream=None, error=exchange.error)
    try:
        stream = read_stream(exchange.sent_at_s, exchange.body())
    except BadStreamError as error:
        return RequestResult(is_long=is_long, stream=None, error=str(error))
    if stream.tokens != max_tokens:
        problem = f"{stream.tokens} tokens, expected {max_tokens}"
        return RequestResult(is_long=is_long, stream=None, error=problem)
    return RequestResult(is_long=is_long, stream=stream)


def summarize_load(results: Sequence[RequestResult]) -> dict[str, object]:
    """The figures of a load: percentiles of what was complete, and how many were not."""
    problems = [result.error for result in results if result.stream is None]
    return {
        "requests": len(results),
        "failed": len(problems),
        "problems": sorted(set(problems))[:_MAX_PROBLEMS_SHOWN],
        **_times([result for result in results if result.stream is not None]),
        "short": _times(
            [result for result in results if result.stream is not None and not result.is_long]
        ),
        "long": _times(
            [result for result in results if result.stream is not None and result.is_long]
        ),
        # In the order of sending: the same request has the same place for every contender.
        "each": {
            "long": [result.is_long for result in results],
            "ttft_s": [
                None if result.stream is None else result.stream.ttft_s for result in results
            ],
            "tpot_s": [
                None if result.stream is None else result.stream.tpot_s for result in results
            ],
            "whole_s": [result.e2e_s for result in results],
        },
    }


def _times(answers: Sequence[RequestResult]) -> dict[str, object]:
    streams = [answer.stream for answer in answers if answer.stream is not None]
    if not streams:
        return {}
    whole_s = [answer.e2e_s for answer in answers if answer.e2e_s is not None]
    return {
        "ttft_s": percentiles([stream.ttft_s for stream in streams]),
        "tpot_s": percentiles([stream.tpot_s for stream in streams]),
        "gap_max_s": percentiles([stream.max_itl_s for stream in streams]),
        "whole_s": percentiles(whole_s) | {"mean": fmean(whole_s)},
    }


# ------------------------------------------------------------------ comparing


def metric(metrics: Metrics, *path: str) -> float | None:
    """One figure of a load, None where it has none."""
    value: object = metrics
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, float | int) else None


def paired_metrics(runs: Runs, pair: Comparison, load: str) -> Iterator[tuple[Metrics, Metrics]]:
    """Ours and theirs under a load, of each repeat in which both were there."""
    for ours, theirs in zip(runs.get(pair.ours, ()), runs.get(pair.theirs, ()), strict=False):
        if ours is not None and theirs is not None and load in ours and load in theirs:
            yield ours[load], theirs[load]


def compare(runs: Runs, pair: Comparison, load: str) -> dict[str, dict[str, float]]:
    """Ours over theirs, each percentile within a repeat: median and spread over the repeats.

    `ttft_p50` is of all requests, `long_ttft_p50` of those with long prompts.
    """
    ratios_by_name = {}
    for kind in ("", "short", "long"):
        for time in TIMES:
            for point in QUANTILES:
                path = [word for word in (kind, time, point) if word]
                values = _ratios(runs, pair, load, path)
                if values:
                    name = "_".join((*path[:-2], time.removesuffix("_s"), point))
                    ratios_by_name[name] = asdict(RepeatSpread.from_values(values))
    return ratios_by_name


def _ratios(runs: Runs, pair: Comparison, load: str, path: Sequence[str]) -> list[float]:
    rows = [(metric(a, *path), metric(b, *path)) for a, b in paired_metrics(runs, pair, load)]
    complete_rows = [(a, b) for a, b in rows if a is not None and b]
    return ratios([a for a, _ in complete_rows], [b for _, b in complete_rows])


def overhead_percent(runs: Runs, pair: Comparison, load: str) -> dict[str, dict[str, float]]:
    """What ours takes beyond theirs, in per cent: median and spread over the repeats.

    `whole_each` goes request by request, the same one with both: the median of those, which a few
    disturbed ones do not move.
    """
    paths = {
        "whole_mean": ("whole_s", "mean"),
        **{f"whole_{point}": ("whole_s", point) for point in QUANTILES},
        **{f"{t.removesuffix('_s')}_{point}": (t, point) for t in TIMES for point in QUANTILES},
    }
    values = {name: _ratios(runs, pair, load, path) for name, path in paths.items()}
    values["whole_each"] = [
        quantile(each, 0.5)
        for a, b in paired_metrics(runs, pair, load)
        if (each := _request_ratios(a, b))
    ]
    return {
        name: asdict(
            RepeatSpread.from_values([(pair_ratio - 1) * PERCENT for pair_ratio in pair_ratios])
        )
        for name, pair_ratios in values.items()
        if pair_ratios
    }


def _request_ratios(ours: Metrics, theirs: Metrics) -> list[float]:
    rows = [figures.get("each") for figures in (ours, theirs)]
    e2e_by_side = [row["whole_s"] if isinstance(row, Mapping) else () for row in rows]
    return [a / b for a, b in zip(*e2e_by_side, strict=False) if a is not None and b]


def medians(runs: Runs) -> dict[str, dict[str, dict[str, float | None]]]:
    """By contender and load: the median of each time over the repeats, and how many failed.

    `other_process_cores` is the most of any repeat.
    """
    medians_by_contender: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, repeats in runs.items():
        visits = [visit for visit in repeats if visit is not None]
        for load in dict.fromkeys(load for visit in visits for load in visit):
            rows = [visit[load] for visit in visits if load in visit]
            row_medians: dict[str, float | None] = {
                f"{time.removesuffix('_s')}_{point}_s": _median(rows, time, point)
                for time in (*TIMES, "whole_s")
                for point in QUANTILES
            }
            row_medians["failed"] = sum(metric(row, "failed") or 0 for row in rows)
            row_medians["requests"] = sum(metric(row, "requests") or 0 for row in rows)
            row_medians["strangers_cores"] = max(map(other_process_cores, rows), default=None)
            medians_by_contender.setdefault(name, {})[load] = row_medians
    return medians_by_contender


def other_process_cores(figures: Metrics) -> float:
    """What was taken meanwhile by others than the contender and its client; 0 where not known."""
    cores = figures.get("cores")
    if not isinstance(cores, Mapping):
        return 0.0
    own_cores = sum(value for name, value in cores.items() if name not in _WHOLE_MACHINE)
    return float(cores["machine"] - own_cores)


def _median(rows: Sequence[Metrics], *path: str) -> float | None:
    values = [value for row in rows if (value := metric(row, *path)) is not None]
    return RepeatSpread.from_values(values).median if values else None


def better_and_worse(
    compared_by: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, list[str]]:
    """Which percentiles of all requests are better with ours than with theirs, which worse.

    By the medians of the ratios; `compared_by` is a pair's, by load.
    """
    signs: dict[str, list[str]] = {"better": [], "worse": []}
    for load, found in compared_by.items():
        for name, spread in found.items():
            if name.startswith(("short_", "long_")):
                continue
            ratio = spread["median"]
            agreement = "" if spread["min"] > 1 or spread["max"] < 1 else ", repeats do not agree"
            signs["better" if ratio <= 1 else "worse"].append(
                f"{load} {name} {ratio:.3f}{agreement}"
            )
    return signs


def table(runs: Runs, failures: Mapping[str, str]) -> str:
    """All medians in milliseconds, for people."""
    lines = [
        f"{'':17}{'load':9}{'failed':>7}{'TTFT p50':>10}{'p90':>8}{'p99':>8}"
        f"{'TPOT p50':>10}{'p90':>8}{'p99':>8}{'whole p50':>11}"
    ]
    for name, loads in medians(runs).items():
        for load, row in loads.items():
            times = [_ms(row[f"{t}_{point}_s"]) for t in ("ttft", "tpot") for point in QUANTILES]
            widths = (10, 8, 8, 10, 8, 8)
            cells = "".join(f"{t:>{w}}" for t, w in zip(times, widths, strict=True))
            lines.append(
                f"{name:17}{load:9}{row['failed']:>7.0f}{cells}{_ms(row['whole_p50_s']):>11}"
            )
    for name, reason in failures.items():
        when = "in every repeat" if any(runs[name]) else "at all"
        lines.append(f"{name:17}not measured {when}: {reason}")
    return "\n".join(lines)


def _ms(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s * 1e3:.1f}"
