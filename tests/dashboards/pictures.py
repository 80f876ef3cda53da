"""Draw dashboards from what a live check kept: `python -m tests.dashboards.pictures FILE DIR`.

It is baton's own rendering, not Grafana's: each panel at its place, with what its queries answered.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from baton.telemetry.dashboards.checks import Page, panels_of
from tests.dashboards.drawing import Drawing, draw_panel
from tests.dashboards.pages import pages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMN_INCHES: Final = 0.62
_ROW_INCHES: Final = 0.34
_DPI: Final = 80
_MOST_BYTES: Final = 250_000
_MARGIN_INCHES: Final = 0.55
CAPTION: Final = "baton's own rendering of live data, not Grafana's"

Kept = Mapping[str, Any]


def main() -> int:
    """0 when every dashboard has its picture."""
    parser = argparse.ArgumentParser(prog="python -m tests.dashboards.pictures")
    parser.add_argument("kept", type=Path, metavar="FILE", help="what the live check kept")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where pictures go")
    options = parser.parse_args()
    kept: Kept = json.loads(options.kept.read_bytes())
    options.folder.mkdir(parents=True, exist_ok=True)
    for page in pages():
        path = options.folder / f"dashboard-{page['uid'].removeprefix('baton-')}.png"
        path.write_bytes(picture(page, kept))
        sys.stderr.write(f"{path}: {path.stat().st_size // 1000} kB\n")
    return 0


def picture(page: Page, kept: Kept) -> bytes:
    """A dashboard as PNG.

    Raises:
        ValueError: it is larger than what documents should carry.
    """
    figure = _drawn(page, kept)
    for colours in (128, 64, 32):
        found = _png(figure, colours)
        if len(found) < _MOST_BYTES:
            return found
    raise ValueError(f"{page['title']}: {len(found)} bytes, wanted below {_MOST_BYTES}")


def _drawn(page: Page, kept: Kept) -> Figure:
    from matplotlib.figure import Figure

    rows = max(_bottom(panel) for panel in page["panels"])
    width = 24 * _COLUMN_INCHES
    height = rows * _ROW_INCHES + _MARGIN_INCHES
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="#f4f5f5")
    figure.text(0.008, 1 - 0.3 / height, page["title"], fontsize=13, weight="bold", va="center")
    figure.text(0.992, 1 - 0.3 / height, CAPTION, fontsize=9, color="#666", va="center", ha="right")
    for panel in page["panels"]:
        if panel["type"] == "row":
            y = 1 - (_MARGIN_INCHES + (panel["gridPos"]["y"] + 0.6) * _ROW_INCHES) / height
            figure.text(0.008, y, panel["title"], fontsize=10, weight="bold", color="#333")
    for panel in panels_of(page):
        at = panel["gridPos"]
        box = (
            at["x"] / 24 + 0.003,
            1 - (_MARGIN_INCHES + (at["y"] + at["h"]) * _ROW_INCHES) / height + 0.04 / height,
            at["w"] / 24 - 0.006,
            (at["h"] * _ROW_INCHES - 0.08) / height,
        )
        answered = [
            (
                target,
                kept["series"].get(f"{page['title']}: {panel['title']}: {target['refId']}", []),
            )
            for target in panel["targets"]
        ]
        span = (kept["from_s"], kept["to_s"])
        draw_panel(figure, Drawing(panel=panel, box=box, answered=answered, span_s=span))
    return figure


def _bottom(panel: Page) -> int:
    at = panel["gridPos"]
    return int(at["y"] + at["h"])


def _png(figure: Figure, colours: int) -> bytes:
    """Few colours are enough for lines, and make a file small."""
    from PIL import Image

    drawn, found = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(colors=colours).save(found, format="png", optimize=True)
    return found.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
