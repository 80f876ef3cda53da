"""Alertmanager's own opinion of the example of its configuration, where amtool is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.rules.rule_files import ROOT

_AMTOOL = ROOT / ".tools/bin/amtool"
_EXAMPLE = ROOT / "dashboards/alertmanager-example.yaml"
pytestmark = pytest.mark.skipif(
    not _AMTOOL.exists(), reason="no amtool: get it with scripts/tools alertmanager"
)


def amtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(_AMTOOL), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)


def texts(value: object) -> Iterator[str]:
    """Every text with a template in it."""
    if isinstance(value, str) and "{{" in value:
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from texts(entry)


def test_every_template_of_the_example_can_be_filled_in() -> None:
    found = list(texts(YAML(typ="safe").load(_EXAMPLE.read_text())))
    assert len(found) >= 4
    for text in found:
        # It wants a file of templates, too.
        done = amtool(
            "template", "render", f"--template.glob={_EXAMPLE}", f"--template.text={text}"
        )
        assert done.returncode == 0, done.stderr


def test_alertmanager_reads_the_example() -> None:
    done = amtool("check-config", _EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "word", ["routing_key_file", "api_url_file", "receiver: pages", "send_resolved"]
)
def test_alertmanager_refuses_a_misspelt_word(tmp_path: Path, word: str) -> None:
    text = _EXAMPLE.read_text()
    assert word in text
    (tmp_path / "example.yaml").write_text(text.replace(word, f"{word}x", 1))
    assert amtool("check-config", tmp_path / "example.yaml").returncode != 0


@pytest.mark.parametrize(
    ("severity", "receiver", "services"),
    [
        ("page", "pages", {"webhook", "pagerduty", "slack"}),
        ("ticket", "tickets", {"webhook", "slack"}),
    ],
)
def test_alerts_go_to_their_receivers_by_severity(
    severity: str, receiver: str, services: set[str]
) -> None:
    done = amtool("config", "routes", "test", f"--config.file={_EXAMPLE}", f"severity={severity}")
    assert done.stdout.strip() == receiver
    receivers = _EXAMPLE.read_text().partition("receivers:\n")[2].partition("inhibit_rules:")[0]
    _, _, section = receivers.partition(f"- name: {receiver}\n")
    lines = section.partition("- name:")[0].splitlines()
    found = {line.strip()[: -len("_configs:")] for line in lines if line.endswith("_configs:")}
    assert found == services
