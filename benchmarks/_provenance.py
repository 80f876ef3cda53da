"""Where a benchmark's figures come from: which source, which versions, which machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
_MEASURED_PATHS = ("platform", "benchmarks", ":(exclude)benchmarks/results")
"""What a figure hangs on; not the results, which a benchmark of several parts writes amid them."""


def provenance(packages: Iterable[str] = ()) -> dict[str, object]:
    """The commit, the versions of Python and of the packages that are installed, the machine."""
    return {
        "git_sha": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--", *_MEASURED_PATHS)),
        "versions": {"python": platform.python_version()}
        | {name: version for name in packages if (version := _version(name))},
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": _cpu_model(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpu": None,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    result = subprocess.run(  # noqa: S603 - fixed arguments
        ["git", *arguments],  # noqa: S607 - the user's git
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
