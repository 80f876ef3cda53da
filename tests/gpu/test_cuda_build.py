"""The build of vLLM for GPUs on a machine without any, and on one that says that it has some."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.fake_gpus import ROOT, faked_environment, needs_cuda_build, own_environment, says

pytestmark = [needs_cuda_build, pytest.mark.timeout(300)]
IMPORT_ALL = """
import importlib, json, os, pkgutil, sys
from baton.engine.gpus import compute_on_cpus
compute_on_cpus(os.environ)
import baton.engine.vllm as package
found, broken = [], {}
for module in pkgutil.iter_modules(package.__path__):
    found.append(module.name)
    try:
        importlib.import_module(f"{package.__name__}.{module.name}")
    except Exception as error:
        broken[module.name] = repr(error)
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from baton.engine.vllm.patches import resume_patch as resume
from baton.engine.vllm.patches import step_budget
print(json.dumps({
    "found": found,
    "broken": broken,
    "platform": current_platform.device_type,
    "misfits": [resume.misfit(), step_budget.misfit(Scheduler, Request)],
}))
"""


@pytest.mark.parametrize("gpus", [0, 8])
def test_all_of_the_engine_room_is_imported_and_each_patch_fits(tmp_path: Path, gpus: int) -> None:
    environ = faked_environment(tmp_path, gpus=gpus) if gpus else own_environment()
    told = json.loads(says(IMPORT_ALL, environ))
    assert len(told["found"]) > 40
    assert told["broken"] == {}
    assert told["misfits"] == [None, None]
    assert told["platform"] == ("cuda" if gpus else "cpu")


def test_gpus_are_counted_as_the_driver_has_them(tmp_path: Path) -> None:
    count = "import os; from baton.engine.gpus import count_gpus; print(count_gpus(os.environ))"
    faked = faked_environment(tmp_path, gpus=8)
    assert says(count, faked) == "8"
    assert says(count, faked | {"CUDA_VISIBLE_DEVICES": "2,5"}) == "2"
    assert says(count, faked | {"CUDA_VISIBLE_DEVICES": ""}) == "0"
    assert says(count, own_environment() | {"CUDA_VISIBLE_DEVICES": "0"}) == "0"


def test_doctor_finds_nothing_wrong_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli.main", "doctor", "-o", "json"],
        cwd=ROOT,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    for name in ("versions", "imports"):
        assert checks[name]["verdict"] == "PASS", checks[name]
