"""Expressions that are empty while all is well, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EXPECTED_EMPTY: Mapping[str, str] = MappingProxyType(
    {
        "baton / Goodput & SLO: Firing alerts: A": "no alert fires within two minutes of load",
        "baton / KV transfer: Quarantined pairs: A": "every pair is in order",
        "baton-capacity.yaml: baton:empty_pools:count": "every pool has a replica that is ready",
    }
)
