"""Rules as the files that Prometheus reads."""

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
"""Where alerts link to, unless said otherwise: within this project."""
_HEADER: Final = (
    "# Made by `python -m baton.telemetry.rules --write`: change the code, not this file."
)
_WIDTH: Final = 110


def groups() -> Mapping[str, tuple[Group, ...]]:
    """Every group of rules, by the file it is in."""
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
    """Every series that is recorded."""
    return tuple(rule for rule in _rules() if isinstance(rule, Record))


def files(*, runbook_base: str = RUNBOOKS) -> Mapping[str, bytes]:
    """The rule files by name; alerts link to pages below `runbook_base`, a path or a URL."""
    return {name: _text(found, runbook_base) for name, found in groups().items()}


def _rules() -> tuple[Rule, ...]:
    return tuple(rule for found in groups().values() for group in found for rule in group.rules)


def _text(found: tuple[Group, ...], runbook_base: str) -> bytes:
    made = [_HEADER, "groups:"]
    for group in found:
        made += [f"  - name: {group.name}", f"    interval: {group.interval}", "    rules:"]
        for rule in group.rules:
            made += [f"      {line}" for line in _rule(rule, runbook_base)]
    return ("\n".join(made) + "\n").encode()


def _rule(rule: Rule, runbook_base: str) -> Iterator[str]:
    if isinstance(rule, Record):
        yield f"- record: {rule.name}"
        yield from _expr(rule.expr)
        yield from _labels(rule.labels)
        return
    yield f"- alert: {rule.name}"
    yield from _expr(rule.expr)
    yield f"  for: {rule.for_}"
    yield from _labels({"severity": str(rule.severity), **rule.labels})
    yield "  annotations:"
    yield from _folded("summary", rule.summary)
    yield from _folded("description", rule.description)
    base = runbook_base.rstrip("/")
    yield f"    runbook_url: {json.dumps(f'{base}/{rule.name}.md')}"


def _labels(labels: Mapping[str, str]) -> Iterator[str]:
    if labels:
        yield "  labels:"
    yield from (f"    {name}: {json.dumps(value)}" for name, value in labels.items())


def _expr(text: str) -> Iterator[str]:
    """As it is, but for lines that are too long: where PromQL has one space it may have several."""
    yield "  expr: |"
    for line in text.splitlines():
        deep = 4 + len(line) - len(line.lstrip())
        yield from _wrapped(line.strip(), deep=deep, hanging=2)


def _folded(name: str, text: str) -> Iterator[str]:
    """A text whose line breaks are read as spaces."""
    yield f"    {name}: >-"
    yield from _wrapped(text, deep=6)


def _wrapped(text: str, *, deep: int, hanging: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * deep,
        subsequent_indent=" " * (deep + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
