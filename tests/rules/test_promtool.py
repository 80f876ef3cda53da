"""Prometheus' own opinion of the rules, where promtool is; alerts: see `scripts/check-rules`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.rules.rule_files import INSTALL_HINT, RULES, promtool

pytestmark = pytest.mark.skipif(promtool() is None, reason=INSTALL_HINT)


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(promtool()), "check", "rules", *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_prometheus_reads_every_rule() -> None:
    done = check(*sorted(RULES.glob("*.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("good", "bad"),
    [("sum by (job)", "sum by job"), ("for: 15s", "for: soon"), ("{{ $value }}", "{{ $valu }}")],
)
def test_prometheus_refuses_what_is_wrong_with_one(tmp_path: Path, good: str, bad: str) -> None:
    text = (RULES / "baton-capacity.yaml").read_text()
    assert good in text
    (tmp_path / "rules.yaml").write_text(text.replace(good, bad, 1))
    assert check(tmp_path / "rules.yaml").returncode != 0
