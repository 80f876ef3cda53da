"""The plots of a study, each drawn into a figure of its own or a part of a larger one.

Nothing of matplotlib's global state is used, and nothing but the study is drawn: the same study
gives the same bytes with the same matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.bench.formatting import number_text, seconds_text
from baton.bench.report.series import cumulated, in_bins, in_flight
from baton.bench.report.study import Result, Study
from baton.bench.report.summary import (
    capacity,
    curves_of,
    rate_of,
    scales_of,
    shown,
    span,
    trades_of,
)
from baton.bench.report.tables import target_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

COLORS = ("#2563eb", "#ea580c", "#0d9488", "#9333ea", "#ca8a04", "#db2777", "#475569", "#65a30d")
"""Of the runs, in order; told apart also without red or green."""
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

_MINUTES_FROM_S = 600.0
_FEW = 12
"""Points that may each bear a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot."""

    title: str
    says: str
    """What is to be seen, in a sentence."""
    height_in: float
    draw: Callable[[FigureBase, Study], None]


def panels_of(study: Study) -> list[Panel]:
    """The plots that this study has something for."""
    panels = []
    if any(curve.points for curve in curves_of(study)):
        panels.append(_BY_RATE)
    if scales_of(study):
        panels.append(_BY_SCALE)
    if len(trades_of(study)) > 1:
        panels.append(_TRADES)
    if any(one.outcomes for one in shown(study)):
        panels += [_LATENCIES, _TIMELINE]
    return panels


# ------------------------------------------------------------------ attainment
def _by_rate(figure: FigureBase, study: Study) -> None:
    axes = figure.subplots()
    for number, curve in enumerate(curves_of(study)):
        rates = [rate for rate, _ in curve.points]
        shares = [100 * met for _, met in curve.points]
        most = capacity(curve, study.target)
        label = curve.name if most is None else f"{curve.name}: {number_text(most)}"
        axes.plot(rates, shares, label=label, **_line(number))
        if most is not None and most < curve.points[-1][0]:
            axes.plot([most, most], [0, 100 * study.target], color=_color(number), lw=0.9, ls=":")
    _percent(axes, study)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"offered rate, requests/s/{study.device}")
    axes.legend(title=f"capacity, requests/s/{study.device}", loc="lower left")


def _by_scale(figure: FigureBase, study: Study) -> None:
    axes = figure.subplots()
    curves = scales_of(study)
    for number, curve in enumerate(curves):
        shares = [100 * met for _, met in curve.points]
        axes.plot([scale for scale, _ in curve.points], shares, label=curve.name, **_line(number))
    _percent(axes, study)
    axes.axvline(1.0, color=FAINT, lw=1.0, ls="--")
    axes.set_xscale("log", base=2)
    scales = [scale for scale, _ in curves[0].points]
    axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axes.minorticks_off()
    axes.set_xlabel("objectives times (left: tighter)")
    axes.legend(loc="lower right")


def _percent(axes: Axes, study: Study) -> None:
    axes.axhline(100 * study.target, color=TARGET, lw=1.1, ls="--")
    axes.annotate(
        f"target {target_text(study)}",
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
def _trades(figure: FigureBase, study: Study) -> None:
    axes = figure.subplots()
    trades = trades_of(study)
    for number, name in enumerate(dict.fromkeys(one.name for one in trades)):
        mine = sorted(
            (one for one in trades if one.name == name), key=lambda one: one.user_tokens_per_s
        )
        across = [one.user_tokens_per_s for one in mine]
        up = [one.device_tokens_per_s for one in mine]
        axes.plot(across, up, label=name, **_line(number) | {"alpha": 0.9})
        for one in mine if len(trades) <= _FEW else ():
            axes.annotate(
                one.label,
                (one.user_tokens_per_s, one.device_tokens_per_s),
                xytext=(-5, -10) if number % 2 else (5, 4),
                textcoords="offset points",
                ha="right" if number % 2 else "left",
                fontsize=8,
                color=_color(number),
            )
    best = [one for one in trades if one.best]
    axes.plot(
        [one.user_tokens_per_s for one in best],
        [one.device_tokens_per_s for one in best],
        ls="none",
        marker="o",
        ms=11,
        mfc="none",
        mec=INK,
        label="nothing is better in both" if best else None,
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("output tokens/s/user (1 / TPOT p50)")
    axes.set_ylabel(f"output tokens/s/{study.device}")
    axes.legend(loc="best")


# ------------------------------------------------------------------ latencies
def _latencies(figure: FigureBase, study: Study) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for number, one in enumerate(shown(study)):
        all_of_them = len(one.outcomes)
        ttfts = [each.ttft_s for each in one.outcomes if each.output_tokens]
        tpots = [each.tpot_s for each in one.outcomes if each.output_tokens > 1]
        for axes, values, of in ((left, ttfts, all_of_them), (right, tpots, len(tpots))):
            at, share = cumulated(values, of)
            axes.plot(at, [100 * each for each in share], label=one.name, color=_color(number))
            if at and at[0] > 0:
                axes.set_xscale("log")
    _distribution(left, "time to first token (TTFT)", study.objectives.ttft_s)
    _distribution(right, "time per output token (TPOT)", study.objectives.tpot_s)
    left.set_ylabel("requests, %")
    left.set_ylim(0, 102)
    left.set_title(_at_rate(study), fontsize=9, fontweight="normal")
    if len(shown(study)) > 1:
        _legend_above(right)


def _distribution(axes: Axes, label: str, limit_s: float | None) -> None:
    _seconds_axis(axes)
    axes.set_xlabel(label)
    if limit_s is not None:
        axes.axvline(limit_s, color=TARGET, lw=1.1, ls="--")
        axes.annotate(
            f" SLO {seconds_text(limit_s)}",
            (limit_s, 2),
            color=TARGET,
            fontsize=8.5,
            rotation=90,
            ha="right",
            va="bottom",
        )


def _seconds_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axes.get_xscale() == "log":
        low, high = axes.get_xlim()
        few = high / low < 30  # noqa: PLR2004 - within 1.5 decades, whole ones are too few ticks
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))


# ------------------------------------------------------------------ timeline
def _timeline(figure: FigureBase, study: Study) -> None:
    results = shown(study)
    length_s = max(span(one.outcomes) for one in results)
    unit_s, unit = (60.0, "min") if length_s >= _MINUTES_FROM_S else (1.0, "s")
    rows: list[Callable[[Axes], None]] = [
        lambda axes: _arrivals(axes, results[0], study, unit_s),
        lambda axes: _waiting(axes, results, length_s, unit_s),
        lambda axes: _met(axes, results, study, unit_s),
    ]
    if results[0].moments:
        rows.insert(1, lambda axes: _replicas(axes, results[0], unit_s))
    every = figure.subplots(len(rows), 1, sharex=True)
    for draw, axes in zip(rows, every, strict=True):
        draw(axes)
    every[0].set_title(_at_rate(study), fontsize=9, fontweight="normal")
    every[-1].set_xlim(0, length_s / unit_s)
    every[-1].set_xlabel(f"time since the first arrival, {unit}")


def _arrivals(axes: Axes, one: Result, study: Study, unit_s: float) -> None:
    bins = in_bins(one.outcomes, study.objectives)
    edges = [edge / unit_s for edge in bins.edges_s]
    axes.stairs(bins.arrivals_per_s, edges, fill=True, color="#cbd5e1")
    axes.set_ylabel("arrivals,\nrequests/s")
    axes.set_ylim(bottom=0)


def _replicas(axes: Axes, one: Result, unit_s: float) -> None:
    pools = list(dict.fromkeys(name for moment in one.moments for name in moment.replicas))
    times = [moment.at_s / unit_s for moment in one.moments]
    counts = [[moment.replicas.get(pool, 0) for moment in one.moments] for pool in pools]
    colors = [_color(number + 2) for number in range(len(pools))]
    axes.stackplot(times, *counts, labels=pools, colors=colors, alpha=0.55, step="post")
    axes.set_ylim(0, 1.1 * max(1, *(sum(column) for column in zip(*counts, strict=True))))
    axes.set_ylabel("replicas\nin service")
    _legend_above(axes)


def _waiting(axes: Axes, results: Sequence[Result], length_s: float, unit_s: float) -> None:
    for number, one in enumerate(results):
        lines: list[tuple[str, list[int], str]]
        if one.moments:
            times_s = [moment.at_s for moment in one.moments]
            running = [moment.running for moment in one.moments]
            queued = [moment.queued for moment in one.moments]
            lines = [("queued", queued, "-"), ("running", running, ":")]
        else:
            times_s = [length_s * step / 300 for step in range(301)]
            lines = [("in flight", in_flight(one.outcomes, times_s), "-")]
        for what, values, dashes in lines:
            label = what if len(results) == 1 else f"{one.name}, {what}"
            at = [time_s / unit_s for time_s in times_s]
            axes.plot(at, values, label=label, color=_color(number), lw=1.3, ls=dashes)
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    _legend_above(axes)


def _met(axes: Axes, results: Sequence[Result], study: Study, unit_s: float) -> None:
    for number, one in enumerate(results):
        bins = in_bins(one.outcomes, study.objectives)
        edges = [edge / unit_s for edge in bins.edges_s]
        axes.stairs(
            [100 * share for share in bins.met],
            edges,
            baseline=None,
            color=_color(number),
            lw=1.4,
            label=one.name,
        )
    axes.axhline(100 * study.target, color=TARGET, lw=1.0, ls="--")
    axes.set_ylim(0, 104)
    axes.set_ylabel("within\nobjectives, %" if study.judged else "finished, %")
    if len(results) > 1:
        _legend_above(axes)


# ------------------------------------------------------------------ in common
def _at_rate(study: Study) -> str:
    """Which of several rates is shown; nothing where there is one."""
    results = shown(study)
    if len(study.results) == len(results):
        return ""
    return f"at {number_text(rate_of(results[0]))} requests/s"


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


def _line(number: int) -> dict[str, Any]:
    return {"color": _color(number), "marker": MARKERS[number % len(MARKERS)]}


_BY_RATE = Panel(
    title="Attainment against rate",
    says="Share of arrived requests that met all objectives, by offered rate per device.",
    height_in=3.6,
    draw=_by_rate,
)
_BY_SCALE = Panel(
    title="Attainment against SLO scale",
    says="Objectives that are tighter (left) or looser (right), all times the same factor.",
    height_in=3.3,
    draw=_by_scale,
)
_TRADES = Panel(
    title="Throughput against interactivity",
    says="What devices give against what each user gets; up and right is better.",
    height_in=3.8,
    draw=_trades,
)
_LATENCIES = Panel(
    title="Latencies",
    says="Share of requests at or below; TTFT counts requests without a token as never.",
    height_in=3.3,
    draw=_latencies,
)
_TIMELINE = Panel(
    title="Timeline",
    says="By time of arrival; rates and attainment are averages over each stretch.",
    height_in=6.2,
    draw=_timeline,
)
