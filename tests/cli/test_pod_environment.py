"""Verbs in the environment of a pod, and a verb that raises an error that nobody expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cli.main import DEBUG_VARIABLE, main
from baton.serving import commands
from tests.cli.programs import verbs_in_a_pod
from tests.fakes.scaled_deadline import slowdown

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERAY = {
    "RAY_ADDRESS": "127.0.0.1:6379",
    "RAY_IP": "127.0.0.1",
    "RAY_PORT": "6379",
    "RAY_CLUSTER_NAME": "baton",
    "RAY_NODE_TYPE_NAME": "headgroup",
    "KUBERAY_GEN_RAY_START_CMD": "ray start --head",
    "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
}
"""What KubeRay itself sets in each pod."""


def pod_environments() -> dict[str, str]:
    """Every variable that the exported files set, in pods and in services of systemd."""
    found: dict[str, str] = {}
    for path in DEPLOY.rglob("*.yaml"):
        if "templates" not in path.parts:
            for document in yaml.safe_load_all(path.read_text()):
                found |= _variables(document)
    for path in DEPLOY.rglob("*.env"):
        found |= dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
    return found


def _variables(node: Any) -> dict[str, str]:  # noqa: ANN401 - YAML
    found: dict[str, str] = {}
    if isinstance(node, list):
        for child in node:
            found |= _variables(child)
    elif isinstance(node, dict):
        for name, child in node.items():
            if name == "env" and isinstance(child, list):
                found |= {row["name"]: str(row.get("value", "secret")) for row in child}
            else:
                found |= _variables(child)
    return found


@pytest.mark.timeout(180)
def test_every_verb_works_in_the_environment_of_a_pod(tmp_path: Path) -> None:
    variables = pod_environments()
    assert variables["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, verbs_in_a_pod.__file__, tmp_path],
        env={**kept, **variables, **KUBERAY},
        capture_output=True,
        text=True,
        timeout=150 * slowdown(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["handles"], "handles would need an event loop, which no command has"
    for verb, ended in told["ended"].items():
        texts = [text for _, text in ended]
        assert not [text for text in texts if "Traceback" in text], (verb, texts)
        assert not [text for text in texts if "last-error.log" in text], (verb, texts)
        assert 2 not in [code for code, _ in ended], (verb, texts)
        if len(ended) > 1:  # where a deployment's holder answers
            assert ended[1][0] == 0, (verb, texts)


def broken(**_: object) -> None:
    raise KeyError("members\nand more")


def test_an_unexpected_error_is_a_line_with_the_place_of_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(commands, "status", broken)
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 1
    error, step = capsys.readouterr().err.splitlines()
    assert error.startswith("error: KeyError: ")
    path = tmp_path / "baton" / "last-error.log"
    assert step == f"next: the traceback is in {path}; 'baton --debug ...' shows it"
    assert "in broken" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_traceback_is_shown_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "status", broken)
    with pytest.raises(KeyError):
        main(["--debug", "status"])
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(KeyError):
        main(["status"])
    assert capsys.readouterr().err == ""
