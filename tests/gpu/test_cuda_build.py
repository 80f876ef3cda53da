"""The build of vLLM for GPUs on a machine without any, and on one that says that it has some."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.fake_gpus import (
    ROOT,
    clean_environment,
    fake_environment,
    needs_cuda_build,
    run_program,
)

pytestmark = [needs_cuda_build, pytest.mark.timeout(300)]
IMPORT_ALL = """
import importlib, json, os, pkgutil, sys
from baton.engine.gpus import use_cpu_without_gpus
use_cpu_without_gpus(os.environ)
import baton.engine.vllm as package
found, broken = [], {}
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    found.append(module.name)
    try:
        importlib.import_module(module.name)
    except Exception as error:
        broken[module.name] = repr(error)
from vllm.platforms import current_platform
from baton.engine.vllm.patches import table
print(json.dumps({
    "found": found,
    "broken": broken,
    "platform": current_platform.device_type,
    "misfits": {
        patch.name: why for patch in table.PATCHES if (why := patch.find_incompatibility())
    },
}))
"""


@pytest.mark.parametrize("gpus", [0, 8])
def test_all_of_the_engine_room_is_imported_and_each_patch_fits(tmp_path: Path, gpus: int) -> None:
    environ = fake_environment(tmp_path, gpus=gpus) if gpus else clean_environment()
    told = json.loads(run_program(IMPORT_ALL, environ))
    assert len(told["found"]) > 40
    assert told["broken"] == {}
    assert told["misfits"] == {}
    assert told["platform"] == ("cuda" if gpus else "cpu")


def test_gpus_are_counted_as_the_driver_has_them(tmp_path: Path) -> None:
    count = "import os; from baton.engine.gpus import count_gpus; print(count_gpus(os.environ))"
    faked = fake_environment(tmp_path, gpus=8)
    assert run_program(count, faked) == "8"
    assert run_program(count, faked | {"CUDA_VISIBLE_DEVICES": "2,5"}) == "2"
    assert run_program(count, faked | {"CUDA_VISIBLE_DEVICES": ""}) == "0"
    assert run_program(count, clean_environment() | {"CUDA_VISIBLE_DEVICES": "0"}) == "0"


def test_doctor_passes_its_versions() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli.main", "doctor", "-o", "json"],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    checks = {load["name"]: load for load in json.loads(done.stdout)["checks"]}
    assert checks["versions"]["status"] == "PASS", checks["versions"]


def test_each_package_that_doctor_tries_can_be_imported() -> None:
    code = (
        "from baton.serving.checks.facts import try_imports\n"
        "assert not [result for result in try_imports(240.0).values() if result.problem]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
