"""Where figures come from: which source, which versions, which machine."""

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
"""What the client's own speed depends on."""


def provenance() -> dict[str, object]:
    """Versions, the commit where baton runs from a checkout, and the machine of the client."""
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
    """None where there is no checkout, or no git; `-dirty` where something was changed in it."""
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
