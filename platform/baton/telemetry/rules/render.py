"""Renders rules as files for Prometheus."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from baton.domain.errors import OperatorError
from baton.telemetry.rules.capacity import capacity_groups
from baton.telemetry.rules.control import control_groups
from baton.telemetry.rules.rule import Alert, Group, Record, Rule
from baton.telemetry.rules.service import service_groups
from baton.telemetry.rules.slo import slo_groups

RUNBOOKS: Final = "docs/operations/runbooks"
"""The runbooks within this project, which alerts name where no URL of a copy is known."""
RUNBOOK_BASE_PATTERN: Final = r"https?://[^\s\"'\\]+"
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


class InvalidRunbookBase(OperatorError):
    """A base of links that is no URL."""


def check_runbook_base(runbook_base: str) -> None:
    """Check that alerts can link to pages below it.

    Raises:
        InvalidRunbookBase: it is no URL.
    """
    if not re.fullmatch(RUNBOOK_BASE_PATTERN, runbook_base):
        raise InvalidRunbookBase(
            f"--runbook-base: got {runbook_base!r}, expected a URL such as"
            " https://docs.example.com/runbooks",
            "give the URL of a copy of docs/operations/runbooks, or leave it out",
        )


def files(*, runbook_base: str | None = None) -> Mapping[str, bytes]:
    """The rule files by name.

    With the URL `runbook_base`, alerts link to pages below it (`runbook_url`). Without, they name
    the page within this project (`runbook`).

    Raises:
        InvalidRunbookBase: it is no URL.
    """
    if runbook_base is not None:
        check_runbook_base(runbook_base)
    return {name: _file_text(file_groups, runbook_base) for name, file_groups in groups().items()}


def _rules() -> tuple[Rule, ...]:
    return tuple(
        rule for file_groups in groups().values() for group in file_groups for rule in group.rules
    )


def _file_text(file_groups: tuple[Group, ...], runbook_base: str | None) -> bytes:
    file_lines = [_HEADER, "groups:"]
    for group in file_groups:
        file_lines += [f"  - name: {group.name}", f"    interval: {group.interval}", "    rules:"]
        for rule in group.rules:
            file_lines += [f"      {line}" for line in _rule_lines(rule, runbook_base)]
    return ("\n".join(file_lines) + "\n").encode()


def _rule_lines(rule: Rule, runbook_base: str | None) -> Iterator[str]:
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
    if runbook_base is None:
        yield f"    runbook: {RUNBOOKS}/{rule.name}.md"
    else:
        yield f"    runbook_url: {runbook_base.rstrip('/')}/{rule.name}.md"


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
