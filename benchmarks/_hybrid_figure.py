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
_MAX_RATIO = 1.3
"""More is not asked for with `--levels`."""
_COLOR_RANGE = (0.6, 1.4)

Cell = Mapping[str, Any]


def draw(grids: Mapping[str, Sequence[Cell]], path: Path) -> None:
    """A column for each trace, a row without and one with admission."""
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(ROWS), len(grids), figsize=(4.2 * len(grids), 7.4), squeeze=False
    )
    for axes_row, (key, row_title) in zip(rows, ROWS.items(), strict=True):
        for axes, (name, cells) in zip(axes_row, grids.items(), strict=True):
            ttfts_s = sorted({cell["ttft_s"] for cell in cells})
            tpots_s = sorted({cell["tpot_s"] for cell in cells})
            ratios = [[_ratio(cells, ttft, tpot, key) for tpot in tpots_s] for ttft in ttfts_s]
            axes.imshow(
                ratios, vmin=_COLOR_RANGE[0], vmax=_COLOR_RANGE[1], cmap="RdYlGn", origin="lower"
            )
            for row, line in enumerate(ratios):
                for column, ratio in enumerate(line):
                    label = f"≥ {ratio:.2g}" if ratio >= _MAX_RATIO else f"{ratio:.2f}"
                    axes.text(column, row, label, ha="center", va="center", fontsize=8)
            axes.set_xticks(range(len(tpots_s)), [f"{tpot * 1e3:.0f}" for tpot in tpots_s])
            axes.set_yticks(range(len(ttfts_s)), [f"{ttft:.2g}" for ttft in ttfts_s])
            axes.set_title(f"{TITLES.get(name, name)}: {row_title}", fontsize=10)
            axes.set_xlabel("TPOT objective, ms")
            axes.set_ylabel("TTFT objective, s")
    figure.suptitle(
        "Requests/s with 90 % in time: baton over the better of\n"
        "chunked colocation and the best static split (simulated)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _ratio(cells: Sequence[Cell], ttft_s: float, tpot_s: float, key: str) -> float:
    (cell,) = (other for other in cells if (other["ttft_s"], other["tpot_s"]) == (ttft_s, tpot_s))
    return round(cell[key] / cell["better"], 2) if cell["better"] else 0.0


def main() -> int:
    """Draw what a run of `benchmarks.hybrid` left."""
    arguments = sys.argv[1:]
    result = Path(arguments[0]) if arguments else RESULTS
    figure = Path(arguments[1]) if len(arguments) > 1 else FIGURE
    draw(json.loads(result.read_text())["cells"], figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
