"""What a replica host counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class HostCounters:
    """What a replica host has seen; only ever grows."""

    submitted: int = 0
    failed: int = 0
    aborted: int = 0
    released: int = 0
    dropped_releases: int = 0
    steps: int = 0
    outputs: int = 0
    role_changes: int = 0
