"""The table of features: every row is backed by tests that are there."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.repo.project import ROOT

TABLE = ROOT / "docs" / "features.md"
WAYS = ("P/D", "LOCAL", "not yet")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`")


class Row(NamedTuple):
    """One feature."""

    feature: str
    way: str
    tests: tuple[tuple[str, str, str], ...]
    """File, name, and the case of it, if one is named."""
    rest: str


def rows() -> list[Row]:
    """The table, without its head."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[0] not in {"feature", "---"}:
            found.append(Row(cells[0], cells[1], tuple(_TEST.findall(cells[2])), cells[3]))
    return found


def test_there_is_a_table() -> None:
    assert len(rows()) > 20
    assert len({row.feature for row in rows()}) == len(rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.feature)
def test_a_feature_is_backed_by_tests_that_are_there(row: Row) -> None:
    assert row.way in WAYS
    assert row.tests or row.way == "not yet", "a claim without a test"
    assert row.rest or row.way != "not yet", "nothing says why"
    for file, name, case in row.tests:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(?:async )?def {name}\(", text, re.MULTILINE), (
            f"no {name} in {file}"
        )
        assert not case or f'"{case}"' in text, f"no case {case!r} in {file}"


def test_the_documented_local_requests_are_those_that_baton_keeps_local() -> None:
    from baton.domain.request import LocalOnlyReason

    kept = " ".join(row.rest for row in rows() if row.way == "LOCAL")
    for reason in set(LocalOnlyReason) - {LocalOnlyReason.HANDOFF_FAILED}:
        assert f"`{reason}`" in kept, f"{reason} is in no row"
