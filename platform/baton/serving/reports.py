"""The fleet and its links in plain values, for operators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from baton.domain.errors import UnknownRequest
from baton.domain.fleet import FleetView, ReplicaView

Row = Mapping[str, object]


def fleet_report(fleet: FleetView) -> list[dict[str, object]]:
    """One row a replica, in order of pool and id."""
    views = sorted(fleet.replicas.values(), key=lambda v: (v.facts.pool, v.replica_id))
    return [_row(view, fleet.at_s) for view in views]


def explained(request_id: str, answers: Iterable[Iterable[Row]]) -> Row:
    """The stories that several ingresses tell of one request.

    Raises:
        UnknownRequest: none of them knows any.
    """
    found = [story for stories in answers for story in stories]
    if not found:
        raise UnknownRequest(
            f"no request {request_id!r} among those that ended lately",
            "ask again once it has ended; an ingress keeps its last few thousand requests, "
            "its log has a request_ended event for each",
        )
    return {"request_id": request_id, "requests": found}


def merged_links(answers: Iterable[Iterable[Row]]) -> list[Row]:
    """What several ingresses know of links as one list: for each pair, the one that probed last.

    Its totals are as good as the others': engines count them, and tell every ingress the same.
    """
    newest: dict[tuple[str, str], Row] = {}
    for row in (row for rows in answers for row in rows):
        pair = (str(row["source_id"]), str(row["target_id"]))
        if pair not in newest or _probed_age_s(row) < _probed_age_s(newest[pair]):
            newest[pair] = row
    return [newest[pair] for pair in sorted(newest)]


def _probed_age_s(row: Row) -> float:
    age_s = row["probed_age_s"]
    return age_s if isinstance(age_s, int | float) else math.inf


def _row(view: ReplicaView, at_s: float) -> dict[str, object]:
    facts, load = view.facts, view.load
    return {
        "replica_id": view.replica_id,
        "pool": facts.pool,
        "role": str(facts.role),
        "engine": f"{facts.engine} {facts.engine_version}",
        "draining": view.draining,
        "running_requests": load.running_requests,
        "queued_requests": load.queued_requests,
        "pulling_requests": load.pulling_requests,
        "kv_used_fraction": round(load.kv_used_fraction, 4),
        "step_s": round(load.step_s, 6),
        "inflight_legs": view.inflight_legs,
        "pulls": load.transfers.pulls,
        "moved_bytes": load.transfers.moved_bytes,
        "transfer_s": load.transfers.busy_s,
        "transfer_failures": load.transfers.failures,
        "expired_leases": load.transfers.expired_leases,
        "load_age_s": round(at_s - view.load_at_s, 3),
    }
