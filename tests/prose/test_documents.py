"""Every document that people write keeps the rules of prose."""

from __future__ import annotations

import pytest

from tests.prose.checked import broken, checked


@pytest.mark.parametrize("name", checked())
def test_a_document_keeps_the_rules_of_prose(name: str) -> None:
    found = [
        f"{finding.line}: {finding.rule}: {finding.message}"
        for finding in broken(name, checked()[name])
    ]
    assert not found, "\n".join(found)


def test_only_the_title_of_a_decision_may_be_a_sentence() -> None:
    text = "# Idle replicas are asked\n\n## A replica is asked\n"
    assert [found.line for found in broken("docs/decisions/0099-idle.md", text)] == [3]
    assert [found.line for found in broken("docs/idle.md", text)] == [1, 3]
