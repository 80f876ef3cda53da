"""Reports as the platform makes them, for verbs that show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.domain.fleet import FleetView, Load, ReplicaView, TransferTotals
from baton.serving.shared.reports import fleet_report
from tests.fakes.facts import replica_facts


def changed(row: Mapping[str, Any], **values: object) -> dict[str, Any]:
    """A row with other values; a key that it does not have is a mistake."""
    assert values.keys() <= row.keys(), f"no such keys: {sorted(values.keys() - row.keys())}"
    return {**row, **values}


def replica_row(replica_id: str = "decode-1", load: Load | None = None) -> dict[str, Any]:
    """An ingress's view of a replica in the pool "decode"."""
    view = ReplicaView(
        facts=replica_facts(replica_id, pool="decode"),
        load=load or Load(transfers=TransferTotals(pulls=3, moved_bytes=300)),
        load_received_at_s=10.0,
    )
    (row,) = fleet_report(FleetView(at_s=10.0, replicas={replica_id: view}))
    return dict(row)
