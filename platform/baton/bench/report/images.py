"""Plots as PNG: each alone for the HTML page, or all of them on one sheet."""

from __future__ import annotations

import io
from textwrap import wrap
from typing import TYPE_CHECKING

from baton.bench.report.plots import STYLE, Panel, panels_for
from baton.bench.report.study import Study
from baton.bench.report.tables import format_objectives
from baton.domain.errors import OperatorError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH_IN = 10.0
_HEAD_IN = 0.6
_LINE_IN = 0.165
_LINE_CHARS = 145
_DPI = 120


class PlotsMissing(OperatorError):
    """What draws plots is not installed."""


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
    """Where the figures come from, in lines that fit the sheet."""
    lines = [
        f"({study.evidence.mark}) {study.evidence} · objectives: {format_objectives(study)}",
        *(f"{name}: {value}" for name, value in study.facts.items()),
        f"$ {study.command}",
    ]
    return [part for line in lines for part in wrap(line, _LINE_CHARS)]


def _to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the name and version of what drew it.
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def require_plots() -> None:
    """Refuse where plots cannot be drawn.

    Raises:
        PlotsMissing: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise PlotsMissing(
            "plots need the package 'matplotlib', which is not installed",
            "install it with pip install 'baton[report]', or leave out --report",
        ) from error
