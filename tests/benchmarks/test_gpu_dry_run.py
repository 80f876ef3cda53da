"""The measurement of one GPU, tried where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.scaled_deadline import slowdown
from tests.repo.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_everything_that_is_measured_on_a_gpu_is_measured_in_a_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(out)),
            *("--logs", str(tmp_path / "logs"), "--limit-s", str(200 * slowdown())),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600 * slowdown(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    for system in ("plain", "mixed", "baton"):
        assert all(row["ttft_p50_s"] > 0 for row in found[system]["alone"])
        assert all(row["tpot_p50_s"] > 0 for row in found[system]["together"])
    (link,) = found["baton"]["links"]["links"]
    assert link["moved_bytes"] > 0
    assert not [row for row in found["mixed"]["links"]["links"] if row["moved_bytes"]]
    assert "baton" in done.stdout
