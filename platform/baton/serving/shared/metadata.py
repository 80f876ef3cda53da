"""Keys of what replicas and ingresses tell Serve of themselves, for others to find them."""

from __future__ import annotations

REPLICA_ID = "replica_id"
LINK_ADDRESS = "link"
"""Where coordinators find a replica's link."""
METRICS_ADDRESS = "metrics"
"""Where a process' metrics are, `host:port`; None where it serves none."""
