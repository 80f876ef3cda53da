"""Renders rules as files for Prometheus."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from baton.telemetry.rules.capacity import capacity_groups
from baton.telemetry.rules.control import control_groups
from baton.telemetry.rules.rule import Alert, Group, Record, Rule
from baton.telemetry.rules.service import service_groups
from baton.telemetry.rules.slo import slo_groups

RUNBOOKS: Final = "docs/operations/runbooks"
"""The default target of alerts' links, within this project."""
_HEADER: Final = (
    "# Made by `python -m baton.telemetry.rules --write`: change the code, not this file."
)
_WIDTH: Final = 110


def groups() -> Mapping[str, tuple[Group, ...]]:
    """Every group of rules, by file."""
    return {
        "baton-slo.yaml": slo_groups(),
        "baton-capacity.yaml": capacity_groups(),
        "baton-service.yaml": service_groups(),
        "baton-control.yaml": control_groups(),
    }


def alerts() -> tuple[Alert, ...]:
    """Every alert."""
    return tuple(rule for rule in _rules() if isinstance(rule, Alert))


def records() -> tuple[Record, ...]:
    """Every recorded series."""
    return tuple(rule for rule in _rules() if isinstance(rule, Record))


def files(*, runbook_base: str = RUNBOOKS) -> Mapping[str, bytes]:
    """The rule files by name; alerts link to pages below `runbook_base`, a path or URL."""
    return {name: _file_text(file_groups, runbook_base) for name, file_groups in groups().items()}


def _rules() -> tuple[Rule, ...]:
    return tuple(
        rule for file_groups in groups().values() for group in file_groups for rule in group.rules
    )


def _file_text(file_groups: tuple[Group, ...], runbook_base: str) -> bytes:
    file_lines = [_HEADER, "groups:"]
    for group in file_groups:
        file_lines += [f"  - name: {group.name}", f"    interval: {group.interval}", "    rules:"]
        for rule in group.rules:
            file_lines += [f"      {line}" for line in _rule_lines(rule, runbook_base)]
    return ("\n".join(file_lines) + "\n").encode()


def _rule_lines(rule: Rule, runbook_base: str) -> Iterator[str]:
    if isinstance(rule, Record):
        yield f"- record: {rule.name}"
        yield from _expr_lines(rule.expr)
        yield from _label_lines(rule.labels)
        return
    yield f"- alert: {rule.name}"
    yield from _expr_lines(rule.expr)
    yield f"  for: {rule.for_}"
    yield from _label_lines({"severity": str(rule.severity), **rule.labels})
    yield "  annotations:"
    yield from _folded_scalar("summary", rule.summary)
    yield from _folded_scalar("description", rule.description)
    base = runbook_base.rstrip("/")
    yield f"    runbook_url: {json.dumps(f'{base}/{rule.name}.md')}"


def _label_lines(labels: Mapping[str, str]) -> Iterator[str]:
    if labels:
        yield "  labels:"
    yield from (f"    {name}: {json.dumps(value)}" for name, value in labels.items())


def _expr_lines(text: str) -> Iterator[str]:
    """Long lines are wrapped: PromQL takes any white space for one space."""
    yield "  expr: |"
    for line in text.splitlines():
        indent = 4 + len(line) - len(line.lstrip())
        yield from _wrap(line.strip(), indent=indent, hanging_indent=2)


def _folded_scalar(name: str, text: str) -> Iterator[str]:
    """A YAML text whose line breaks are read as spaces."""
    yield f"    {name}: >-"
    yield from _wrap(text, indent=6)


def _wrap(text: str, *, indent: int, hanging_indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging_indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
