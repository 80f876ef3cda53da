"""All dashboards, in the order in which they are read."""

from __future__ import annotations

from baton.telemetry.dashboards import goodput, pools, routing, tenants, transfer
from baton.telemetry.dashboards.model import Board


def boards() -> tuple[Board, ...]:
    """Each once; the first is the one to look at."""
    return (
        goodput.board(),
        pools.board(),
        routing.board(),
        transfer.board(),
        tenants.board(),
    )
