"""A study as tables of text, for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from baton.bench.formatting import NO_VALUE, format_number, format_percent, format_seconds
from baton.bench.report.study import ScalingSummary, Study, Table
from baton.bench.report.summary import (
    LatencyQuantiles,
    RunSummary,
    attainment_by_class,
    capacity,
    rate_curves_for,
    representative_results,
    scale_curves_for,
    summarize,
)

_WIDTH_CHARS = 200
"""For output that is no terminal: no line is broken."""


def tables_of(study: Study) -> tuple[Table, ...]:
    """All tables of a study, the most important first."""
    tables = list(study.tables)
    if not study.has_result_tables:
        return tuple(tables)
    if study.results:
        tables.append(_summary_table(study))
        tables += _class_tables(study)
    if len(study.results) > len(representative_results(study)):
        tables.append(_rate_table(study))
    if any(curve.points for curve in rate_curves_for(study)):
        tables.append(_capacity_table(study))
    if scale_curves_for(study):
        tables.append(_scale_table(study))
    return tuple(tables)


def format_objectives(study: Study) -> str:
    """The objectives in a line, as `TTFT ≤ 500 ms, TPOT ≤ 30 ms for 90 % of requests`."""
    named_limits = (
        ("TTFT", study.objectives.ttft_s),
        ("TPOT", study.objectives.tpot_s),
        ("E2E", study.objectives.e2e_s),
    )
    limits = [
        f"{name} ≤ {format_seconds(limit)}" for name, limit in named_limits if limit is not None
    ]
    if not limits:
        return "none"
    return f"{', '.join(limits)} for {format_target(study)} of requests"


def format_target(study: Study) -> str:
    """The target as given: `90 %`, `99.9 %`."""
    return f"{100 * study.target:.6g} %"


def _summary_table(study: Study) -> Table:
    summaries = [summarize(result, study.objectives) for result in representative_results(study)]
    rows = [
        (label, *(text(summary) for summary in summaries)) for label, text in _summary_lines(study)
    ]
    title = "Figures"
    if len(study.results) > len(summaries):
        title += f" at {format_number(summaries[0].rate_per_s)} requests/s"
    return Table(
        title=title, columns=("", *(summary.name for summary in summaries)), rows=tuple(rows)
    )


_Line = tuple[str, Callable[[RunSummary], str]]


def _summary_lines(study: Study) -> list[_Line]:
    lines: list[_Line] = [
        ("requests", lambda summary: format_number(summary.requests)),
        ("failed", lambda summary: format_number(summary.failed)),
        ("rate, requests/s", lambda summary: format_number(summary.rate_per_s)),
        ("TTFT p50 / p90 / p99", lambda summary: _quantiles_text(summary.ttft)),
        ("TPOT p50 / p90 / p99", lambda summary: _quantiles_text(summary.tpot)),
        ("worst gap p50 / p90 / p99", lambda summary: _quantiles_text(summary.max_itl)),
        ("end to end p50 / p90 / p99", lambda summary: _quantiles_text(summary.e2e)),
    ]
    if study.has_objectives:
        lines += [
            ("attainment", lambda summary: format_percent(summary.attainment)),
            (
                "  of TTFT alone / TPOT alone",
                lambda summary: _single_objective_text(study, summary),
            ),
            ("goodput, requests/s", lambda summary: format_number(summary.goodput_per_s)),
            (
                f"goodput, requests/s/{study.device}",
                lambda summary: format_number(summary.goodput_per_device),
            ),
        ]
    return [
        *lines,
        ("output tokens/s", lambda summary: format_number(summary.output_tokens_per_s)),
        (
            f"output tokens/s/{study.device}",
            lambda summary: format_number(summary.output_tokens_per_device),
        ),
        ("all tokens/s", lambda summary: format_number(summary.total_tokens_per_s)),
        ("prompt tokens cached", lambda summary: format_percent(summary.cached_fraction)),
        (f"{study.device}s", lambda summary: format_number(summary.devices)),
        *_scaling_lines(study),
        *_count_lines(study),
    ]


def _scaling_lines(study: Study) -> list[_Line]:
    scaling_by_name = {result.name: result.scaling for result in representative_results(study)}
    if not any(scaling_by_name.values()):
        return []

    def line(label: str, figure: Callable[[ScalingSummary], float]) -> _Line:
        def text(summary: RunSummary) -> str:
            scaling = scaling_by_name[summary.name]
            return NO_VALUE if scaling is None else format_number(figure(scaling))

        return label, text

    return [
        line(f"{study.device}-hours", lambda summary: summary.device_hours),
        line("scaling actions/h", lambda summary: summary.actions_per_hour),
        line("  that undo the last", lambda summary: summary.reversals_per_hour),
    ]


def _class_tables(study: Study) -> list[Table]:
    shares_by_run = {
        result.name: {
            (share.slo_class, share.tenant): share for share in attainment_by_class(result)
        }
        for result in representative_results(study)
    }
    keys = sorted({key for shares in shares_by_run.values() for key in shares})
    if len(keys) <= 1:
        return []
    rows = []
    for key in keys:
        by_run = [shares.get(key) for shares in shares_by_run.values()]
        requests = next(attainment.requests for attainment in by_run if attainment is not None)
        attainments = (
            NO_VALUE if attainment is None else format_percent(attainment.attainment)
            for attainment in by_run
        )
        rows.append((*key, format_number(requests), *attainments))
    columns = ("class", "tenant", "requests", *shares_by_run)
    return [Table(title="Attainment by class and tenant", columns=columns, rows=tuple(rows))]


def _count_lines(study: Study) -> list[_Line]:
    counts = {result.name: result.event_counts for result in representative_results(study)}
    names = dict.fromkeys(name for count in counts.values() for name in count)
    return [
        (name, lambda summary, name=name: format_number(counts[summary.name].get(name, 0)))  # type: ignore[misc]
        for name in names
    ]


def _rate_table(study: Study) -> Table:
    columns = (
        *("", "requests/s", f"/{study.device}", "failed", "TTFT p50", "p99", "TPOT p50", "p99"),
        *(("attainment", f"goodput/s/{study.device}") if study.has_objectives else ()),
        f"tokens/s/{study.device}",
    )
    rows = []
    names = list(dict.fromkeys(result.name for result in study.results))
    summaries = [summarize(result, study.objectives) for result in study.results]
    for summary in sorted(
        summaries, key=lambda summary: (names.index(summary.name), summary.rate_per_s)
    ):
        met = (format_percent(summary.attainment), format_number(summary.goodput_per_device))
        rows.append(
            (
                *(
                    summary.name,
                    format_number(summary.rate_per_s),
                    format_number(summary.rate_per_device),
                ),
                format_number(summary.failed),
                *(format_seconds(summary.ttft.p50), format_seconds(summary.ttft.p99)),
                *(format_seconds(summary.tpot.p50), format_seconds(summary.tpot.p99)),
                *(met if study.has_objectives else ()),
                format_number(summary.output_tokens_per_device),
            )
        )
    return Table(title="By rate", columns=columns, rows=tuple(rows))


def _capacity_table(study: Study) -> Table:
    rows = []
    for curve in rate_curves_for(study):
        capacity_per_s = capacity(curve, study.target)
        if capacity_per_s is None:
            first = curve.points[0][0] if curve.points else 0.0
            text = f"{NO_VALUE} (less than {format_number(first)}, the lowest rate tried)"
        elif capacity_per_s == curve.points[-1][0]:
            text = f"at least {format_number(capacity_per_s)} (the highest rate tried)"
        else:
            text = format_number(capacity_per_s)
        rows.append((curve.name, text))
    return Table(
        title=f"Capacity: the highest rate at which {format_target(study)} meet the objectives",
        columns=("", f"requests/s/{study.device}"),
        rows=tuple(rows),
    )


def _scale_table(study: Study) -> Table:
    """A row for each name; curves of a study have the same scales."""
    curves = scale_curves_for(study)
    method = (
        "a run for each" if study.scale_curves else "the same run, evaluated at objectives times"
    )
    return Table(
        title=f"Attainment by SLO scale: {method}",
        columns=("", *(f"{scale:g}" for scale, _ in curves[0].points)),
        rows=tuple(
            (curve.name, *(format_percent(met) for _, met in curve.points)) for curve in curves
        ),
    )


def _quantiles_text(quantiles: LatencyQuantiles) -> str:
    texts = (format_seconds(value) for value in (quantiles.p50, quantiles.p90, quantiles.p99))
    return " / ".join(texts)


def _single_objective_text(study: Study, summary: RunSummary) -> str:
    pairs = (
        (study.objectives.ttft_s, summary.ttft_attainment),
        (study.objectives.tpot_s, summary.tpot_attainment),
    )
    return " / ".join(NO_VALUE if limit is None else format_percent(met) for limit, met in pairs)


def print_study(study: Study, file: TextIO) -> None:
    """Print the study as tables, coloured on a terminal."""
    import rich.table  # here: keeps --help fast
    from rich.console import Console
    from rich.text import Text

    console = Console(
        file=file,
        width=None if file.isatty() else _WIDTH_CHARS,
        highlight=False,
        emoji=False,
        markup=False,
    )
    console.print(Text(study.title, style="bold"))
    facts = {"figures": f"({study.evidence.mark}) {study.evidence}"} | dict(study.facts)
    for name, value in (facts | {"objectives": format_objectives(study)}).items():
        console.print(Text(f"{name}: ", style="dim") + Text(value))
    for table in tables_of(study):
        rich_table = rich.table.Table(box=None, pad_edge=False, header_style="dim")
        for number, column in enumerate(table.columns):
            rich_table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in table.rows:
            rich_table.add_row(*row)
        console.print()
        console.print(Text(f"{table.title} ({study.evidence.mark})", style="bold"))
        console.print(rich_table)
    console.print()
    for note in study.notes:
        console.print(Text(f"note: {note}", style="dim"))
