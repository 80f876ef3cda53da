"""The placement that the README shows."""

from __future__ import annotations

from pathlib import Path

from benchmarks._routing_example import explained


def test_the_readme_shows_what_the_example_prints() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    assert explained("r25") in readme.read_text(encoding="utf-8")
