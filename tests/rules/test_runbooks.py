"""Each alert has a runbook, and what runbooks name is there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from baton.config import json_schema
from baton.telemetry.rules.render import alerts
from tests.cli.command_lines import misused
from tests.rules.rule_files import ROOT, RUNBOOKS, panels, unknown_names

BOOKS = {path.stem: path.read_text() for path in sorted(RUNBOOKS.glob("*.md"))}
PAGES = {**BOOKS, "alerts": (ROOT / "docs/operations/alerts.md").read_text()}
_CODE = re.compile(r"^```bash\n(.*?)^```|`([^`]+)`", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^baton ([^#\n]+)", re.MULTILINE)
_PANELS = re.compile(r"^In \*(.+?)\*: (.+)\.$", re.MULTILINE)
_KEY = re.compile(
    r"`((?:slo|tenants|router|autoscaler|admission|transfer|server|observability|pools|model)"
    r"(?:\.[\w*]+)+)[`:]"
)
_LONGEST = 40


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert BOOKS.keys() == {alert.name for alert in alerts()}


@pytest.mark.parametrize("name", BOOKS)
def test_a_runbook_says_what_it_means_what_clients_see_where_to_look_what_to_do_and_until_when(
    name: str,
) -> None:
    text = BOOKS[name]
    [severity] = [str(alert.severity) for alert in alerts() if alert.name == name]
    assert len(text.splitlines()) <= _LONGEST
    assert text.startswith(f"# {name}\n\n**{severity.title()}.** ")
    parts = (
        "**Impact.**",
        "## Diagnosis",
        "```bash\nbaton ",
        "## Mitigation\n\n1. ",
        "**Resolved when** ",
    )
    at = [text.find(part) for part in parts]
    assert -1 not in at
    assert at == sorted(at)


@pytest.mark.parametrize("name", PAGES)
def test_every_command_in_a_runbook_exists_with_its_options(name: str) -> None:
    code = "\n".join("\n".join(found) for found in _CODE.findall(PAGES[name]))
    commands = _COMMAND.findall(code)
    assert commands
    assert {command: wrong for command in commands if (wrong := misused(command))} == {}


def test_a_command_that_there_is_not_is_noticed() -> None:
    assert misused("scale decode 3 --for 1h") == ""
    assert misused("scal decode 3") == "scal"
    assert misused("scale decode 3 --until noon") == "--until"
    assert misused("explain why") == "explain"


@pytest.mark.parametrize("name", PAGES)
def test_every_metric_and_panel_in_a_runbook_exists(name: str) -> None:
    assert unknown_names(PAGES[name]) == set()
    for board, titles in _PANELS.findall(PAGES[name]):
        missing = set(titles.split("; ")) - panels().get(board, set())
        assert missing == set(), f"{board} has no such panels"


@cache
def keys() -> frozenset[str]:
    """The configuration's keys, with `*` for names that are chosen freely."""
    return frozenset(keys_of(json_schema()))


def keys_of(node: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for alternative in (node, *node.get("anyOf", ())):
        free = alternative.get("additionalProperties")
        inner = {**alternative.get("properties", {}), **({"*": free} if free else {})}
        for name, value in inner.items():
            yield f"{above}{name}"
            yield from keys_of(value, f"{above}{name}.")


@pytest.mark.parametrize("name", PAGES)
def test_every_key_of_the_configuration_in_a_runbook_exists(name: str) -> None:
    named = {key.replace(".POOL.", ".*.") for key in _KEY.findall(PAGES[name])}
    assert named - keys() == set()


def test_a_key_that_there_is_not_is_noticed() -> None:
    assert {"admission.max_queued_requests", "pools.*.replicas.max", "slo.*.window"} - keys() == {
        "slo.*.window"
    }


def test_the_index_lists_every_alert_with_its_severity() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\]\(runbooks/\1\.md\) \| (\w+) \|", PAGES["alerts"], re.MULTILINE
    )
    assert sorted(rows) == sorted((alert.name, str(alert.severity)) for alert in alerts())
