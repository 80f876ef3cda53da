"""Reports for operators, reduced to the values on the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Json = Mapping[str, Any]
JsonDict = dict[str, object]

MAX_REQUEST_ID_CHARS: Final = 256
"""Shown characters of a request's id, which clients choose."""
OUT_OF_STEP: Final = "out of step"
_REQUEST_FIELDS = (
    "outcome", "reason", "mode", "prefill_replica", "decode_replica", "slo_class", "tenant",
    "verdict", "missed", "first_token_s", "tpot_s", "ended_s", "prompt_tokens", "cached_tokens",
    "output_tokens", "resumes", "slowness", "age_s",
)  # fmt: skip
_REPLICA_FIELDS = (
    "engine", "running_requests", "queued_requests", "pulling_requests", "kv_used_fraction",
    "step_s", "inflight_legs", "moved_bytes", "transfer_failures", "expired_leases", "void_pulls",
    "load_age_s",
)  # fmt: skip


def overview_view(report: Json) -> JsonDict:
    """The data of the header and the overview, without replicas."""
    ingresses: Sequence[Json] = report.get("ingresses") or ()
    return {
        "baton": report.get("baton"),
        "model": report.get("model"),
        "generation": report.get("generation"),
        "up_s": report.get("up_s"),
        "demand": report.get("demand"),
        "service": service_view(report),
        "classes": report.get("classes") or [],
        "pools": report.get("pools") or [],
        "autoscaler": report.get("autoscaler"),
        "ingresses": {
            "count": len(ingresses),
            "healthy": sum(bool(ingress.get("healthy")) for ingress in ingresses),
            "unresponsive": report.get("unresponsive") or [],
            "unjoined": _unreachable(ingresses),
            "in_flight": _sum_counts(ingress.get("in_flight") for ingress in ingresses),
            "ended": _sum_counts(ingress.get("ended") for ingress in ingresses),
        },
        "predictions": [row for ingress in ingresses[:1] for row in ingress.get("timings") or ()],
    }


def service_view(report: Json) -> JsonDict:
    """Rates of ended requests and of goodput, over all classes."""
    classes: Sequence[Json] = report.get("classes") or ()
    ended_per_s = sum(row["requests_per_s"] for row in classes)
    good_per_s = sum(row["goodput_per_s"] for row in classes)
    return {
        "ended_per_s": round(ended_per_s, 3),
        "goodput_per_s": round(good_per_s, 3),
        "good_fraction": round(good_per_s / ended_per_s, 4) if ended_per_s else None,
    }


def fleet_view(report: Json) -> JsonDict:
    """Every replica that Ray lists, as the first ingress that has reached it sees it."""
    ingresses: Sequence[Json] = report.get("ingresses") or ()
    views = replica_views(ingresses)
    members: Sequence[Json] = report.get("members") or [rows[0] for rows in views.values()]
    return {
        "pools": report.get("pools") or [],
        "replicas": [
            _replica_row(member, views.get(member.get("replica_id", ""), ())) for member in members
        ],
    }


def replica_views(ingresses: Iterable[Json]) -> dict[str, list[Json]]:
    """Each replica's rows, from the ingresses that have reached it."""
    views: dict[str, list[Json]] = {}
    for ingress in ingresses:
        for row in ingress.get("replicas") or ():
            views.setdefault(row["replica_id"], []).append(row)
    return views


def replica_state(views: Sequence[Json]) -> str:
    """A replica's state, as the first ingress that has reached it sees it."""
    if not views:
        return "not joined"
    return "draining" if views[0].get("draining") else "ready"


def index_state(caches: Sequence[Json]) -> str:
    """The worst state of a replica's cache in the indices of ingresses."""
    if not all(cache.get("in_sync", True) for cache in caches):
        return OUT_OF_STEP
    return "stale" if any(cache.get("is_stale") for cache in caches) else "in step"


def _replica_row(member: Json, views: Sequence[Json]) -> JsonDict:
    row: JsonDict = {
        name: member.get(name) for name in ("replica_id", "pool", "role", "node", "pid")
    }
    row["state"] = replica_state(views)
    # A sum: each ingress knows only its own.
    row["leases"] = sum(view.get("leases", 0) for view in views)
    if not views:
        return row
    first = views[0]
    row |= {name: first.get(name) for name in _REPLICA_FIELDS}
    row["role"] = first.get("role", row["role"])
    if (cache := first.get("cache")) is not None:
        row["cached_blocks"] = cache.get("gpu_blocks")
        row["index"] = index_state([cache])
    return row


def request_row(report: Json) -> JsonDict:
    """A row of the list of requests: the headline, and its time as bars."""
    row: JsonDict = {name: report.get(name) for name in _REQUEST_FIELDS}
    row["request_id"] = str(report["request_id"])[:MAX_REQUEST_ID_CHARS]
    row["bars"] = [
        (bar["part"], bar["from_s"], bar["to_s"]) for bar in report.get("waterfall") or ()
    ]
    return row


def tick_runs(ticks: Iterable[Json]) -> list[dict[str, Any]]:
    """Newest first; consecutive ticks with the same decision are one run."""
    runs: list[list[Json]] = []
    for tick in ticks:
        if runs and _group_key(runs[-1][-1]) == _group_key(tick):
            runs[-1].append(tick)
        else:
            runs.append([tick])
    return [
        {**run[-1], "ticks": len(run), "first_age_s": run[0]["age_s"]} for run in reversed(runs)
    ]


def _group_key(tick: Json) -> object:
    pools = [
        (pool["pool"], pool["have"], pool["desired"], pool["reason"], pool["clipped_by"])
        for pool in tick["pools"]
    ]
    return (tick["paused_reason"], tick["actions"], tick["policy"], tick["dry_run"], pools)


def _sum_counts(counts: Iterable[Json | None]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count or {})
    return dict(total)


def _unreachable(ingresses: Iterable[Json]) -> dict[str, str]:
    """Unreachable replicas, each with the first reported reason."""
    reasons: dict[str, str] = {}
    for ingress in ingresses:
        for replica_id, reason in (ingress.get("unjoined") or {}).items():
            reasons.setdefault(replica_id, reason)
    return reasons
