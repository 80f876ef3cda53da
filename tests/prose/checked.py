"""Which documents keep the rules, and which of the rules."""

from __future__ import annotations

from collections.abc import Mapping

from tests.prose.rules import Finding, findings
from tests.repo.project import documents

_WRITTEN_BY_PROGRAMS = ("docs/reference/", "docs/reliability.md")
_DECISIONS = "docs/decisions/0"
_OF_TITLES = {"long-heading", "sentence-heading"}
"""Rules that the title of a decision need not keep: it says what was decided."""


def checked() -> Mapping[str, str]:
    """The documents that people write, by name."""
    every = documents()
    return {name: every[name] for name in every if not name.startswith(_WRITTEN_BY_PROGRAMS)}


def broken(name: str, markdown: str) -> list[Finding]:
    """Where a document of that name breaks a rule that it should keep."""
    title_free = name.startswith(_DECISIONS)
    return [
        found
        for found in findings(markdown)
        if not (title_free and found.line == 1 and found.rule in _OF_TITLES)
    ]
