"""The words of dashboards and alerts keep the rules."""

from __future__ import annotations

import json

import pytest

from tests.prose.panels import findings, found_in_panels

RULES = """groups:
  - name: baton
    rules:
      - record: whoever
        expr: "1"
      - alert: BatonLate
        annotations:
          summary: {summary}
          description: {description}
"""


def board(**changes: str) -> str:
    """A dashboard with one panel, whose title, description or legend is another one."""
    panel = {
        "title": changes.get("title", "Requests by state"),
        "description": changes.get("description", "Requests by state.\n\nRunbook: docs/A.md"),
        "targets": [{"legendFormat": changes.get("legend", "{{job}} ready")}],
    }
    row = {"title": "Traffic", "panels": [panel]}
    templating = {"list": [{"description": "Address of the runbooks"}]}
    whole = {"title": "baton", "panels": [row], "templating": templating}
    return json.dumps(whole, indent=1, ensure_ascii=False)


def broken_rules(text: str) -> list[str]:
    return [found.rule for found in findings("a.json", text)]


def test_no_text_of_a_dashboard_or_an_alert_breaks_a_rule() -> None:
    found = [
        f"{name}:{finding.line}: {finding.rule}: {finding.message}"
        for name, every in found_in_panels().items()
        for finding in every
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"title": "Enough replicas?"}, "question"),
        ({"title": "At the rate"}, "first-word"),
        ({"title": "Replicas are ready"}, "sentence-heading"),
        ({"title": "Requests wanted"}, "own-word"),
        ({"title": "Promises"}, "own-word"),
        ({"title": "One two three four five six seven eight"}, "long-heading"),
        ({"description": "By tenant."}, "first-word"),
        ({"description": "The share of judged requests."}, "own-word"),
        ({"description": "Requests, and what they cost."}, "headless"),
        ({"description": " ".join(["word"] * 26)}, "long-sentence"),
        ({"legend": "{{job}} promised"}, "own-word"),
    ],
)
def test_a_rule_that_is_broken_is_found(changes: dict[str, str], rule: str) -> None:
    assert broken_rules(board(**changes)) == [rule]


def test_a_dashboard_that_keeps_the_rules_has_no_findings() -> None:
    assert broken_rules(board()) == []
    assert broken_rules(board(description="Inputs of `asked` by pool.", legend="{{asked}}")) == []


def test_a_finding_names_its_line() -> None:
    text = board(title="Requests refused")
    (found,) = findings("a.json", text)
    assert "Requests refused" in text.splitlines()[found.line - 1]


def test_annotations_of_alerts_keep_the_rules() -> None:
    good = RULES.format(summary="requests of {{ $labels.job }} are late", description="Wait.")
    bad = RULES.format(summary="requests are refused", description="Wait for what it needs.")
    assert findings("a.yaml", good) == []
    assert [(found.line, found.rule) for found in findings("a.yaml", bad)] == [
        (6, "own-word"),
        (6, "headless"),
    ]
