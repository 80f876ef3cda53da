"""The committed rules, their tests for promtool and their runbooks, as tests look at them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from baton.telemetry.catalogue import BY_NAME, Kind, Label
from baton.telemetry.rules.promql import ScrapeLabel
from baton.telemetry.rules.render import alerts, records

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "dashboards/rules"
RUNBOOKS = ROOT / "docs/operations/runbooks"
PROMTOOL_TESTS = ROOT / "tests/rules/promtool"
INSTALL_HINT = "promtool is not here: get it with scripts/tools prometheus"
_NAME = re.compile(r"(?<![\w:.\-/])(?:baton_|baton:|slo:|sloth_slo_info)[\w:]*")
_LABELS = re.compile(r"(?:\bby|\bon|\bwithout|group_left) ?\(([\w, ]*)\)")
_MATCHED = re.compile(r"[{,] ?(\w+)=~?\"")
_FOREIGN_LABELS = {"le", "sloth_id", "sloth_service", "sloth_slo", "sloth_window"}


def promtool() -> str | None:
    """The program, where there is one."""
    local_path = ROOT / ".tools/bin/promtool"
    return str(local_path) if local_path.exists() else shutil.which("promtool")


@cache
def known_names() -> set[str]:
    """Everything that an expression may name: metrics as they are scraped, and what is recorded."""
    plain = {name for name, metric in BY_NAME.items() if metric.kind is not Kind.HISTOGRAM}
    parts = {
        f"{name}_{part}"
        for name, metric in BY_NAME.items()
        if metric.kind is Kind.HISTOGRAM
        for part in ("bucket", "sum", "count")
    }
    return plain | parts | {record.name for record in records()}


def unknown_names(text: str) -> set[str]:
    """What a text calls by names like those of metrics, and is none."""
    return {name for name in _NAME.findall(text) if name.rstrip(":_") not in known_names()}


def unknown_labels(text: str) -> set[str]:
    """What an expression tells series apart by that no series has."""
    labels = {part.strip() for found in _LABELS.findall(text) for part in found.split(",") if part}
    return (labels | set(_MATCHED.findall(text))) - set(Label) - set(ScrapeLabel) - _FOREIGN_LABELS


@cache
def expressions() -> Mapping[str, str]:
    """Every expression, by the name of its rule; texts of alerts ask, too."""
    alert_texts = {alert.name: f"{alert.expr}\n{alert.description}" for alert in alerts()}
    return {record.name: record.expr for record in records()} | alert_texts


@cache
def promtool_tests() -> Sequence[Mapping[str, Any]]:
    """Every test that promtool is given."""
    yaml = YAML(typ="safe")
    return [
        test
        for path in sorted(PROMTOOL_TESTS.glob("*.yaml"))
        for test in yaml.load(path.read_text())["tests"]
    ]


@cache
def panels() -> Mapping[str, set[str]]:
    """The titles of panels, by dashboard."""
    titles_by_dashboard: dict[str, set[str]] = {}
    for path in (ROOT / "dashboards").glob("*.json"):
        board = json.loads(path.read_text())
        panels_and_rows = [
            item for row in board["panels"] for item in (row, *row.get("panels", ()))
        ]
        titles_by_dashboard[board["title"].removeprefix("baton / ")] = {
            str(panel.get("title")) for panel in panels_and_rows
        }
    return titles_by_dashboard


def diagnosis(runbook: str) -> list[tuple[str, str]]:
    """The commands of a runbook's *Diagnosis*, each with the text that it shows."""
    text = (RUNBOOKS / f"{runbook}.md").read_text()
    [block] = re.findall(r"^## Diagnosis\n\n```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rows = [line.partition("#") for line in block.splitlines()]
    return [(command.strip(), shown.strip()) for command, _, shown in rows]
