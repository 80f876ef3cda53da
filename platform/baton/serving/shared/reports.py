"""The fleet and its links as JSON rows, for operators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest, nsmallest
from operator import itemgetter
from types import MappingProxyType
from typing import cast

from baton.domain.commands import RecordSelection
from baton.domain.errors import UnknownRequest
from baton.domain.fleet import FleetView, LossReason, ReplicaView
from baton.domain.names.words import few
from baton.perf.fitting.engine_timings import TimingQuality
from baton.policy.links.estimates import LinkRow, LinkState
from baton.policy.placement.chooser import ChooserPlacer
from baton.policy.placement.port import Placer

Row = Mapping[str, object]
_NO_CACHES: Mapping[str, Row] = MappingProxyType({})
_SUMMED_COUNTS = ("failed_handoffs", "flows")


def fleet_report(
    fleet: FleetView,
    *,
    caches: Mapping[str, Row] = _NO_CACHES,
    leases: Mapping[str, int] | None = None,
) -> list[Row]:
    """One row per replica, by pool and id.

    `caches` adds each replica's indexed cache, `leases` how many of this ingress' handoffs it keeps
    blocks for.
    """
    views = sorted(fleet.replicas.values(), key=lambda v: (v.facts.pool, v.replica_id))
    rows: list[Row] = []
    for view in views:
        row = _row(view, fleet.at_s)
        if (cache := caches.get(view.replica_id)) is not None:
            row["cache"] = cache
        if leases is not None:
            row["leases"] = leases.get(view.replica_id, 0)
        rows.append(row)
    return rows


def timing_report(pools: Iterable[TimingQuality]) -> list[Row]:
    """Errors of the step and TTFT predictions of each pool."""
    return [
        {
            "pool": pool.pool,
            "reports": pool.reports,
            "refused_reports": pool.rejected_reports,
            "step_error_fraction": round(pool.step_error, 4),
            "predictions": pool.ttft_count,
            "ttft_error_fraction": round(pool.ttft_error, 4),
            "ttft_bias_fraction": round(pool.ttft_bias, 4),
        }
        for pool in pools
    ]


def policy_report(name: str, placer: Placer) -> Row:
    """The placement policy; for a function, how often it failed.

    After such a failure the least loaded replica gets the request.
    """
    row: dict[str, object] = {"name": str(name)}
    if isinstance(placer, ChooserPlacer):
        row |= {"failures": placer.failures, "last_failure": placer.last_failure}
    return row


def route_report(request_id: str, answers: Iterable[Iterable[Row]]) -> Row:
    """Reports of one request from several ingresses.

    Raises:
        UnknownRequest: no ingress has a report.
    """
    reports = [report for ingress_reports in answers for report in ingress_reports]
    if not reports:
        raise UnknownRequest(
            f"no request {request_id!r} among those that ended recently",
            "'baton trace' lists those that ended recently; ask again once it has ended; an ingress"
            " keeps its last few thousand requests, its log has a request_ended event for each that"
            " was not rejected",
        )
    return {"request_id": request_id, "requests": reports}


def merge_request_reports(
    answers: Iterable[Iterable[Row]], count: int, order: RecordSelection
) -> list[Row]:
    """Reports of several ingresses as one list in that order."""
    reports = [report for reports in answers for report in reports]
    if order is RecordSelection.SLOWEST:
        return nlargest(count, reports, key=itemgetter("slowness"))
    return nsmallest(count, reports, key=itemgetter("age_s"))


def link_report(links: Iterable[LinkRow]) -> list[Row]:
    """One ingress' estimates, one row per pair."""
    return [
        {
            "source_id": link.source_id,
            "target_id": link.target_id,
            "state": str(link.state),
            "reason": link.reason,
            "transport": link.transport,
            "bytes_per_s": round(link.bytes_per_s),
            "setup_s": round(link.setup_s, 6),
            "p50_s": _rounded(link.p50_s),
            "p99_s": _rounded(link.p99_s),
            "pulls": link.pulls,
            "moved_bytes": link.moved_bytes,
            "failures": link.failures,
            "failed_handoffs": link.handoff_failures,
            "flows": link.active_transfers,
            "penalty": round(link.penalty, 3),
            "probed_age_s": _rounded(link.probe_age_s),
        }
        for link in links
    ]


def merge_link_reports(answers: Iterable[Iterable[Row]]) -> list[Row]:
    """Rows of several ingresses as one list: per pair, the row with the latest probe.

    A row with an unknown state never replaces a known state. All ingresses get the same pulls from
    engines; handoffs and flows are each ingress' own, and are added.
    """
    by_pair: dict[tuple[str, str], list[Row]] = {}
    for row in (row for rows in answers for row in rows):
        pair = (str(row["source_id"]), str(row["target_id"]))
        by_pair.setdefault(pair, []).append(row)
    return [_merge_rows(by_pair[pair]) for pair in sorted(by_pair)]


_LOSS_DETAILS: Mapping[str, str] = MappingProxyType(
    {
        LossReason.LEFT: "it is gone from Ray Serve",
        LossReason.UNRESPONSIVE: "it sent no heartbeat",
        LossReason.DISCONNECTED: "its connection broke",
        LossReason.ENGINE_DEAD: "its engine ended",
        LossReason.OUT_OF_SYNC: "its link lost frames",
    }
)
_SAME_LOSS_S = 60.0
"""Within which all ingresses notice a loss."""
_NODE_LOST = "its node was lost"
_SHOWN_ID = 8
_DIED = "died"
"""The reason of a loss that no ingress has noticed."""


def merge_losses(ingresses: Iterable[Row], processes: Sequence[Row]) -> list[Row]:
    """The last loss of each replica, oldest first: when it was noticed first, and how it ended.

    `processes` has the replicas whose processes ended by themselves.
    """
    rows_by_replica: dict[str, list[Row]] = {}
    connected: set[str] = set()
    for ingress in ingresses:
        connected |= {str(row["replica_id"]) for row in _rows(ingress, "replicas")}
        last_losses = {str(row["replica_id"]): row for row in _rows(ingress, "losses")}
        for replica_id, row in last_losses.items():
            rows_by_replica.setdefault(replica_id, []).append(row)
    losses = {replica_id: _merge_loss(rows) for replica_id, rows in rows_by_replica.items()}
    for row in processes:
        replica_id = str(row["replica_id"])
        if (loss := losses.get(replica_id)) is not None:
            loss["detail"] = "; ".join(filter(None, (str(loss["detail"]), str(row["detail"]))))
        else:
            losses[replica_id] = {
                "replica_id": replica_id,
                "age_s": row["age_s"],
                "reason": _DIED,
                "detail": row["detail"],
            }
    for replica_id in losses.keys() & connected - {str(row["replica_id"]) for row in processes}:
        losses[replica_id]["detail"] = f"{losses[replica_id]['detail']}; it is connected again"
    return sorted(losses.values(), key=_age_s, reverse=True)


def lost_node_row(node: Row, *, now_s: float) -> Row:
    """A lost node (`LostNode`) with its age; `now_s` in seconds since 1970."""
    age_s = max(0.0, now_s - cast("float", node["ended_at_s"]))
    return {
        "node": node["address"],
        "node_id": node["node_id"],
        "age_s": round(age_s, 1),
        "reason": node["reason"],
        "replicas": list(cast("Sequence[str]", node["replicas"])),
    }


def lost_node_text(row: Row) -> str:
    """`node 10.0.0.2 (5e0f1a2b) was lost with decode-1, controller-2`."""
    node_id, replicas = str(row["node_id"])[:_SHOWN_ID], cast("list[str]", row["replicas"])
    with_text = few(replicas, separator=", ") or "no replica"
    return f"node {row['node']} ({node_id}) was lost with {with_text}"


def lost_replicas(nodes: Iterable[Row], known: Iterable[Row]) -> list[Row]:
    """Losses of replicas on lost nodes, but for those that are known already."""
    known_ids = {row["replica_id"] for row in known}
    return [
        {"replica_id": replica_id, "age_s": node["age_s"], "detail": _NODE_LOST}
        for node in nodes
        for replica_id in cast("list[str]", node["replicas"])
        if replica_id not in known_ids
    ]


def _merge_loss(rows: Sequence[Row]) -> dict[str, object]:
    """The last loss of one replica, as the first of these ingresses has noticed it."""
    newest_s = min(map(_age_s, rows))
    first = max((row for row in rows if _age_s(row) <= newest_s + _SAME_LOSS_S), key=_age_s)
    return {**first, "detail": first["detail"] or _LOSS_DETAILS.get(str(first["reason"]), "")}


def _rows(ingress: Row, name: str) -> Iterable[Row]:
    return cast("Iterable[Row]", ingress.get(name) or ())


def merge_rejections(ingresses: Iterable[Row]) -> list[Row]:
    """Rejected requests of all ingresses by cause: their number, and the last of them."""
    merged: dict[str, Row] = {}
    for ingress in ingresses:
        for row in _rows(ingress, "rejections"):
            cause = str(row["cause"])
            known = merged.get(cause, row)
            last = min(known, row, key=_last_age_s)
            total = cast("int", row["requests"])
            if cause in merged:
                total += cast("int", known["requests"])
            merged[cause] = {**last, "requests": total}
    return [merged[cause] for cause in sorted(merged)]


def _age_s(row: Row) -> float:
    return cast("float", row["age_s"])


def _last_age_s(row: Row) -> float:
    return cast("float", row["last_age_s"])


def _merge_rows(rows: Sequence[Row]) -> Row:
    newest = min(rows, key=lambda row: (row["state"] == LinkState.UNKNOWN, _probed_age_s(row)))
    return {**newest, **{name: sum(map(itemgetter(name), rows)) for name in _SUMMED_COUNTS}}


def _probed_age_s(row: Row) -> float:
    age_s = row["probed_age_s"]
    return age_s if isinstance(age_s, int | float) else math.inf


def _rounded(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s, 6)


def _row(view: ReplicaView, at_s: float) -> dict[str, object]:
    facts, load = view.facts, view.load
    return {
        "replica_id": view.replica_id,
        "pool": facts.pool,
        "role": str(facts.role),
        "engine": f"{facts.engine} {facts.engine_version}",
        "draining": view.draining,
        "standing": str(view.health),
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
        "void_pulls": load.transfers.invalidated_pulls,
        "load_age_s": round(at_s - view.load_received_at_s, 3),
        "max_running_requests": facts.max_running_requests,
        "max_batched_tokens": facts.max_batched_tokens,
        "max_len_tokens": facts.max_len_tokens,
        "kv_blocks": facts.kv_blocks,
        "kv_block_bytes": facts.kv_block_bytes,
        "block_size_tokens": facts.block_size_tokens,
    }
