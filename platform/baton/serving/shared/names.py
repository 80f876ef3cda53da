"""Names in the Serve application, and keys of the metadata that its replicas give to Serve."""

from __future__ import annotations

APP = "baton"
INGRESS = "ingress"
CONTROLLER = "controller"
CLUSTER = "cluster"
"""Queries that the process in the Ray cluster answers by itself."""
REPLICA_ID = "replica_id"
LINK_ADDRESS = "link"
METRICS_ADDRESS = "metrics"
"""None without metrics."""
