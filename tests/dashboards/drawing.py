"""One panel, drawn from the answers to its queries."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from baton.telemetry.dashboards.checks import Page
from baton.telemetry.dashboards.promql import LE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

_COLOURS: Final = (
    "#5b8ff9", "#5ad8a6", "#f6903d", "#e8684a", "#9270ca", "#6dc8ec", "#ffbf00", "#269a99",
    "#ff99c3", "#5d7092", "#a0d911", "#b37feb",
)  # fmt: skip
_MEANT: Final = {
    "green": "#37872d", "orange": "#e0752d", "red": "#c4162a", "blue": "#1f60c4",
}  # fmt: skip
_LABEL: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_MOST_LEGENDS: Final = 8
_FEW_POINTS: Final = 10
_MOST_TILES: Final = 6
_MOST_ROWS: Final = 8
_SMALL: Final = 6.5
_NAME_LENGTH: Final = 28

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What is drawn where."""

    panel: Page
    box: tuple[float, float, float, float]
    """Left, bottom, width, height, in shares of the figure."""
    answered: Sequence[tuple[Page, Sequence[Row]]]
    """Each query with its series."""
    span_s: tuple[float, float]

    @property
    def unit(self) -> str:
        """As Grafana calls it."""
        return str(self.panel["fieldConfig"]["defaults"].get("unit", "short"))

    def named(self) -> list[tuple[str, Row, str]]:
        """Each series that has points: how it is called, itself, its query's name."""
        return [
            (_called(target, row["labels"]), row, target["refId"])
            for target, rows in self.answered
            for row in rows
            if row["points"]
        ]


def draw_panel(figure: Figure, drawing: Drawing) -> None:
    """A frame with the title, and what the panel shows in it."""
    left, bottom, width, height = drawing.box
    frame = figure.add_axes(drawing.box, facecolor="white")
    frame.set_xticks([])
    frame.set_yticks([])
    for spine in frame.spines.values():
        spine.set_color("#d8d9da")
    inches = height * figure.get_figheight()
    frame.text(0.012, 1 - 0.14 / inches, drawing.panel["title"], fontsize=8, weight="bold",
               va="center", transform=frame.transAxes)  # fmt: skip
    if not drawing.named():
        empty = drawing.panel["fieldConfig"]["defaults"].get("noValue", "no data")
        frame.text(0.5, 0.5, empty, ha="center", color="#888", transform=frame.transAxes)
        return
    body = figure.add_axes((left, bottom, width, height - 0.26 / figure.get_figheight()))
    _SHAPES[drawing.panel["type"]](body, drawing)


def _over_time(axes: Axes, drawing: Drawing) -> None:
    _inset(axes, below_inches=0.62)
    promised = {
        one["matcher"]["options"] for one in drawing.panel["fieldConfig"].get("overrides", [])
    }
    series = drawing.named()
    start_s = drawing.span_s[0]
    step_s = _step(series)
    custom = drawing.panel["fieldConfig"]["defaults"].get("custom", {})
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    base: dict[float, float] = {}
    for n, (name, row, ref) in enumerate(series):
        colour = _COLOURS[n % len(_COLOURS)]
        label = name if n < _MOST_LEGENDS else None
        at, values = _with_gaps(row["points"], step_s)
        minutes = [(one - start_s) / 60 for one in at]
        if ref in promised:
            axes.plot(minutes, values, color=colour, lw=1.3, ls=(0, (5, 3)), label=label)
        elif stacked:
            below = [base.get(one, 0.0) for one in at]
            top = [low + value for low, value in zip(below, values, strict=True)]
            axes.fill_between(minutes, below, top, color=colour, alpha=0.55, lw=0.6, label=label)
            base |= dict(zip(at, top, strict=True))
        else:
            # A value between gaps has no line to be seen by.
            dots = "." if len(at) < _FEW_POINTS else None
            axes.plot(minutes, values, color=colour, lw=1.1, label=label, marker=dots, ms=3)
    _scaled(axes, drawing)
    axes.set_xlim(0, (drawing.span_s[1] - start_s) / 60)
    longest = max(len(name) for name, _, _ in series)
    width_inches = drawing.box[2] * axes.figure.bbox.width / axes.figure.dpi
    columns = max(1, min(4, int(width_inches / (0.35 + 0.058 * longest))))
    axes.legend(loc="upper left", bbox_to_anchor=(-0.06, -0.13), ncol=columns, fontsize=6,
                frameon=False, handlelength=1.1, columnspacing=0.9, borderpad=0)  # fmt: skip


def _step(series: Sequence[tuple[str, Row, str]]) -> float:
    """How far apart values are, seconds."""
    times = sorted({point[0] for _, row, _ in series for point in row["points"]})
    return min((b - a for a, b in itertools.pairwise(times)), default=1.0)


def _with_gaps(points: Sequence[Sequence[float]], step_s: float) -> tuple[list[float], list[float]]:
    """Times and values; where values are missing there is one that is no number."""
    at: list[float] = []
    values: list[float] = []
    for time_s, value in points:
        if at and time_s - at[-1] > 1.5 * step_s:
            at.append(at[-1] + step_s)
            values.append(math.nan)
        at.append(time_s)
        values.append(value)
    return at, values


def _scaled(axes: Axes, drawing: Drawing) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    lowest = drawing.panel["fieldConfig"]["defaults"].get("min")
    highest = drawing.panel["fieldConfig"]["defaults"].get("max")
    custom = drawing.panel["fieldConfig"]["defaults"].get("custom", {})
    if custom.get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        if all(point[1] == 0 for _, row, _ in drawing.named() for point in row["points"]):
            highest = 1.0
        axes.set_ylim(bottom=lowest, top=None if highest is None else highest * 1.001)
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, drawing.unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} min"))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(labelsize=_SMALL, length=2, colors="#555")
    axes.grid(color="#eee", lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _numbers(axes: Axes, drawing: Drawing) -> None:
    axes.axis("off")
    series = drawing.named()[:_MOST_TILES]
    for n, (name, row, _) in enumerate(series):
        value = row["points"][-1][1]
        colour = _MEANT.get(_step_colour(drawing.panel, value), "#1f60c4")
        axes.add_patch(_tile(axes, n, len(series), colour))
        middle = (n + 0.5) / len(series)
        axes.text(middle, 0.52, shown(value, drawing.unit), ha="center", va="center", fontsize=13,
                  color="white", weight="bold", transform=axes.transAxes)  # fmt: skip
        axes.text(middle, 0.2, _short(name), ha="center", va="center", fontsize=_SMALL + 0.5,
                  color="white", transform=axes.transAxes)  # fmt: skip


def _tile(axes: Axes, n: int, of: int, colour: str) -> Rectangle:
    from matplotlib.patches import Rectangle as Patch

    return Patch(
        ((n + 0.03) / of, 0.05), 0.94 / of, 0.88, color=colour, lw=0, transform=axes.transAxes
    )


def _levels(axes: Axes, drawing: Drawing) -> None:
    axes.axis("off")
    series = drawing.named()[:_MOST_ROWS]
    most = max(abs(row["points"][-1][1]) for _, row, _ in series) or 1.0
    axes.set_xlim(-0.45, 1.25)
    axes.set_ylim(len(series) - 0.4, -0.6)
    for n, (name, row, _) in enumerate(series):
        value = row["points"][-1][1]
        axes.barh(n, value / most, color=_COLOURS[n % len(_COLOURS)], height=0.6)
        axes.text(-0.02, n, _short(name), ha="right", va="center", fontsize=_SMALL + 0.5)
        axes.text(value / most + 0.02, n, shown(value, drawing.unit), va="center",
                  fontsize=_SMALL + 0.5)  # fmt: skip


def _table(axes: Axes, drawing: Drawing) -> None:
    from matplotlib.transforms import Bbox

    axes.axis("off")
    options = [one["options"] for one in drawing.panel.get("transformations", [])]
    matrix = next((one for one in options if "rowField" in one), None)
    rows = [row for _, row, _ in drawing.named()]
    if matrix is not None:
        cells, head = _matrix(rows, matrix["rowField"], matrix["columnField"], drawing.unit)
    else:
        labels = sorted({label for row in rows for label in row["labels"]})
        cells = [
            [*(row["labels"].get(label, "") for label in labels),
             shown(row["points"][-1][1], drawing.unit)]
            for row in rows[:_MOST_ROWS]
        ]  # fmt: skip
        head = [*labels, "value"]
    longest = [max(map(len, column)) + 2 for column in zip(*[head, *cells], strict=True)]
    widths = [length / sum(longest) for length in longest]
    box = Bbox.from_bounds(0.02, 0.04, 0.96, 0.9)
    drawn = axes.table(cellText=cells, colLabels=head, colWidths=widths, cellLoc="center", bbox=box)
    drawn.auto_set_font_size(False)  # noqa: FBT003
    drawn.set_fontsize(_SMALL)
    for cell in drawn.get_celld().values():
        cell.set_edgecolor("#e3e3e3")


def _matrix(
    rows: Sequence[Row], row_label: str, column_label: str, unit: str
) -> tuple[list[list[str]], list[str]]:
    """Cells, and the names of columns; the first column has the names of rows."""
    values = {
        (row["labels"].get(row_label, ""), row["labels"].get(column_label, "")): row["points"][-1][
            1
        ]
        for row in rows
    }
    down = sorted({row for row, _ in values})
    across = sorted({column for _, column in values})
    cells = [
        [_short(one), *(shown(values[at], unit) if (at := (one, other)) in values else ""
                        for other in across)]
        for one in down
    ]  # fmt: skip
    return cells, [f"{row_label} \\ {column_label}", *map(_short, across)]


def _heat(axes: Axes, drawing: Drawing) -> None:
    """Counts between two edges: those below the upper one, less those below the lower."""
    _inset(axes, below_inches=0.3)
    rows = [row for _, row, _ in drawing.named()]
    rows = sorted((row for row in rows if row["labels"][LE] != "+Inf"),
                  key=lambda row: float(row["labels"][LE]))  # fmt: skip
    times = sorted({point[0] for row in rows for point in row["points"]})
    below = dict.fromkeys(times, 0.0)
    grid = []
    for row in rows:
        at = {point[0]: point[1] for point in row["points"]}
        grid.append([max(0.0, at.get(one, 0.0) - below[one]) for one in times])
        below |= at
    start_s = drawing.span_s[0]
    extent = ((times[0] - start_s) / 60, (times[-1] - start_s) / 60, 0, len(rows))
    axes.imshow(grid, aspect="auto", origin="lower", cmap="Blues", extent=extent)
    step = max(1, len(rows) // 6)
    axes.set_yticks([n + 1.0 for n in range(0, len(rows), step)])
    axes.set_yticklabels([shown(float(row["labels"][LE]), drawing.unit) for row in rows[::step]])
    axes.tick_params(labelsize=_SMALL, length=2, colors="#555")
    axes.set_xticks([])


def _inset(axes: Axes, *, below_inches: float) -> None:
    """Leave room for what is written beside and below a chart."""
    box = axes.get_position()
    figure = axes.get_figure(root=True)
    if figure is None:
        return
    page_width, page_height = figure.get_size_inches()
    left, right = 0.55 / page_width, 0.12 / page_width
    below = below_inches / page_height
    axes.set_position((box.x0 + left, box.y0 + below, box.width - left - right, box.height - below))


def _called(target: Page, labels: Row) -> str:
    legend = target.get("legendFormat", "__auto")
    if legend in {"", "__auto"}:
        return ", ".join(f"{name}={value}" for name, value in sorted(labels.items())) or "value"
    return _short(_LABEL.sub(lambda found: str(labels.get(found[1], "")), legend))


def _short(text: str) -> str:
    """Names of replicas end in what tells them apart."""
    return text if len(text) <= _NAME_LENGTH else f"...{text[-_NAME_LENGTH + 3 :]}"


def _step_colour(panel: Page, value: float) -> str:
    colour = "blue"
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    return str(colour)


def shown(value: float, unit: str) -> str:
    """A number as people write it."""
    match unit:
        case "percentunit":
            return f"{value * 100:.3g} %"
        case "s":
            return f"{value * 1000:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"
        case "Bps" | "bytes":
            return _scaled_text(value, "B/s" if unit == "Bps" else "B")
        case "reqps" | "ops":
            return f"{value:.3g}/s"
    suffix = unit.removeprefix("suffix:") if unit.startswith("suffix:") else ""
    return f"{_scaled_text(value, '').strip()}{suffix}"


def _scaled_text(value: float, unit: str) -> str:
    for power, prefix in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


_SHAPES: Final[dict[str, Callable[[Axes, Drawing], None]]] = {
    "timeseries": _over_time,
    "stat": _numbers,
    "bargauge": _levels,
    "table": _table,
    "heatmap": _heat,
}
