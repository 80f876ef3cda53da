"""The arithmetic of the comparison on real engines: from streams to ratios within a repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from benchmarks._load import Exchange
from benchmarks._statistics import (
    BadStreamError,
    Spread,
    Stream,
    percentiles,
    quantile,
    ratios,
    read_stream,
)

ALONE, POISSON = "alone", "poisson"
"""Loads: each request when the one before has ended; and at random, whatever is under way."""
QUANTILES = ("p50", "p90", "p99")
TIMES = ("ttft_s", "tpot_s")
PERCENT = 100.0
_PROBLEMS_TOLD = 3
_WHOLE_MACHINE = frozenset({"machine", "steal"})

Figures = Mapping[str, object]
Runs = Mapping[str, Sequence[Mapping[str, Figures] | None]]
"""By contender, then repeat, then load; None where a visit failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Ours, and what it is compared with."""

    ours: str
    theirs: str

    @property
    def name(self) -> str:
        """What the comparison is called in the results."""
        return f"{self.ours}_over_{self.theirs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    long: bool
    """Whether its prompt was one of the long ones."""
    stream: Stream | None
    problem: str = ""

    @property
    def whole_s(self) -> float | None:
        """From sending it to its last token."""
        if self.stream is None:
            return None
        return self.stream.ttft_s + self.stream.tpot_s * (self.stream.tokens - 1)


def answer(exchange: Exchange, *, long: bool, max_tokens: int) -> Answer:
    """Read what came back; a stream that is cut short is a failure."""
    if exchange.problem:
        return Answer(long=long, stream=None, problem=exchange.problem)
    try:
        stream = read_stream(exchange.sent_at_s, exchange.body())
    except BadStreamError as error:
        return Answer(long=long, stream=None, problem=str(error))
    if stream.tokens != max_tokens:
        problem = f"{stream.tokens} tokens, wanted {max_tokens}"
        return Answer(long=long, stream=None, problem=problem)
    return Answer(long=long, stream=stream)


def describe(answers: Sequence[Answer]) -> dict[str, object]:
    """The figures of a load: percentiles of what was complete, and how many were not."""
    problems = [one.problem for one in answers if one.stream is None]
    return {
        "requests": len(answers),
        "failed": len(problems),
        "problems": sorted(set(problems))[:_PROBLEMS_TOLD],
        **_times([one for one in answers if one.stream is not None]),
        "short": _times([one for one in answers if one.stream is not None and not one.long]),
        "long": _times([one for one in answers if one.stream is not None and one.long]),
        # In the order of sending: the same request has the same place for every contender.
        "each": {
            "long": [one.long for one in answers],
            "ttft_s": [None if one.stream is None else one.stream.ttft_s for one in answers],
            "tpot_s": [None if one.stream is None else one.stream.tpot_s for one in answers],
            "whole_s": [one.whole_s for one in answers],
        },
    }


def _times(answers: Sequence[Answer]) -> dict[str, object]:
    streams = [one.stream for one in answers if one.stream is not None]
    if not streams:
        return {}
    whole_s = [one.whole_s for one in answers if one.whole_s is not None]
    return {
        "ttft_s": percentiles([one.ttft_s for one in streams]),
        "tpot_s": percentiles([one.tpot_s for one in streams]),
        "gap_max_s": percentiles([one.gap_max_s for one in streams]),
        "whole_s": percentiles(whole_s) | {"mean": fmean(whole_s)},
    }


# ------------------------------------------------------------------ comparing


def figure(figures: Figures, *path: str) -> float | None:
    """One figure of a load, None where it has none."""
    value: object = figures
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, float | int) else None


def both(runs: Runs, pair: Pair, load: str) -> Iterator[tuple[Figures, Figures]]:
    """Ours and theirs under a load, of each repeat in which both were there."""
    for ours, theirs in zip(runs.get(pair.ours, ()), runs.get(pair.theirs, ()), strict=False):
        if ours is not None and theirs is not None and load in ours and load in theirs:
            yield ours[load], theirs[load]


def compared(runs: Runs, pair: Pair, load: str) -> dict[str, dict[str, float]]:
    """Ours over theirs, each percentile within a repeat: median and spread over the repeats.

    `ttft_p50` is of all requests, `long_ttft_p50` of those with long prompts.
    """
    found = {}
    for kind in ("", "short", "long"):
        for time in TIMES:
            for point in QUANTILES:
                path = [word for word in (kind, time, point) if word]
                values = _ratios(runs, pair, load, path)
                if values:
                    name = "_".join((*path[:-2], time.removesuffix("_s"), point))
                    found[name] = asdict(Spread.of(values))
    return found


def _ratios(runs: Runs, pair: Pair, load: str, path: Sequence[str]) -> list[float]:
    rows = [(figure(a, *path), figure(b, *path)) for a, b in both(runs, pair, load)]
    told = [(a, b) for a, b in rows if a is not None and b]
    return ratios([a for a, _ in told], [b for _, b in told])


def overhead(runs: Runs, pair: Pair, load: str) -> dict[str, dict[str, float]]:
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
        quantile(each, 0.5) for a, b in both(runs, pair, load) if (each := _each(a, b))
    ]
    return {
        name: asdict(Spread.of([(one - 1) * PERCENT for one in found]))
        for name, found in values.items()
        if found
    }


def _each(ours: Figures, theirs: Figures) -> list[float]:
    rows = [figures.get("each") for figures in (ours, theirs)]
    whole = [row["whole_s"] if isinstance(row, Mapping) else () for row in rows]
    return [a / b for a, b in zip(*whole, strict=False) if a is not None and b]


def medians(runs: Runs) -> dict[str, dict[str, dict[str, float | None]]]:
    """By contender and load: the median of each time over the repeats, and how many failed.

    `strangers_cores` is the most of any repeat.
    """
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, repeats in runs.items():
        visits = [visit for visit in repeats if visit is not None]
        for load in dict.fromkeys(load for visit in visits for load in visit):
            rows = [visit[load] for visit in visits if load in visit]
            told: dict[str, float | None] = {
                f"{time.removesuffix('_s')}_{point}_s": _median(rows, time, point)
                for time in (*TIMES, "whole_s")
                for point in QUANTILES
            }
            told["failed"] = sum(figure(row, "failed") or 0 for row in rows)
            told["requests"] = sum(figure(row, "requests") or 0 for row in rows)
            told["strangers_cores"] = max(map(strangers_cores, rows), default=None)
            found.setdefault(name, {})[load] = told
    return found


def strangers_cores(figures: Figures) -> float:
    """What was taken meanwhile by others than the contender and its client; 0 where not known."""
    cores = figures.get("cores")
    if not isinstance(cores, Mapping):
        return 0.0
    own = sum(value for name, value in cores.items() if name not in _WHOLE_MACHINE)
    return float(cores["machine"] - own)


def _median(rows: Sequence[Figures], *path: str) -> float | None:
    values = [value for row in rows if (value := figure(row, *path)) is not None]
    return Spread.of(values).median if values else None


def verdicts(compared_by: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, list[str]]:
    """Which percentiles of all requests are better with ours than with theirs, which worse.

    By the medians of the ratios; `compared_by` is a pair's, by load.
    """
    signs: dict[str, list[str]] = {"better": [], "worse": []}
    for load, found in compared_by.items():
        for name, spread in found.items():
            if name.startswith(("short_", "long_")):
                continue
            ratio = spread["median"]
            sure = "" if spread["min"] > 1 or spread["max"] < 1 else ", repeats do not agree"
            signs["better" if ratio <= 1 else "worse"].append(f"{load} {name} {ratio:.3f}{sure}")
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
            shown = "".join(f"{t:>{w}}" for t, w in zip(times, widths, strict=True))
            lines.append(
                f"{name:17}{load:9}{row['failed']:>7.0f}{shown}{_ms(row['whole_p50_s']):>11}"
            )
    for name, reason in failures.items():
        when = "in every repeat" if any(runs[name]) else "at all"
        lines.append(f"{name:17}not measured {when}: {reason}")
    return "\n".join(lines)


def _ms(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s * 1e3:.1f}"
