"""Which packages of `platform/baton` keep the rules of words in code, and which not yet."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.prose.code import Text, findings
from tests.prose.rules import Finding
from tests.repo.project import ROOT

_PLATFORM = ROOT / "platform/baton"
ALWAYS: Final = (Text.HELP, Text.MESSAGE)
"""Kinds of text that keep the rules in every package."""

NOT_YET: Final[Mapping[str, int]] = MappingProxyType(
    {
        "engine": 491,
    }
)
"""Findings in docstrings and comments, at most; a package without any is taken out."""


def package_of(name: str) -> str:
    """The package that a file of `platform/baton` is in."""
    return Path(name).relative_to("platform/baton").parts[0]


@cache
def found_in_code() -> Mapping[str, list[Finding]]:
    """Every finding of the platform, by file."""
    paths = sorted(_PLATFORM.rglob("*.py"))
    return {str(path.relative_to(ROOT)): findings(path.read_text("utf-8")) for path in paths}


def is_tolerated(name: str, finding: Finding) -> bool:
    """Whether a finding is of a package that is not done, and of a kind that may wait."""
    return package_of(name) in NOT_YET and not finding.rule.startswith(ALWAYS)


def tolerated_counts() -> Mapping[str, int]:
    """How many findings may wait, by package."""
    counts = dict.fromkeys(NOT_YET, 0)
    for name, found in found_in_code().items():
        for finding in found:
            if is_tolerated(name, finding):
                counts[package_of(name)] += 1
    return counts
