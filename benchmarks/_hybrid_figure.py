"""The hybrid grid as a picture: what it carries over the better of the others, cell by cell.

    python -m benchmarks._hybrid_figure [RESULT_JSON] [PNG]

It shows what a run of `benchmarks.hybrid` left, and runs nothing itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "hybrid.json"
FIGURE = ROOT / "docs" / "images" / "hybrid.png"
TITLES = {
    "azure_conv": "Azure, conversations",
    "azure_code": "Azure, code",
    "mooncake_conv": "Mooncake, conversations",
}
ROWS = {"hybrid_no_admission": "placement alone", "hybrid": "with admission"}
_MOST = 1.3
"""More is not asked for with `--levels`."""
_COLOURS = (0.6, 1.4)

Cell = Mapping[str, Any]


def draw(grids: Mapping[str, Sequence[Cell]], path: Path) -> None:
    """A column for each trace, a row without and one with admission."""
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(ROWS), len(grids), figsize=(4.2 * len(grids), 7.4), squeeze=False
    )
    for axes_row, (key, said) in zip(rows, ROWS.items(), strict=True):
        for axes, (name, cells) in zip(axes_row, grids.items(), strict=True):
            first = sorted({cell["ttft_s"] for cell in cells})
            later = sorted({cell["tpot_s"] for cell in cells})
            ratios = [[_ratio(cells, ttft, tpot, key) for tpot in later] for ttft in first]
            axes.imshow(ratios, vmin=_COLOURS[0], vmax=_COLOURS[1], cmap="RdYlGn", origin="lower")
            for row, line in enumerate(ratios):
                for column, ratio in enumerate(line):
                    words = f"≥ {ratio:.2g}" if ratio >= _MOST else f"{ratio:.2f}"
                    axes.text(column, row, words, ha="center", va="center", fontsize=8)
            axes.set_xticks(range(len(later)), [f"{tpot * 1e3:.0f}" for tpot in later])
            axes.set_yticks(range(len(first)), [f"{ttft:.2g}" for ttft in first])
            axes.set_title(f"{TITLES.get(name, name)}: {said}", fontsize=10)
            axes.set_xlabel("TPOT objective, ms")
            axes.set_ylabel("TTFT objective, s")
    figure.suptitle(
        "Requests/s with 90 % in time: baton over the better of\n"
        "chunked colocation and the best static split (simulated)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _ratio(cells: Sequence[Cell], ttft_s: float, tpot_s: float, key: str) -> float:
    (cell,) = (one for one in cells if (one["ttft_s"], one["tpot_s"]) == (ttft_s, tpot_s))
    return round(cell[key] / cell["better"], 2) if cell["better"] else 0.0


def main() -> int:
    """Draw what a run of `benchmarks.hybrid` left."""
    given = sys.argv[1:]
    result = Path(given[0]) if given else RESULTS
    figure = Path(given[1]) if len(given) > 1 else FIGURE
    draw(json.loads(result.read_text())["cells"], figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
