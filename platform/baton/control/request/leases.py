"""Leases: the duty of a prefill replica to keep a prompt's blocks until they are fetched."""

from __future__ import annotations

from baton.domain.commands import ReleaseLease
from baton.domain.fleet import FleetView
from baton.domain.handoff import Lease, Ticket
from baton.policy.placement.port import place_release

RENEWALS = 6
"""How often a lease is renewed in its time while a leg waits for its blocks."""


def renewed_until_s(now_s: float, lasts_s: float) -> float:
    """Until when a lease is good that is renewed now.

    Source: vLLM 0.32, kv_connector/v1/nixl/base_worker.py `_handle_heartbeat`: two thirds of it.
    """
    return now_s + lasts_s * 2 / 3


def granted(
    request_id: str, leg_id: str, *, replica_id: str, ticket: Ticket, now_s: float, lasts_s: float
) -> Lease:
    """The lease that comes with a ticket."""
    return Lease(
        leg_id=leg_id,
        request_id=request_id,
        replica_id=replica_id,
        ticket=ticket,
        granted_at_s=now_s,
        expires_at_s=now_s + lasts_s,
    )


def release(lease: Lease, fleet: FleetView) -> ReleaseLease | None:
    """Have the blocks freed now; None where nobody can, or must: the lease runs out by itself."""
    source = fleet.replicas.get(lease.replica_id)
    if source is None or fleet.at_s >= lease.expires_at_s:
        return None
    via = place_release(source, fleet)
    return None if via is None else ReleaseLease(lease=lease, via_replica_id=via)
