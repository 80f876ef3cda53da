"""Scaling and objectives in plain values, for operators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, assert_never

from baton.control.accounting.class_counts import ClassCounts
from baton.control.autoscaling.autoscaler import Override
from baton.control.autoscaling.observer import Observer
from baton.domain.slo import Slo
from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingAction,
    ScalingDecision,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.observation import Observation
from baton.serving.ray.serve_control import DeploymentState

Row = Mapping[str, object]


class RecentClassStats(NamedTuple):
    """One class over the observer's window."""

    counts: ClassCounts = ClassCounts()
    ended_per_s: float = 0.0
    good_per_s: float = 0.0


def recent_class_stats(observer: Observer) -> Mapping[str, RecentClassStats]:
    """Every class with ended requests, by name; rates of coordinators add up."""
    stats: dict[str, RecentClassStats] = {}
    for before, now, span_s in observer.class_spans():
        if span_s <= 0:
            continue
        for name, counts in now.items():
            delta = counts - before.get(name, ClassCounts())
            known = stats.get(name, RecentClassStats())
            stats[name] = RecentClassStats(
                known.counts + delta,
                known.ended_per_s + max(0, delta.ended) / span_s,
                known.good_per_s + max(0, delta.good) / span_s,
            )
    return stats


def class_rows(slos: Mapping[str, Slo], observer: Observer, now_s: float) -> list[Row]:
    """Each class: objectives, current attainment, and that over the window of its target."""
    recent = recent_class_stats(observer)
    rows: list[Row] = []
    for name, slo in sorted(slos.items()):
        current = recent.get(name, RecentClassStats())
        rows.append(
            {
                "class": name,
                "ttft_s": slo.ttft_s,
                "tpot_s": slo.tpot_s,
                "target": slo.attainment_target,
                "attainment": _rounded(current.counts.attainment),
                "ttft_attainment": _rounded(current.counts.share(current.counts.ttft_met)),
                "tpot_attainment": _rounded(current.counts.share(current.counts.tpot_met)),
                "requests_per_s": round(current.ended_per_s, 3),
                "goodput_per_s": round(current.good_per_s, 3),
                "window_attainment": _rounded(
                    observer.cluster_totals.counts_in_window(slo, now_s).attainment
                ),
                "rejected": current.counts.refused,
                "failed": current.counts.failed,
            }
        )
    return rows


def pool_rows(
    observation: Observation | None,
    states: Mapping[str, DeploymentState],
    tick: AutoscalerTick | None = None,
) -> list[Row]:
    """Each pool: desired replicas, and the states of existing replicas.

    With the last tick also what the scaling policy asked for, and which bound limited it.
    """
    decisions = {} if tick is None else {decision.pool: decision for decision in tick.decisions}
    rows: list[Row] = []
    for name, state in sorted(states.items()):
        row: dict[str, object] = {"pool": name, "desired": state.target}
        pool = None if observation is None else observation.pools.get(name)
        row |= {
            "ready": state.running if pool is None else pool.ready_replicas,
            "starting": state.starting if pool is None else pool.starting,
            "draining": state.stopping if pool is None else pool.draining,
        }
        if pool is not None:
            row |= {
                "prefill": pool.prefill,
                "decode": pool.decode,
                "mixed": pool.mixed,
                "cold_start_s": round(pool.cold_start_s, 1),
                "busy": _rounded(pool.utilization_fraction),
            }
        if (decision := decisions.get(name)) is not None and decision.limited_by:
            row |= {"asked": decision.desired_replicas, "limited_by": decision.limited_by}
        rows.append(row | ({"trouble": state.message} if state.message else {}))
    return rows


def demand_row(observation: Observation | None) -> Row | None:
    """Demand over the window, and the queue; None before the first observation."""
    if observation is None:
        return None
    service, demand = observation.service, observation.demand
    return {
        "requests_per_s": round(demand.requests_per_s, 3),
        "prompt_tokens_per_s": round(demand.prompt_tokens_per_s, 1),
        "output_tokens_per_s": round(demand.output_tokens_per_s, 1),
        "rejected_per_s": round(service.rejected_per_s, 3),
        "attainment": _rounded(service.attainment),
        "in_flight": service.in_flight,
        "queued": service.queued_requests,
        "slack_s": _rounded(service.min_ttft_slack_s),
        "window_s": round(observation.window_s, 1),
    }


def override_rows(overrides: Mapping[str, Override], now_s: float) -> list[Row]:
    """The overrides of operators."""
    return [
        {"pool": pool, "replicas": override.replicas, "remaining_s": remaining_s(override, now_s)}
        for pool, override in sorted(overrides.items())
    ]


def remaining_s(override: Override, now_s: float) -> float | None:
    """Seconds until an override expires; None: it stays until it is released."""
    return None if override.until_s is None else round(max(0.0, override.until_s - now_s), 1)


def tick_rows(ticks: Iterable[AutoscalerTick], now_s: float) -> list[Row]:
    """One row a tick, in the order given."""
    return [_tick_row(tick, now_s) for tick in ticks]


def action_text(action: ScalingAction) -> str:
    """`start 2 of decode`, `flip 1 of prefill to decode`."""
    match action:
        case StartReplicas():
            return f"start {action.replicas} of {action.pool}"
        case StopReplicas():
            return f"stop {action.replicas} of {action.pool}"
        case FlipReplicas():
            return f"flip {action.replicas} of {action.pool} to {action.role}"
        case _:
            assert_never(action)


def _tick_row(tick: AutoscalerTick, now_s: float) -> Row:
    return {
        "age_s": round(now_s - tick.at_s, 3),
        "policy": tick.policy,
        "paused_reason": tick.paused_reason,
        "dry_run": tick.dry_run,
        "actions": [action_text(action) for action in tick.actions],
        "pools": [_decision_row(decision) for decision in tick.decisions],
    }


def _decision_row(decision: ScalingDecision) -> Row:
    return {
        "pool": decision.pool,
        "have": decision.current_replicas,
        "desired": decision.target_replicas,
        "asked": decision.desired_replicas,
        "reason": str(decision.reason),
        "detail": decision.detail,
        "clipped_by": decision.limited_by,
        "flips": {str(role): replicas for role, replicas in decision.role_flips.items()},
        "inputs": {name: _rounded(value) for name, value in decision.inputs.items()},
    }


def _rounded(value: float | None) -> float | None:
    """JSON has no infinities; None stands for them."""
    return None if value is None or not math.isfinite(value) else round(value, 6)
