"""Results of a benchmark, as a JSON document and as a study with tables and plots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev

from baton.bench.findings.campaign import BenchmarkResult, BenchmarkRun
from baton.bench.findings.metrics import BenchmarkMetrics, ClassMetrics, Distribution, SloObjectives
from baton.bench.formatting import NO_VALUE, format_number, format_percent, format_seconds
from baton.bench.report.json_report import json_safe
from baton.bench.report.study import Curve, Evidence, RunResult, Study, Table
from baton.domain.names.words import count_text
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.simulator.outcome import Objectives, mean

SCHEMA_VERSION = 1
"""Rises when a key changes its meaning or goes away."""
DEFINITIONS = (
    "TTFT: from when a request was due to its first token. End to end: from then to its last"
    " token. A request that was sent late has waited, as its user would have; `vllm bench serve`"
    " counts from when it was sent, as do the lines 'from send'.",
    "TPOT: (last token - first token) / (output tokens - 1), per request, over requests with two"
    " tokens and more; output tokens as the endpoint counted them. ITL: the gaps between pieces of"
    " an answer, of all answers together; a piece may be several tokens. As in `vllm bench serve`.",
    "Quantiles are over requests that finished. Attainment: the share of all measured requests"
    " that finished and met all objectives; goodput: such requests per second. Both count failed"
    " requests as misses.",
    "Rates per second are over the measured window, from when its first request was due to the end"
    " of its last answer. `vllm bench serve` counts from the start of its run, one gap earlier.",
    "Of a chat, a message that only names the role, or only ends the answer, is no token;"
    " `vllm bench serve` takes the former for the first.",
    "± is half of Student's 95 % interval of the mean over repeats; one run alone has none.",
)
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
_MAX_COLUMNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConfidenceInterval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float | None
    """None with a single value."""
    high: float | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BenchmarkContext:
    """Facts of a benchmark outside its runs."""

    title: str
    command: str
    endpoint: str
    model: str
    load: Mapping[str, object]
    provenance: Mapping[str, object]
    slo: SloObjectives
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------ one document
def build_document(result: BenchmarkResult, context: BenchmarkContext) -> dict[str, object]:
    """All results without single requests; numbers that are not finite are null."""
    slo = context.slo
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "valid": not result.invalid_reasons and bool(result.runs),
        "why_invalid": list(result.invalid_reasons),
        "partial": result.is_partial,
        "provenance": {
            "evidence": "measured",
            "command": context.command,
            "endpoint": context.endpoint,
            "model": context.model,
            **context.provenance,
        },
        "load": dict(context.load),
        "objectives": {
            "target": slo.target,
            "classes": {name: asdict(objectives) for name, objectives in slo.objectives.items()},
        },
        "levels": [
            {
                "level": level,
                "rate_per_s": runs[0].rate_per_s,
                "streams": runs[0].concurrency,
                "repeats": len(runs),
                "figures": {
                    name: asdict(interval)
                    for name, interval in _intervals_over_repeats(runs).items()
                },
            }
            for level, runs in result.runs_by_load().items()
        ],
        "knee": None if result.knee is None else asdict(result.knee),
        "runs": [
            {
                "level": run.load_label,
                "rate_per_s": run.rate_per_s,
                "streams": run.concurrency,
                "repeat": run.repeat,
                "window_s": run.metrics.window_s,
                **asdict(run.metrics),
            }
            for run in result.runs
        ],
        "definitions": list(DEFINITIONS),
        "notes": [*context.notes, *_notes(result)],
    }
    return {key: json_safe(value) for key, value in document.items()}


def request_lines(result: BenchmarkResult) -> Iterable[dict[str, object]]:
    """Every measured request, one object each, with only the longest gap."""
    for run in result.runs:
        for sample in run.samples:
            yield {
                "level": run.load_label,
                "repeat": run.repeat,
                "number": sample.request_index,
                "due_s": sample.due_s,
                "late_s": sample.send_delay_s,
                "ttft_s": json_safe(sample.ttft_s),
                "tpot_s": sample.tpot_s,
                "e2e_s": sample.e2e_s,
                "worst_gap_s": max(sample.gaps_s, default=0.0),
                "prompt_tokens": sample.prompt_tokens,
                "cached_tokens": sample.cached_tokens,
                "output_tokens": sample.output_tokens,
                "slo_class": sample.slo_class,
                "ok": sample.ok,
                "failure": sample.failure,
            }


# ------------------------------------------------------------------ tables and plots
def build_study(result: BenchmarkResult, context: BenchmarkContext) -> Study:
    """The same as a study."""
    slo = context.slo
    levels = result.runs_by_load()
    has_default_class_only = set(slo.objectives) <= {DEFAULT_CLASS}
    curve = Curve(
        name=context.model,
        points=tuple(
            (runs[0].rate_per_s, mean([run.metrics.attainment for run in runs]))
            for runs in levels.values()
            if runs[0].rate_per_s is not None
        ),
    )
    return Study(
        title=context.title,
        evidence=Evidence.MEASURED,
        command=context.command,
        facts=_facts(result, context),
        notes=(*context.notes, *_notes(result)),
        objectives=slo.objectives.get(DEFAULT_CLASS, Objectives())
        if has_default_class_only
        else Objectives(),
        target=slo.target,
        device="endpoint",
        results=tuple(
            RunResult(
                name=context.model if runs[0].concurrency is None else level,
                outcomes=[
                    sample.to_outcome(runs[0].metrics.window_start_s) for sample in runs[0].samples
                ],
                devices=1,
                offered_per_s=runs[0].rate_per_s,
            )
            for level, runs in levels.items()
        ),
        rate_curves=(curve,) if slo.has_objectives and len(curve.points) > 1 else (),
        tables=tuple(_tables_of(result, slo)),
        has_result_tables=False,
        definitions=DEFINITIONS,
    )


def _facts(result: BenchmarkResult, context: BenchmarkContext) -> dict[str, str]:
    validity = (
        "yes" if not result.invalid_reasons else "NO: " + "; ".join(result.invalid_reasons[:3])
    )
    facts = {
        "valid": validity,
        "endpoint": context.endpoint,
        "model": context.model,
        **{name: str(value) for name, value in context.load.items() if value is not None},
    }
    if result.is_partial:
        facts = {"partial": "stopped before its end: what had ended by then"} | facts
    return facts


def _notes(result: BenchmarkResult) -> Iterable[str]:
    """Facts that a reader needs to interpret the figures."""
    metrics = [run.metrics for run in result.runs]
    yield from _counted_notes(metrics)
    cached, prompts = (
        sum(metric.cached_tokens for metric in metrics),
        sum(metric.prompt_tokens for metric in metrics),
    )
    if cached and prompts:
        yield (
            f"{format_percent(cached / prompts)} of the prompts' tokens were cached, the endpoint"
            " says; another --seed makes other prompts."
        )
    tail_fractions = [
        1
        - (max(sample.due_s for sample in run.samples) - run.metrics.window_start_s)
        / run.metrics.window_s
        for run in result.runs
        if run.samples and run.metrics.window_s and run.concurrency is None
    ]
    if max(tail_fractions, default=0.0) > _LONG_TAIL_FRACTION:
        yield (
            f"Up to {max(tail_fractions):.0%} of a run's window is after its last request was due:"
            " rates per second are means over all of it; a longer run has higher ones."
        )


def _counted_notes(metrics: Sequence[BenchmarkMetrics]) -> Iterable[str]:
    """How many requests, prompts and answers were not as the load says."""
    counted_notes = (
        (
            sum(metric.unfinished for metric in metrics),
            "request was",
            "requests were",
            "left when the run was stopped.",
        ),
        (
            sum(metric.dropped_turns for metric in metrics),
            "turn was",
            "turns were",
            "not asked: an earlier one failed.",
        ),
        (
            sum(metric.truncated_prompts for metric in metrics),
            "prompt was",
            "prompts were",
            "cut to what the endpoint takes.",
        ),
        (
            sum(metric.skipped_too_long for metric in metrics),
            "request was",
            "requests were",
            "left out: the output is too long.",
        ),
        (
            sum(metric.short_answers for metric in metrics),
            "answer",
            "answers",
            "ended before the asked length.",
        ),
        (
            sum(metric.prompt_length_mismatches for metric in metrics),
            "prompt",
            "prompts",
            "had, as the endpoint counts, another length than was asked for.",
        ),
    )
    yield from (
        f"{count_text(number, singular, plural)} {what}"
        for number, singular, plural, what in counted_notes
        if number
    )


_LONG_TAIL_FRACTION = 0.2


def _intervals_over_repeats(runs: Sequence[BenchmarkRun]) -> dict[str, _ConfidenceInterval]:
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


def _tables_of(result: BenchmarkResult, slo: SloObjectives) -> Iterable[Table]:
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
        rows = tuple((reason, format_number(count)) for reason, count in failures.most_common(10))
        yield Table(title="Failures", columns=("reason", "requests"), rows=rows)


def _levels_to_show(
    levels: Mapping[str, list[BenchmarkRun]], result: BenchmarkResult
) -> dict[str, list[BenchmarkRun]]:
    """The loads with full figures: up to `_MAX_COLUMNS`, else those around the knee."""
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
    columns = {level: _intervals_over_repeats(runs) for level, runs in levels.items()}
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
        intervals = _intervals_over_repeats(runs)
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
            "met" if probe.valid and probe.attainment >= slo.target else "missed",
            "" if probe.valid else "client was the bottleneck",
        )
        for probe in knee.probes
    ]
    return Table(
        title=f"Knee at attainment {slo.target:.4g}: {knee.description}",
        columns=("rate tried", "attainment", "SLO", ""),
        rows=tuple(rows),
    )


def _classes_table(levels: Mapping[str, list[BenchmarkRun]], slo: SloObjectives) -> Table:
    """A row for each load and class, over its repeats."""
    rows = []
    for level, runs in levels.items():
        by_class: dict[str, list[ClassMetrics]] = {}
        for run in runs:
            for class_ in run.metrics.classes:
                by_class.setdefault(class_.slo_class, []).append(class_)
        for name, class_metrics in by_class.items():
            requests = sum(metrics.requests for metrics in class_metrics)
            rows.append(
                (
                    level,
                    name,
                    format_number(requests),
                    format_percent(
                        sum(metrics.met_requests for metrics in class_metrics) / requests
                    )
                    if slo.has_objectives
                    else NO_VALUE,
                    format_number(mean([metrics.goodput_per_s for metrics in class_metrics])),
                    format_seconds(mean([metrics.ttft.p99 for metrics in class_metrics])),
                    format_seconds(mean([metrics.tpot.p99 for metrics in class_metrics])),
                )
            )
    columns = ("load", "class", "requests", "attainment", "goodput/s", "TTFT p99", "TPOT p99")
    return Table(title="By class", columns=columns, rows=tuple(rows))


def _client_table(levels: Mapping[str, list[BenchmarkRun]]) -> Table:
    rows = []
    for level, runs in levels.items():
        clients = [run.metrics.client for run in runs]
        rows.append(
            (
                level,
                format_number(sum(client.late_sends for client in clients)),
                format_seconds(max(client.send_lateness.p99 for client in clients)),
                format_seconds(max(client.send_lateness.maximum for client in clients)),
                format_seconds(max(client.loop_lag.p99 for client in clients)),
                format_percent(max(client.busy_fraction for client in clients)),
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
    """The mean of independent runs with Student's 95 % interval; nan without values.

    Runs are assumed independent and about normal. Requests of one run are not: they queue behind
    each other, so an interval within a run would be too narrow.
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
    """Student's quantile, within 0.001 for more than 30 degrees of freedom.

    Source: Abramowitz and Stegun 26.7.5, two terms, with the normal quantile 1.960.
    """
    return 1.960 + 2.372 / degrees_of_freedom + 2.823 / degrees_of_freedom**2
