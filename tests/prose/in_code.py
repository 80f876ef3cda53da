"""The texts of `platform/baton` that break a rule."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tests.prose.code import findings
from tests.prose.rules import Finding
from tests.repo.project import ROOT


@cache
def found_in_code() -> Mapping[str, list[Finding]]:
    """Every finding of the platform, by file."""
    paths = sorted((ROOT / "platform/baton").rglob("*.py"))
    return {str(path.relative_to(ROOT)): findings(path.read_text("utf-8")) for path in paths}
