"""Ray Serve builds baton from a declared configuration, and again from another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.serving.front.data_path import pick_front_ports
from tests.repo.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(420)]

CONFIG = """
version: 1
model: {{source: tiny, max_len: 1024, engine: {{kind: sim, sim: {{}}}}}}
pools:
  prefill: {{role: prefill, resources: {{cpus: 0.1}}}}
  decode: {{role: decode, resources: {{cpus: 0.1}}}}
server: {{port: {api}}}
observability: {{metrics: {{port: {metrics}}}}}
"""


def test_baton_comes_up_as_kuberay_deploys_it_and_follows_a_changed_manifest(
    tmp_path: Path,
) -> None:
    ports = pick_front_ports()
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(api=ports.stats, metrics=ports.metrics))
    with tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as folder:  # sockets: a short path
        command = [sys.executable, "-m", "tests.serving.programs.declared", str(config), folder]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    healthy = dict.fromkeys(("ingress", "controller", "prefill", "decode"), "HEALTHY")
    assert told["first"] == {"application": "RUNNING", **healthy}
    assert told["answer"] == "length"
    assert told["second"] == {"application": "RUNNING", **healthy}
    assert told["again"] == "length"
    assert told["generation"] == 1
