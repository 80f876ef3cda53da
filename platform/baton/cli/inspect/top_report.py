"""What `baton top` shows, picked from what the deployment tells: one plain report a refresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

from baton.console.views import first_views, service_view

JsonDict = dict[str, Any]
_SLOWEST_KEYS = (
    "request_id",
    "age_s",
    "outcome",
    "slo_class",
    "missed",
    "verdict",
    "first_token_s",
    "ended_s",
    "tpot_s",
    "prompt_tokens",
    "output_tokens",
    "prefill_replica",
    "decode_replica",
)


def top_report(
    status: Mapping[str, object], links: Mapping[str, object], requests: Mapping[str, object]
) -> dict[str, object]:
    """Everything of one refresh; `None` for what is not known yet."""
    status_report = cast("JsonDict", status)
    ingresses: list[JsonDict] = status_report.get("ingresses", [])
    return {
        "endpoint": status_report.get("endpoint"),
        "model": status_report.get("model"),
        "up_s": status_report.get("up_s"),
        "generation": status_report.get("generation"),
        "ingresses": len(ingresses),
        "service": _service(status_report),
        "classes": status_report.get("classes") or [],
        "pools": _pools(status_report, ingresses),
        "links": _links(cast("list[JsonDict]", links["links"])),
        "slowest": [
            {key: request.get(key) for key in _SLOWEST_KEYS}
            for request in cast("list[JsonDict]", requests["requests"])
        ],
        "troubles": list(_warnings(status_report, ingresses)),
    }


def _service(status: JsonDict) -> dict[str, object]:
    """All classes together: their goodput, and what is asked for."""
    demand = status.get("demand") or {}
    return service_view(status) | {
        "offered_per_s": demand.get("requests_per_s"),
        "refused_per_s": demand.get("refused_per_s"),
        "prompt_tokens_per_s": demand.get("prompt_tokens_per_s"),
        "output_tokens_per_s": demand.get("output_tokens_per_s"),
        "in_flight": demand.get("in_flight"),
        "held": demand.get("held"),
        "slack_s": demand.get("slack_s"),
    }


def _pools(status: JsonDict, ingresses: list[JsonDict]) -> list[JsonDict]:
    views = first_views(ingresses).values()
    return [pool | _load(pool["pool"], views) for pool in status.get("pools") or []]


def _load(pool: str, views: Iterable[Mapping[str, Any]]) -> JsonDict:
    """What the replicas of a pool do; none is among the views twice."""
    pool_views = [view for view in views if view["pool"] == pool]
    kv_used_fractions = [view["kv_used_fraction"] for view in pool_views]
    return {
        "running_requests": sum(view["running_requests"] for view in pool_views),
        "queued_requests": sum(view["queued_requests"] for view in pool_views),
        "kv_used_fraction": round(sum(kv_used_fractions) / len(kv_used_fractions), 4)
        if kv_used_fractions
        else None,
    }


def _links(rows: list[JsonDict]) -> dict[str, object]:
    """How many pairs in which state, what moved in all, and the pairs worth a look."""
    return {
        "pairs": len(rows),
        "states": dict(Counter(str(row["state"]) for row in rows)),
        "pulls": sum(row["pulls"] for row in rows),
        "moved_bytes": sum(row["moved_bytes"] for row in rows),
        "failures": sum(row["failures"] for row in rows),
        "worst": sorted(rows, key=_link_severity)[:8],
    }


def _link_severity(row: JsonDict) -> tuple[bool, bool, int, float]:
    """Those that do not work first, then those that failed, then the slow ones."""
    p99_s = row["p99_s"] if row["p99_s"] is not None else 0.0
    return (row["state"] != "quarantined", row["state"] == "ok", -row["failures"], -p99_s)


def _warnings(status: JsonDict, ingresses: list[JsonDict]) -> Iterable[str]:
    """What an operator should know, in a line each."""
    scaling = status.get("autoscaler") or {}
    if pause_reason := scaling.get("held"):
        yield f"the autoscaler holds still: {pause_reason}"
    for pool in status.get("pools") or []:
        if trouble := pool.get("trouble"):
            yield f"pool {pool['pool']}: {str(trouble).partition(chr(10))[0]}"
    unhealthy = sum(not ingress["healthy"] for ingress in ingresses)
    if unhealthy:
        yield f"{unhealthy} of {len(ingresses)} ingresses cannot serve"
    unreachable = {name for ingress in ingresses for name in ingress["unjoined"]}
    if unreachable:
        yield f"not joined everywhere: {', '.join(sorted(unreachable))}"
    if failures := sum(ingress.get("policy", {}).get("failures", 0) for ingress in ingresses):
        yield f"the placement policy failed {failures} times, see 'baton status'"
