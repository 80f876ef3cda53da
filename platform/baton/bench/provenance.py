"""The origin of figures: source, versions, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import psutil

import baton

_GIT_TIMEOUT_S = 5.0
_PACKAGES = ("aiohttp", "uvloop", "msgspec")
"""Packages that affect the client's speed."""


def provenance() -> dict[str, object]:
    """Versions, the commit of a checkout, and the client's machine."""
    return {
        "baton": baton.__version__,
        "git_sha": _git_describe(Path(baton.__file__).parent),
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name))},
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": _cpu_model(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_describe(folder: Path) -> str | None:
    """None without a checkout or git; `-dirty` after changes."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],  # noqa: S607
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
