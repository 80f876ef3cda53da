"""What `baton top` shows, picked from what the deployment tells: one plain report a refresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

from baton.console.views import first_views, service_view

Told = dict[str, Any]
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
    told = cast("Told", status)
    ingresses: list[Told] = told.get("ingresses", [])
    return {
        "endpoint": told.get("endpoint"),
        "model": told.get("model"),
        "up_s": told.get("up_s"),
        "generation": told.get("generation"),
        "ingresses": len(ingresses),
        "service": _service(told),
        "classes": told.get("classes") or [],
        "pools": _pools(told, ingresses),
        "links": _links(cast("list[Told]", links["links"])),
        "slowest": [
            {key: story.get(key) for key in _SLOWEST_KEYS}
            for story in cast("list[Told]", requests["requests"])
        ],
        "troubles": list(_troubles(told, ingresses)),
    }


def _service(told: Told) -> dict[str, object]:
    """All classes together: their goodput, and what is asked for."""
    demand = told.get("demand") or {}
    return service_view(told) | {
        "offered_per_s": demand.get("requests_per_s"),
        "refused_per_s": demand.get("refused_per_s"),
        "prompt_tokens_per_s": demand.get("prompt_tokens_per_s"),
        "output_tokens_per_s": demand.get("output_tokens_per_s"),
        "in_flight": demand.get("in_flight"),
        "held": demand.get("held"),
        "slack_s": demand.get("slack_s"),
    }


def _pools(told: Told, ingresses: list[Told]) -> list[Told]:
    views = first_views(ingresses).values()
    return [pool | _load(pool["pool"], views) for pool in told.get("pools") or []]


def _load(pool: str, views: Iterable[Mapping[str, Any]]) -> Told:
    """What the replicas of a pool do; none is among the views twice."""
    own = [view for view in views if view["pool"] == pool]
    used = [view["kv_used_fraction"] for view in own]
    return {
        "running_requests": sum(view["running_requests"] for view in own),
        "queued_requests": sum(view["queued_requests"] for view in own),
        "kv_used_fraction": round(sum(used) / len(used), 4) if used else None,
    }


def _links(rows: list[Told]) -> dict[str, object]:
    """How many pairs in which state, what moved in all, and the pairs worth a look."""
    return {
        "pairs": len(rows),
        "states": dict(Counter(str(row["state"]) for row in rows)),
        "pulls": sum(row["pulls"] for row in rows),
        "moved_bytes": sum(row["moved_bytes"] for row in rows),
        "failures": sum(row["failures"] for row in rows),
        "worst": sorted(rows, key=_worth_a_look)[:8],
    }


def _worth_a_look(row: Told) -> tuple[bool, bool, int, float]:
    """Those that do not work first, then those that failed, then the slow ones."""
    slow_s = row["p99_s"] if row["p99_s"] is not None else 0.0
    return (row["state"] != "quarantined", row["state"] == "ok", -row["failures"], -slow_s)


def _troubles(told: Told, ingresses: list[Told]) -> Iterable[str]:
    """What an operator should know, in a line each."""
    scaling = told.get("autoscaler") or {}
    if held := scaling.get("held"):
        yield f"the autoscaler holds still: {held}"
    for pool in told.get("pools") or []:
        if trouble := pool.get("trouble"):
            yield f"pool {pool['pool']}: {str(trouble).partition(chr(10))[0]}"
    ill = sum(not ingress["healthy"] for ingress in ingresses)
    if ill:
        yield f"{ill} of {len(ingresses)} ingresses cannot serve"
    unjoined = {name for ingress in ingresses for name in ingress["unjoined"]}
    if unjoined:
        yield f"not joined everywhere: {', '.join(sorted(unjoined))}"
    if failures := sum(ingress.get("policy", {}).get("failures", 0) for ingress in ingresses):
        yield f"the placement policy failed {failures} times, see 'baton status'"
