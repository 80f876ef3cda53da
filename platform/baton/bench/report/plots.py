"""The plots of a study, each drawn into its own figure or a part of a larger one.

Equal studies give equal bytes with one version of matplotlib, whose global state is not used.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from baton.bench.formatting import format_number, format_seconds
from baton.bench.report.study import RunResult, Study
from baton.bench.report.summary import (
    capacity,
    offered_rate,
    rate_curves_for,
    representative_results,
    run_span_s,
    scale_curves_for,
    tradeoffs_for,
)
from baton.bench.report.tables import format_objectives, format_target
from baton.domain.errors import OperatorError
from baton.domain.names.distribution import pip_install
from baton.simulator.outcome import Objectives, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

COLORS = ("#2563eb", "#ea580c", "#0d9488", "#9333ea", "#ca8a04", "#db2777", "#475569", "#65a30d")
"""Of runs, in order; distinguishable without red or green."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, FAINT, TARGET = "#1e293b", "#94a3b8", "#dc2626"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.9,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
_MINUTES_AXIS_FROM_S = 600.0
_MAX_LABELLED_POINTS = 12
_LOG_FROM = 5.0
"""Less between the ends of a logarithmic axis would leave it one tick, or none."""
"""With more points, none has a label."""
_MAX_POINTS = 500
_MAX_BINS = 60
_MIN_REQUESTS_PER_BIN = 20
_WIDTH_IN = 10.0
_HEAD_IN = 0.6
_LINE_IN = 0.165
_LINE_CHARS = 145
_DPI = 120


class PlotsMissing(OperatorError):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class _ArrivalBins:
    """Requests by arrival, in equal intervals from the first arrival on."""

    width_s: float
    arrivals_per_s: tuple[float, ...]
    attainment: tuple[float, ...]
    """The share that met the objectives; 1 without arrivals."""

    @property
    def edges_s(self) -> tuple[float, ...]:
        """The start of each interval, and the end of the last."""
        return tuple(number * self.width_s for number in range(len(self.attainment) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot."""

    title: str
    caption: str
    height_in: float
    draw: Callable[[FigureBase, Study], None]


def panels_for(study: Study) -> list[Panel]:
    """The plots for which this study has data."""
    panels = []
    if any(curve.points for curve in rate_curves_for(study)):
        panels.append(_BY_RATE)
    if scale_curves_for(study):
        panels.append(_BY_SCALE)
    if len(tradeoffs_for(study)) > 1:
        panels.append(_TRADEOFFS)
    if any(result.outcomes for result in representative_results(study)):
        panels += [_LATENCIES, _TIMELINE]
    return panels


# ------------------------------------------------------------------ attainment
def _by_rate(figure: FigureBase, study: Study) -> None:
    axes = figure.subplots()
    for number, curve in enumerate(rate_curves_for(study)):
        rates = [rate for rate, _ in curve.points]
        shares = [100 * met for _, met in curve.points]
        capacity_per_s = capacity(curve, study.target)
        label = (
            curve.name
            if capacity_per_s is None
            else f"{curve.name}: {format_number(capacity_per_s)}"
        )
        axes.plot(rates, shares, label=label, **_line_style(number))
        if capacity_per_s is not None and capacity_per_s < curve.points[-1][0]:
            axes.plot(
                [capacity_per_s, capacity_per_s],
                [0, 100 * study.target],
                color=_color(number),
                lw=0.9,
                ls=":",
            )
    _attainment_axis(axes, study)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"offered rate, requests/s/{study.device}")
    axes.legend(title=f"capacity, requests/s/{study.device}", loc="lower left")


def _by_scale(figure: FigureBase, study: Study) -> None:
    axes = figure.subplots()
    curves = scale_curves_for(study)
    for number, curve in enumerate(curves):
        shares = [100 * met for _, met in curve.points]
        axes.plot(
            [scale for scale, _ in curve.points], shares, label=curve.name, **_line_style(number)
        )
    _attainment_axis(axes, study)
    axes.axvline(1.0, color=FAINT, lw=1.0, ls="--")
    axes.set_xscale("log", base=2)
    scales = [scale for scale, _ in curves[0].points]
    axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axes.minorticks_off()
    axes.set_xlabel("objectives times (left: tighter)")
    axes.legend(loc="lower right")


def _attainment_axis(axes: Axes, study: Study) -> None:
    axes.axhline(100 * study.target, color=TARGET, lw=1.1, ls="--")
    axes.annotate(
        f"target {format_target(study)}",
        (1.0, 100 * study.target),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color=TARGET,
        fontsize=8.5,
    )
    axes.set_ylim(0, 104)
    axes.set_ylabel("requests within objectives, %")


# ------------------------------------------------------------------ trades
def _tradeoffs(figure: FigureBase, study: Study) -> None:
    axes = figure.subplots()
    tradeoffs = tradeoffs_for(study)
    for number, name in enumerate(dict.fromkeys(tradeoff.name for tradeoff in tradeoffs)):
        points = sorted(
            (tradeoff for tradeoff in tradeoffs if tradeoff.name == name),
            key=lambda point: point.user_tokens_per_s,
        )
        xs = [point.user_tokens_per_s for point in points]
        ys = [point.device_tokens_per_s for point in points]
        axes.plot(xs, ys, label=name, **_line_style(number) | {"alpha": 0.9})
        for point in points if len(tradeoffs) <= _MAX_LABELLED_POINTS else ():
            axes.annotate(
                point.label,
                (point.user_tokens_per_s, point.device_tokens_per_s),
                xytext=(-5, -10) if number % 2 else (5, 4),
                textcoords="offset points",
                ha="right" if number % 2 else "left",
                fontsize=8,
                color=_color(number),
            )
    pareto_front = [tradeoff for tradeoff in tradeoffs if tradeoff.is_pareto_optimal]
    axes.plot(
        [tradeoff.user_tokens_per_s for tradeoff in pareto_front],
        [tradeoff.device_tokens_per_s for tradeoff in pareto_front],
        ls="none",
        marker="o",
        ms=11,
        mfc="none",
        mec=INK,
        label="nothing is better in both" if pareto_front else None,
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("output tokens/s/user (1 / TPOT p50)")
    axes.set_ylabel(f"output tokens/s/{study.device}")
    axes.legend(loc="best")


# ------------------------------------------------------------------ latencies
def _latencies(figure: FigureBase, study: Study) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for number, run in enumerate(representative_results(study)):
        request_count = len(run.outcomes)
        ttfts = [each.ttft_s for each in run.outcomes if each.output_tokens]
        tpots = [each.tpot_s for each in run.outcomes if each.output_tokens > 1]
        for axes, values, total in ((left, ttfts, request_count), (right, tpots, len(tpots))):
            values_s, share = cumulative_distribution(values, total)
            axes.plot(
                values_s, [100 * each for each in share], label=run.name, color=_color(number)
            )
            if values_s and values_s[0] > 0:
                axes.set_xscale("log")
    _latency_axis(left, "time to first token (TTFT)", study.objectives.ttft_s)
    _latency_axis(right, "time per output token (TPOT)", study.objectives.tpot_s)
    left.set_ylabel("requests, %")
    left.set_ylim(0, 102)
    left.set_title(_rate_caption(study), fontsize=9, fontweight="normal")
    if len(representative_results(study)) > 1:
        _legend_above(right)


def _latency_axis(axes: Axes, label: str, limit_s: float | None) -> None:
    _seconds_axis(axes)
    axes.set_xlabel(label)
    if limit_s is not None:
        axes.axvline(limit_s, color=TARGET, lw=1.1, ls="--")
        axes.annotate(
            f" SLO {format_seconds(limit_s)}",
            (limit_s, 2),
            color=TARGET,
            fontsize=8.5,
            rotation=90,
            ha="right",
            va="bottom",
        )


def _seconds_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    if axes.get_xscale() == "log" and high / low < _LOG_FROM:
        axes.set_xscale("linear")
        axes.locator_params(axis="x", nbins=6)
    elif axes.get_xscale() == "log":
        is_narrow = high / low < 30  # noqa: PLR2004 - within 1.5 decades, whole ones are too few ticks
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_narrow else (1.0,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))


# ------------------------------------------------------------------ timeline
def _timeline(figure: FigureBase, study: Study) -> None:
    results = representative_results(study)
    span_s = max(run_span_s(result.outcomes) for result in results)
    unit_s, unit = (60.0, "min") if span_s >= _MINUTES_AXIS_FROM_S else (1.0, "s")
    rows: list[Callable[[Axes], None]] = [
        lambda axes: _arrivals(axes, results[0], study, unit_s),
        lambda axes: _queues(axes, results, span_s, unit_s),
        lambda axes: _attainment(axes, results, study, unit_s),
    ]
    if results[0].samples:
        rows.insert(1, lambda axes: _replicas(axes, results[0], unit_s))
    row_axes = figure.subplots(len(rows), 1, sharex=True)
    for draw, axes in zip(rows, row_axes, strict=True):
        draw(axes)
    row_axes[0].set_title(_rate_caption(study), fontsize=9, fontweight="normal")
    row_axes[-1].set_xlim(0, span_s / unit_s)
    row_axes[-1].set_xlabel(f"time since the first arrival, {unit}")


def _arrivals(axes: Axes, result: RunResult, study: Study, unit_s: float) -> None:
    bins = bin_by_arrival(result.outcomes, study.objectives)
    edges = [edge / unit_s for edge in bins.edges_s]
    axes.stairs(bins.arrivals_per_s, edges, fill=True, color="#cbd5e1")
    axes.set_ylabel("arrivals,\nrequests/s")
    axes.set_ylim(bottom=0)


def _replicas(axes: Axes, result: RunResult, unit_s: float) -> None:
    pools = list(dict.fromkeys(name for moment in result.samples for name in moment.replicas))
    times = [moment.at_s / unit_s for moment in result.samples]
    counts = [[moment.replicas.get(pool, 0) for moment in result.samples] for pool in pools]
    colors = [_color(number + 2) for number in range(len(pools))]
    axes.stackplot(times, *counts, labels=pools, colors=colors, alpha=0.55, step="post")
    axes.set_ylim(0, 1.1 * max(1, *(sum(column) for column in zip(*counts, strict=True))))
    axes.set_ylabel("replicas\nin service")
    _legend_above(axes)


def _queues(axes: Axes, results: Sequence[RunResult], length_s: float, unit_s: float) -> None:
    for number, run in enumerate(results):
        lines: list[tuple[str, list[int], str]]
        if run.samples:
            times_s = [moment.at_s for moment in run.samples]
            running = [moment.running for moment in run.samples]
            queued = [moment.queued for moment in run.samples]
            lines = [("queued", queued, "-"), ("running", running, ":")]
        else:
            times_s = [length_s * step / 300 for step in range(301)]
            lines = [("in flight", count_in_flight(run.outcomes, times_s), "-")]
        for series, values, dashes in lines:
            label = series if len(results) == 1 else f"{run.name}, {series}"
            times = [time_s / unit_s for time_s in times_s]
            axes.plot(times, values, label=label, color=_color(number), lw=1.3, ls=dashes)
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    _legend_above(axes)


def _attainment(axes: Axes, results: Sequence[RunResult], study: Study, unit_s: float) -> None:
    for number, run in enumerate(results):
        bins = bin_by_arrival(run.outcomes, study.objectives)
        edges = [edge / unit_s for edge in bins.edges_s]
        axes.stairs(
            [100 * share for share in bins.attainment],
            edges,
            baseline=None,
            color=_color(number),
            lw=1.4,
            label=run.name,
        )
    if study.has_objectives:
        axes.axhline(100 * study.target, color=TARGET, lw=1.0, ls="--")
    axes.set_ylim(0, 104)
    axes.set_ylabel("within\nobjectives, %" if study.has_objectives else "finished, %")
    if len(results) > 1:
        _legend_above(axes)


# ------------------------------------------------------------------ in common
def _rate_caption(study: Study) -> str:
    results = representative_results(study)
    if len(study.results) == len(results):
        return ""
    return f"at {format_number(offered_rate(results[0]))} requests/s"


def _legend_above(axes: Axes) -> None:
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.97),
        ncols=len(axes.get_legend_handles_labels()[1]),
        fontsize=8,
        borderaxespad=0.0,
    )


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _line_style(number: int) -> dict[str, Any]:
    return {"color": _color(number), "marker": MARKERS[number % len(MARKERS)]}


_BY_RATE = Panel(
    title="Attainment against rate",
    caption="Share of arrived requests that met all objectives, by offered rate per device.",
    height_in=3.6,
    draw=_by_rate,
)
_BY_SCALE = Panel(
    title="Attainment against SLO scale",
    caption="Objectives that are tighter (left) or looser (right), all times the same factor.",
    height_in=3.3,
    draw=_by_scale,
)
_TRADEOFFS = Panel(
    title="Throughput against interactivity",
    caption="What devices give against what each user gets; up and right is better.",
    height_in=3.8,
    draw=_tradeoffs,
)
_LATENCIES = Panel(
    title="Latencies",
    caption="Share of requests at or below; TTFT counts requests without a token as never.",
    height_in=3.3,
    draw=_latencies,
)
_TIMELINE = Panel(
    title="Timeline",
    caption="By time of arrival; rates and attainment are averages over each stretch.",
    height_in=6.2,
    draw=_timeline,
)


def cumulative_distribution(values: Sequence[float], total: int) -> tuple[list[float], list[float]]:
    """Sorted values, and the share of all `total` requests at or below each.

    Infinite values count without a point, so that the curve ends below 1.
    """
    ordered = sorted(value for value in values if value < float("inf"))
    if not ordered:
        return [], []
    last = len(ordered) - 1
    all_indices = range(len(ordered))
    if len(ordered) > _MAX_POINTS:
        indices = [round(step * last / (_MAX_POINTS - 1)) for step in range(_MAX_POINTS)]
    else:
        indices = list(all_indices)
    return [ordered[at] for at in indices], [(at + 1) / total for at in indices]


def bin_by_arrival(outcomes: Sequence[Outcome], objectives: Objectives) -> _ArrivalBins:
    """Arrivals by time, and the share of each interval that met the objectives."""
    if not outcomes:
        return _ArrivalBins(1.0, (), ())
    start_s = min(outcome.arrived_at_s for outcome in outcomes)
    span_s = max(outcome.arrived_at_s for outcome in outcomes) - start_s
    count = max(1, min(_MAX_BINS, len(outcomes) // _MIN_REQUESTS_PER_BIN))
    width_s = span_s / count or 1.0
    arrived, met = [0] * count, [0] * count
    for outcome in outcomes:
        index = min(count - 1, int((outcome.arrived_at_s - start_s) / width_s))
        arrived[index] += 1
        met[index] += objectives.are_met(outcome)
    shares = [good / many if many else 1.0 for good, many in zip(met, arrived, strict=True)]
    return _ArrivalBins(width_s, tuple(many / width_s for many in arrived), tuple(shares))


def count_in_flight(outcomes: Sequence[Outcome], times_s: Sequence[float]) -> list[int]:
    """Requests in flight at each time since the first arrival.

    Requests without an end are not counted.
    """
    if not outcomes:
        return [0 for _ in times_s]
    start_s = min(outcome.arrived_at_s for outcome in outcomes)
    ended = [outcome for outcome in outcomes if outcome.e2e_s < float("inf")]
    arrivals = sorted(outcome.arrived_at_s - start_s for outcome in ended)
    ends = sorted(outcome.arrived_at_s - start_s + outcome.e2e_s for outcome in ended)
    return [bisect_right(arrivals, at_s) - bisect_right(ends, at_s) for at_s in times_s]


def render_panels(study: Study) -> list[tuple[Panel, bytes]]:
    """Each plot as a PNG.

    Raises:
        PlotsMissing: matplotlib is not installed.
    """
    require_plots()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    images = []
    with rc_context(STYLE):
        for panel in panels_for(study):
            figure = Figure(figsize=(_WIDTH_IN, panel.height_in), layout="constrained")
            panel.draw(figure, study)
            images.append((panel, _to_png(figure)))
    return images


def render_sheet(study: Study) -> bytes:
    """All plots below each other as one PNG, with title and origin.

    Raises:
        PlotsMissing: matplotlib is not installed.
    """
    require_plots()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels, origin = panels_for(study), _provenance_lines(study)
    head_in = _HEAD_IN + _LINE_IN * len(origin)
    heights = [head_in, *(panel.height_in + 0.45 for panel in panels)]
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH_IN, sum(heights)), layout="constrained")
        head, *parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[
            :, 0
        ]
        head.text(0.01, 1 - 0.15 / head_in, study.title, fontsize=15, fontweight="bold", va="top")
        origin_y = 1 - 0.5 / head_in
        head.text(0.01, origin_y, "\n".join(origin), fontsize=8.5, va="top", color="#475569")
        for panel, part in zip(panels, parts, strict=True):
            part.suptitle(
                f"{panel.title} ({study.evidence.mark})", x=0.01, ha="left", fontweight="bold"
            )
            panel.draw(part, study)
        return _to_png(figure)


def _provenance_lines(study: Study) -> list[str]:
    """The origin of the figures, in lines that fit the sheet."""
    lines = [
        f"({study.evidence.mark}) {study.evidence} · objectives: {format_objectives(study)}",
        *(f"{name}: {value}" for name, value in study.facts.items()),
        f"$ {study.command}",
    ]
    return [part for line in lines for part in wrap(line, _LINE_CHARS)]


def _to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the name and version of matplotlib.
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def require_plots() -> None:
    """Check that plots can be drawn.

    Raises:
        PlotsMissing: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlotsMissing(
            "plots need the package 'matplotlib', which is not installed",
            f"run {pip_install('report')}, or leave out --report",
        ) from error
