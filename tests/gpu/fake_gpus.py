"""A machine that says of itself that it has GPUs: enough for configurations, for nothing behind."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_STUBS = Path(__file__).with_name("stubs")
_LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1"}


def is_cuda_build() -> bool:
    """Whether the vLLM that is installed is the one for GPUs."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_cuda_build = pytest.mark.skipif(
    not is_cuda_build(), reason="the build for CPUs is installed: run 'make test-gpu'"
)


def fake_environment(folder: Path, *, gpus: int) -> dict[str, str]:
    """Variables for a process that is to believe in GPUs; the stubs are compiled into `folder`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "no C compiler was found: apt-get install gcc"
    for source, library in _LIBRARIES.items():
        command = [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(folder / library)]
        subprocess.run([*command, str(_STUBS / source)], check=True, timeout=60)
    return clean_environment() | {"LD_LIBRARY_PATH": str(folder), "FAKE_GPUS": str(gpus)}


def clean_environment() -> dict[str, str]:
    """This process' variables, without the one by which tests have vLLM compute on CPUs."""
    environ = dict(os.environ)
    environ.pop("VLLM_TARGET_DEVICE", None)
    return environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def run_program(program: str, environ: Mapping[str, str], *, timeout_s: float = 240.0) -> str:
    """The last line that a program in Python prints, run with these variables."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout.splitlines()[-1]
