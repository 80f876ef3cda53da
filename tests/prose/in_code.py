"""The texts of `platform/baton`, of benchmarks and of cases that break a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from tests.prose.code import findings, script_findings
from tests.prose.rules import Finding
from tests.repo.project import ROOT

_WORDS_ONLY: Final = ("benchmarks", "tests/chaos/cases", "tests/e2e")
"""Folders in which sentences may be long, but whose words are the field's."""
_CONSOLE: Final = "platform/baton/console"
_SCRIPTS: Final = ("static/*.js", "static/*.css", "templates/*.html")


@cache
def found_in_code() -> Mapping[str, list[Finding]]:
    """Every finding of the platform, by file."""
    return {str(path.relative_to(ROOT)): found for path, found in _checked_files()}


def _checked_files() -> Iterator[tuple[Path, list[Finding]]]:
    for path in sorted((ROOT / "platform/baton").rglob("*.py")):
        yield path, findings(path.read_text("utf-8"))
    for folder in _WORDS_ONLY:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, findings(path.read_text("utf-8"), only_words=True)
    for pattern in _SCRIPTS:
        for path in sorted((ROOT / _CONSOLE).glob(pattern)):
            yield path, script_findings(path.read_text("utf-8"))
