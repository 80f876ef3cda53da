"""Grafana dashboards over baton's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_SHIPPED: Final = _HERE / "files"
"""In an installed package; a checkout has them in the folder `dashboards`."""
_FILE_PATTERNS: Final = ("*.json", "prometheus.yml", "provisioning/*/*.yaml")


def folder() -> Path:
    """The folder with the files."""
    return _SHIPPED if _SHIPPED.is_dir() else _HERE.parents[3] / "dashboards"


def files() -> Mapping[str, bytes]:
    """Dashboards and their provisioning, by path within the folder.

    Alert rules are in `baton.telemetry.rules`.
    """
    root = folder()
    paths = sorted(path for pattern in _FILE_PATTERNS for path in root.glob(pattern))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
