"""The page that lists every metric."""

from __future__ import annotations

from pathlib import Path

from baton.telemetry.catalogue import CATALOGUE
from baton.telemetry.reference import main, page

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "metrics.md"


def test_the_page_of_metrics_is_what_the_catalogue_makes_of_it() -> None:
    assert PAGE.read_text() == page(), "run: python -m baton.telemetry.reference --write " + str(
        PAGE.relative_to(Path(__file__).parents[2])
    )


def test_each_metric_has_exactly_one_row() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `baton_")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(one.name for one in CATALOGUE)


def test_the_page_is_written_where_one_asks_for_it(tmp_path: Path) -> None:
    assert main(["--write", str(tmp_path / "metrics.md")]) == 0
    assert (tmp_path / "metrics.md").read_text() == page()
