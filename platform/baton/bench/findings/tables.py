"""What a benchmark found, as tables for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from baton.bench.findings.campaign import BenchmarkResult, BenchmarkRun
from baton.bench.findings.metrics import BenchmarkMetrics, ClassMetrics, Distribution, SloObjectives
from baton.bench.formatting import NO_VALUE, format_number, format_percent, format_seconds
from baton.bench.report.study import Table
from baton.simulator.outcome import mean

_MetricGetter = Callable[[BenchmarkMetrics], float]
_DISTRIBUTIONS: tuple[tuple[str, Callable[[BenchmarkMetrics], Distribution]], ...] = (
    ("ttft_s", lambda metrics: metrics.ttft),
    ("ttft_from_send_s", lambda metrics: metrics.ttft_from_send),
    ("tpot_s", lambda metrics: metrics.tpot),
    ("itl_s", lambda metrics: metrics.itl),
    ("e2e_s", lambda metrics: metrics.e2e),
    ("e2e_from_send_s", lambda metrics: metrics.e2e_from_send),
)
_STATISTICS: tuple[tuple[str, Callable[[Distribution], float]], ...] = (
    ("mean", lambda metrics: metrics.mean),
    ("p50", lambda metrics: metrics.p50),
    ("p90", lambda metrics: metrics.p90),
    ("p95", lambda metrics: metrics.p95),
    ("p99", lambda metrics: metrics.p99),
    ("p99.9", lambda metrics: metrics.p999),
)
_RATES: tuple[tuple[str, _MetricGetter], ...] = (
    ("offered_per_s", lambda metrics: metrics.offered_per_s),
    ("requests_per_s", lambda metrics: metrics.requests_per_s),
    ("output_tokens_per_s", lambda metrics: metrics.output_tokens_per_s),
    ("total_tokens_per_s", lambda metrics: metrics.total_tokens_per_s),
    ("goodput_per_s", lambda metrics: metrics.goodput_per_s),
    ("attainment", lambda metrics: metrics.attainment),
)
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom. Source: NIST/SEMATECH
e-Handbook of Statistical Methods, 1.3.6.7.2."""
_MIN_VALUES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConfidenceInterval:
    """A mean, and where it is with a confidence of 95 %."""

    mean: float
    low: float | None
    """None when there is one value only: nothing is known of how it varies."""
    high: float | None
    values: tuple[float, ...]


def intervals_over_repeats(runs: Sequence[BenchmarkRun]) -> dict[str, _ConfidenceInterval]:
    """Each figure of the repeats of one load, with its interval."""
    metrics = [run.metrics for run in runs]
    intervals = {
        name: confidence_interval([figure(metric) for metric in metrics]) for name, figure in _RATES
    }
    for name, get_distribution in _DISTRIBUTIONS:
        for point, value in _STATISTICS:
            intervals[f"{name}.{point}"] = confidence_interval(
                [value(get_distribution(metric)) for metric in metrics]
            )
    return intervals


_MAX_COLUMNS = 4


def tables_of(result: BenchmarkResult, slo: SloObjectives) -> Iterable[Table]:
    """All tables, the most telling first."""
    levels = result.runs_by_load()
    if result.knee is not None:
        yield _knee_table(result, slo)
    if len(levels) > 1:
        yield _levels_table(levels, slo)
    shown_levels = _levels_to_show(levels, result)
    yield _metrics_table(shown_levels, slo)
    if any(len(run.metrics.classes) > 1 for run in result.runs):
        yield _classes_table(shown_levels, slo)
    yield _client_table(shown_levels)
    failures = Counter[str]()
    for run in result.runs:
        failures.update(run.metrics.failures)
    if failures:
        rows = tuple((why, format_number(count)) for why, count in failures.most_common(10))
        yield Table(title="Failures", columns=("why", "requests"), rows=rows)


def _levels_to_show(
    levels: Mapping[str, list[BenchmarkRun]], result: BenchmarkResult
) -> dict[str, list[BenchmarkRun]]:
    """The loads whose figures are shown in full: all of a few, else what is around the knee."""
    if len(levels) <= _MAX_COLUMNS:
        return dict(levels)
    knee = result.knee
    names = list(levels)
    rates = [runs[0].rate_per_s or 0.0 for runs in levels.values()]
    if knee is None or knee.rate_per_s is None:
        return {name: levels[name] for name in (names[0], names[-1])}
    knee_index = rates.index(knee.rate_per_s)
    return {name: levels[name] for name in names[max(0, knee_index - 1) : knee_index + 2]}


def _metrics_table(levels: Mapping[str, list[BenchmarkRun]], slo: SloObjectives) -> Table:
    columns = {level: intervals_over_repeats(runs) for level, runs in levels.items()}
    rows: list[tuple[str, ...]] = [
        _count_row("requests measured", levels, lambda metrics: metrics.requests),
        _count_row("  failed", levels, lambda metrics: metrics.failed),
        _count_row("  warm-up, left out", levels, lambda metrics: metrics.warm_up_requests),
        ("measured window", *(_window_text(runs) for runs in levels.values())),
    ]

    def add_row(label: str, key: str, text: Callable[[float | None], str]) -> None:
        rows.append((label, *(_format_interval(column[key], text) for column in columns.values())))

    add_row("offered, requests/s", "offered_per_s", format_number)
    add_row("completed, requests/s", "requests_per_s", format_number)
    add_row("output tokens/s", "output_tokens_per_s", format_number)
    add_row("all tokens/s", "total_tokens_per_s", format_number)
    if slo.has_objectives:
        add_row("goodput, requests/s", "goodput_per_s", format_number)
        add_row("attainment", "attainment", format_percent)
    all_statistics = ("mean", "p50", "p90", "p99", "p99.9")
    for label, key, points in (
        ("TTFT", "ttft_s", all_statistics),
        ("  from send", "ttft_from_send_s", ("mean", "p50", "p99")),
        ("TPOT", "tpot_s", all_statistics),
        ("ITL", "itl_s", all_statistics),
        ("end to end", "e2e_s", all_statistics),
        ("  from send", "e2e_from_send_s", ("mean", "p50", "p99")),
    ):
        for point in points:
            add_row(f"{label} {point}", f"{key}.{point}", format_seconds)
    return Table(title="Figures", columns=("", *levels), rows=tuple(rows))


def _levels_table(levels: Mapping[str, list[BenchmarkRun]], slo: SloObjectives) -> Table:
    columns = (
        *("load", "requests/s", "failed", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99"),
        *("e2e p50", "p99", "output tokens/s"),
        *(("goodput/s", "attainment") if slo.has_objectives else ()),
    )
    rows = []
    for level, runs in levels.items():
        intervals = intervals_over_repeats(runs)
        times = ("ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99", "itl_s.p99")
        met = (
            format_number(intervals["goodput_per_s"].mean),
            format_percent(intervals["attainment"].mean),
        )
        rows.append(
            (
                level,
                format_number(intervals["requests_per_s"].mean),
                format_number(sum(run.metrics.failed for run in runs)),
                *(
                    format_seconds(intervals[key].mean)
                    for key in (*times, "e2e_s.p50", "e2e_s.p99")
                ),
                format_number(intervals["output_tokens_per_s"].mean),
                *(met if slo.has_objectives else ()),
            )
        )
    return Table(title="By load, means of repeats", columns=columns, rows=tuple(rows))


def _knee_table(result: BenchmarkResult, slo: SloObjectives) -> Table:
    assert result.knee is not None, "no knee was looked for"
    knee = result.knee
    rows = [
        (
            f"{probe.rate_per_s:.4g}/s",
            format_percent(probe.attainment),
            "kept" if probe.valid and probe.attainment >= slo.target else "broken",
            "" if probe.valid else "client was the bottleneck",
        )
        for probe in knee.probes
    ]
    return Table(
        title=f"Knee at attainment {slo.target:.4g}: {knee.description}",
        columns=("rate tried", "attainment", "promise", ""),
        rows=tuple(rows),
    )


def _classes_table(levels: Mapping[str, list[BenchmarkRun]], slo: SloObjectives) -> Table:
    """One row for each load and class, over its repeats together."""
    rows = []
    for level, runs in levels.items():
        by_class: dict[str, list[ClassMetrics]] = {}
        for run in runs:
            for class_ in run.metrics.classes:
                by_class.setdefault(class_.slo_class, []).append(class_)
        for name, class_metrics in by_class.items():
            requests = sum(class_metric.requests for class_metric in class_metrics)
            rows.append(
                (
                    level,
                    name,
                    format_number(requests),
                    format_percent(
                        sum(class_metric.met_requests for class_metric in class_metrics) / requests
                    )
                    if slo.has_objectives
                    else NO_VALUE,
                    format_number(
                        mean([class_metric.goodput_per_s for class_metric in class_metrics])
                    ),
                    format_seconds(mean([class_metric.ttft.p99 for class_metric in class_metrics])),
                    format_seconds(mean([class_metric.tpot.p99 for class_metric in class_metrics])),
                )
            )
    columns = ("load", "class", "requests", "attainment", "goodput/s", "TTFT p99", "TPOT p99")
    return Table(title="By class", columns=columns, rows=tuple(rows))


def _client_table(levels: Mapping[str, list[BenchmarkRun]]) -> Table:
    rows = []
    for level, runs in levels.items():
        client_metrics = [run.metrics.client for run in runs]
        rows.append(
            (
                level,
                format_number(sum(client_metric.late_sends for client_metric in client_metrics)),
                format_seconds(
                    max(client_metric.send_lateness.p99 for client_metric in client_metrics)
                ),
                format_seconds(
                    max(client_metric.send_lateness.maximum for client_metric in client_metrics)
                ),
                format_seconds(max(client_metric.loop_lag.p99 for client_metric in client_metrics)),
                format_percent(
                    max(client_metric.busy_fraction for client_metric in client_metrics)
                ),
                "no" if any(run.metrics.invalid_reasons for run in runs) else "yes",
            )
        )
    columns = ("load", "late sends", "late p99", "worst", "read late p99", "of a core", "valid")
    return Table(title="The client itself, worst of repeats", columns=columns, rows=tuple(rows))


def _count_row(
    label: str, levels: Mapping[str, list[BenchmarkRun]], figure: Callable[[BenchmarkMetrics], int]
) -> tuple[str, ...]:
    totals = (sum(figure(run.metrics) for run in runs) for runs in levels.values())
    return (label, *(format_number(total) for total in totals))


def _window_text(runs: Sequence[BenchmarkRun]) -> str:
    first = runs[0].metrics
    text = f"{format_seconds(first.window_start_s)} to {format_seconds(first.window_end_s)}"
    return f"{text}, {len(runs)} runs" if len(runs) > 1 else text


def _format_interval(
    interval: _ConfidenceInterval, format_value: Callable[[float | None], str]
) -> str:
    if interval.low is None or interval.high is None:
        return format_value(interval.mean)
    return f"{format_value(interval.mean)} ± {format_value((interval.high - interval.low) / 2)}"


def confidence_interval(values: Sequence[float]) -> _ConfidenceInterval:
    """The mean of independent runs' figures with Student's 95 % interval; nan for no values.

    Runs are taken to be independent and about normal. The requests of one run are not: they queue
    behind each other, so that an interval from within a run would be too narrow.
    """
    if not values:
        return _ConfidenceInterval(mean=math.nan, low=None, high=None, values=())
    mean = fmean(values)
    if len(values) < _MIN_VALUES or not all(map(math.isfinite, values)):
        return _ConfidenceInterval(mean=mean, low=None, high=None, values=tuple(values))
    degrees_of_freedom = len(values) - 1
    t = (
        _T_975[degrees_of_freedom - 1]
        if degrees_of_freedom <= len(_T_975)
        else _t_975(degrees_of_freedom)
    )
    half_width = t * stdev(values) / math.sqrt(len(values))
    return _ConfidenceInterval(
        mean=mean, low=mean - half_width, high=mean + half_width, values=tuple(values)
    )


def _t_975(degrees_of_freedom: int) -> float:
    """Near enough for more than 30 degrees of freedom: within 0.001.

    Source: Abramowitz and Stegun 26.7.5, two terms, with the normal quantile 1.960.
    """
    return 1.960 + 2.372 / degrees_of_freedom + 2.823 / degrees_of_freedom**2
