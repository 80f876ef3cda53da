"""Grafana dashboards over baton's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from baton.runtime.shipped_files import shipped_folder

_FILE_PATTERNS: Final = ("*.json", "prometheus.yml", "provisioning/*/*.yaml")


def files() -> Mapping[str, bytes]:
    """Dashboards and their provisioning, by path within the folder.

    Alert rules are in `baton.telemetry.rules`.
    """
    root = shipped_folder("dashboards")
    paths = sorted(path for pattern in _FILE_PATTERNS for path in root.glob(pattern))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
