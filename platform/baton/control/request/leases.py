"""Leases: the duty of a prefill replica to keep a prompt's blocks until they are fetched."""

from __future__ import annotations

from baton.domain.commands import ReleaseLease
from baton.domain.fleet import FleetView
from baton.domain.handoff import KvHandle, Lease
from baton.policy.placement.port import choose_releaser

RENEWALS_PER_LEASE = 6
"""How often a lease is renewed in its time while a leg waits for its blocks."""


def renewed_expiry_s(now_s: float, duration_s: float) -> float:
    """Until when a lease is good that is renewed now.

    Source: vLLM 0.32, kv_connector/v1/nixl/base_worker.py `_handle_heartbeat`: two thirds of it.
    """
    return now_s + duration_s * 2 / 3


def new_lease(
    request_id: str,
    leg_id: str,
    *,
    replica_id: str,
    kv_handle: KvHandle,
    now_s: float,
    duration_s: float,
) -> Lease:
    """The lease that comes with a ticket."""
    return Lease(
        leg_id=leg_id,
        request_id=request_id,
        replica_id=replica_id,
        kv_handle=kv_handle,
        granted_at_s=now_s,
        expires_at_s=now_s + duration_s,
    )


def release_command(lease: Lease, fleet: FleetView) -> ReleaseLease | None:
    """Have the blocks freed now; None where nobody can, or must: the lease runs out by itself."""
    source = fleet.replicas.get(lease.replica_id)
    if source is None or fleet.at_s >= lease.expires_at_s:
        return None
    via_replica_id = choose_releaser(source, fleet)
    return (
        None if via_replica_id is None else ReleaseLease(lease=lease, via_replica_id=via_replica_id)
    )
