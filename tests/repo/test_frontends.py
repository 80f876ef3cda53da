"""The table of what the two frontends do: every row is backed by tests that are there."""

from __future__ import annotations

import re

import pytest

from tests.repo.project import ROOT

TABLE = ROOT / "docs" / "frontends.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_COLUMNS = 4


def rows() -> list[list[str]]:
    """The table, without its head."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [row for row in found if len(row) == _COLUMNS and row[0] not in {"feature", "---"}]


def test_there_is_a_table() -> None:
    assert len(rows()) > 15


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_difference_is_backed_by_tests_that_are_there(row: list[str]) -> None:
    named = _TEST.findall(row[3])
    assert named, "a claim without a test"
    for file, name in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), f"no {name} in {file}"
