"""What a benchmark found, as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from baton.bench.findings.campaign import Findings, Run
from baton.bench.findings.intervals import Interval, interval
from baton.bench.findings.metrics import ClassFigures, Figures, Promise, Spread
from baton.bench.formatting import NOTHING, number_text, seconds_text, share_text
from baton.bench.report.study import Table
from baton.simulator.outcome import mean

_Figure = Callable[[Figures], float]
_SPREADS: tuple[tuple[str, Callable[[Figures], Spread]], ...] = (
    ("ttft_s", lambda one: one.ttft),
    ("ttft_from_send_s", lambda one: one.ttft_from_send),
    ("tpot_s", lambda one: one.tpot),
    ("itl_s", lambda one: one.itl),
    ("e2e_s", lambda one: one.e2e),
    ("e2e_from_send_s", lambda one: one.e2e_from_send),
)
_POINTS: tuple[tuple[str, Callable[[Spread], float]], ...] = (
    ("mean", lambda one: one.mean),
    ("p50", lambda one: one.p50),
    ("p90", lambda one: one.p90),
    ("p95", lambda one: one.p95),
    ("p99", lambda one: one.p99),
    ("p99.9", lambda one: one.p999),
)
_RATES: tuple[tuple[str, _Figure], ...] = (
    ("offered_per_s", lambda one: one.offered_per_s),
    ("requests_per_s", lambda one: one.requests_per_s),
    ("output_tokens_per_s", lambda one: one.output_tokens_per_s),
    ("total_tokens_per_s", lambda one: one.total_tokens_per_s),
    ("goodput_per_s", lambda one: one.goodput_per_s),
    ("attainment", lambda one: one.attainment),
)


def over_repeats(runs: Sequence[Run]) -> dict[str, Interval]:
    """Each figure of the repeats of one load, with its interval."""
    told = [run.figures for run in runs]
    found = {name: interval([figure(one) for one in told]) for name, figure in _RATES}
    for name, of in _SPREADS:
        for point, value in _POINTS:
            found[f"{name}.{point}"] = interval([value(of(one)) for one in told])
    return found


_MOST_COLUMNS = 4


def tables_of(findings: Findings, promise: Promise) -> Iterable[Table]:
    """All tables, the most telling first."""
    levels = findings.levels()
    if findings.knee is not None:
        yield _knee_table(findings, promise)
    if len(levels) > 1:
        yield _levels_table(levels, promise)
    shown = _shown(levels, findings)
    yield _figures_table(shown, promise)
    if any(len(run.figures.classes) > 1 for run in findings.runs):
        yield _classes_table(shown, promise)
    yield _client_table(shown)
    failures = Counter[str]()
    for run in findings.runs:
        failures.update(run.figures.failures)
    if failures:
        rows = tuple((why, number_text(count)) for why, count in failures.most_common(10))
        yield Table(title="Failures", columns=("why", "requests"), rows=rows)


def _shown(levels: Mapping[str, list[Run]], findings: Findings) -> dict[str, list[Run]]:
    """The loads whose figures are shown in full: all of a few, else what is around the knee."""
    if len(levels) <= _MOST_COLUMNS:
        return dict(levels)
    knee = findings.knee
    names = list(levels)
    rates = [runs[0].rate_per_s or 0.0 for runs in levels.values()]
    if knee is None or knee.rate_per_s is None:
        return {name: levels[name] for name in (names[0], names[-1])}
    at = rates.index(knee.rate_per_s)
    return {name: levels[name] for name in names[max(0, at - 1) : at + 2]}


def _figures_table(levels: Mapping[str, list[Run]], promise: Promise) -> Table:
    columns = {level: over_repeats(runs) for level, runs in levels.items()}
    rows: list[tuple[str, ...]] = [
        _counts("requests measured", levels, lambda one: one.requests),
        _counts("  failed", levels, lambda one: one.failed),
        _counts("  warm-up, left out", levels, lambda one: one.warm_up_requests),
        ("measured window", *(_window(runs) for runs in levels.values())),
    ]

    def line(label: str, key: str, text: Callable[[float | None], str]) -> None:
        rows.append((label, *(_with_error(one[key], text) for one in columns.values())))

    line("offered, requests/s", "offered_per_s", number_text)
    line("completed, requests/s", "requests_per_s", number_text)
    line("output tokens/s", "output_tokens_per_s", number_text)
    line("all tokens/s", "total_tokens_per_s", number_text)
    if promise.made:
        line("goodput, requests/s", "goodput_per_s", number_text)
        line("attainment", "attainment", share_text)
    whole = ("mean", "p50", "p90", "p99", "p99.9")
    for label, key, points in (
        ("TTFT", "ttft_s", whole),
        ("  from send", "ttft_from_send_s", ("mean", "p50", "p99")),
        ("TPOT", "tpot_s", whole),
        ("ITL", "itl_s", whole),
        ("end to end", "e2e_s", whole),
        ("  from send", "e2e_from_send_s", ("mean", "p50", "p99")),
    ):
        for point in points:
            line(f"{label} {point}", f"{key}.{point}", seconds_text)
    return Table(title="Figures", columns=("", *levels), rows=tuple(rows))


def _levels_table(levels: Mapping[str, list[Run]], promise: Promise) -> Table:
    columns = (
        *("load", "requests/s", "failed", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99"),
        *("e2e p50", "p99", "output tokens/s"),
        *(("goodput/s", "attainment") if promise.made else ()),
    )
    rows = []
    for level, runs in levels.items():
        told = over_repeats(runs)
        times = ("ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99", "itl_s.p99")
        met = (number_text(told["goodput_per_s"].mean), share_text(told["attainment"].mean))
        rows.append(
            (
                level,
                number_text(told["requests_per_s"].mean),
                number_text(sum(run.figures.failed for run in runs)),
                *(seconds_text(told[key].mean) for key in (*times, "e2e_s.p50", "e2e_s.p99")),
                number_text(told["output_tokens_per_s"].mean),
                *(met if promise.made else ()),
            )
        )
    return Table(title="By load, means of repeats", columns=columns, rows=tuple(rows))


def _knee_table(findings: Findings, promise: Promise) -> Table:
    assert findings.knee is not None, "no knee was looked for"
    knee = findings.knee
    rows = [
        (
            f"{one.rate_per_s:.4g}/s",
            share_text(one.attainment),
            "kept" if one.valid and one.attainment >= promise.target else "broken",
            "" if one.valid else "client was the bottleneck",
        )
        for one in knee.probes
    ]
    return Table(
        title=f"Knee at attainment {promise.target:.4g}: {knee.says}",
        columns=("rate tried", "attainment", "promise", ""),
        rows=tuple(rows),
    )


def _classes_table(levels: Mapping[str, list[Run]], promise: Promise) -> Table:
    """One row for each load and class, over its repeats together."""
    rows = []
    for level, runs in levels.items():
        by_class: dict[str, list[ClassFigures]] = {}
        for run in runs:
            for one in run.figures.classes:
                by_class.setdefault(one.slo_class, []).append(one)
        for name, several in by_class.items():
            requests = sum(one.requests for one in several)
            rows.append(
                (
                    level,
                    name,
                    number_text(requests),
                    share_text(sum(one.met for one in several) / requests)
                    if promise.made
                    else NOTHING,
                    number_text(mean([one.goodput_per_s for one in several])),
                    seconds_text(mean([one.ttft.p99 for one in several])),
                    seconds_text(mean([one.tpot.p99 for one in several])),
                )
            )
    columns = ("load", "class", "requests", "attainment", "goodput/s", "TTFT p99", "TPOT p99")
    return Table(title="By class", columns=columns, rows=tuple(rows))


def _client_table(levels: Mapping[str, list[Run]]) -> Table:
    rows = []
    for level, runs in levels.items():
        told = [run.figures.client for run in runs]
        rows.append(
            (
                level,
                number_text(sum(one.late_sends for one in told)),
                seconds_text(max(one.late.p99 for one in told)),
                seconds_text(max(one.late.most for one in told)),
                seconds_text(max(one.lag.p99 for one in told)),
                share_text(max(one.busy for one in told)),
                "no" if any(run.figures.invalid for run in runs) else "yes",
            )
        )
    columns = ("load", "late sends", "late p99", "worst", "read late p99", "of a core", "valid")
    return Table(title="The client itself, worst of repeats", columns=columns, rows=tuple(rows))


def _counts(
    label: str, levels: Mapping[str, list[Run]], figure: Callable[[Figures], int]
) -> tuple[str, ...]:
    totals = (sum(figure(run.figures) for run in runs) for runs in levels.values())
    return (label, *(number_text(one) for one in totals))


def _window(runs: Sequence[Run]) -> str:
    first = runs[0].figures
    text = f"{seconds_text(first.from_s)} to {seconds_text(first.until_s)}"
    return f"{text}, {len(runs)} runs" if len(runs) > 1 else text


def _with_error(one: Interval, text: Callable[[float | None], str]) -> str:
    if one.low is None or one.high is None:
        return text(one.mean)
    return f"{text(one.mean)} ± {text((one.high - one.low) / 2)}"
