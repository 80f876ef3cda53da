"""Which page of the documents, or which of its figures, is made by whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.reference import api, commands, configuration, figures, metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/configuration.md": configuration.render_page,
    "docs/reference/cli.md": commands.render_page,
    "docs/reference/api.md": api.render_page,
    "docs/operations/metrics.md": metrics.page,
    **figures.pages(),
}
"""Each page, by its path within the project."""
