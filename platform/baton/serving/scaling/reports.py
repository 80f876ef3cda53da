"""Scaling and objectives in plain values, for operators: what stands, what was decided, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, assert_never

from baton.control.accounting.class_counts import ClassCounts
from baton.control.autoscaling.autoscaler import Override
from baton.control.autoscaling.observer import Observer
from baton.domain.slo import Slo
from baton.policy.scaling.actions import (
    Action,
    FlipReplicas,
    ScalingDecision,
    StartReplicas,
    StopReplicas,
    Tick,
)
from baton.policy.scaling.observation import Observation
from baton.serving.ray.serve_control import DeploymentState

Row = Mapping[str, object]


class Lately(NamedTuple):
    """One class over the observer's window."""

    counts: ClassCounts = ClassCounts()
    ended_per_s: float = 0.0
    good_per_s: float = 0.0


def lately(observer: Observer) -> Mapping[str, Lately]:
    """Every class of which requests have ended, by name; rates of coordinators add up."""
    found: dict[str, Lately] = {}
    for before, now, span_s in observer.spans():
        if span_s <= 0:
            continue
        for name, counts in now.items():
            done = counts - before.get(name, ClassCounts())
            known = found.get(name, Lately())
            found[name] = Lately(
                known.counts + done,
                known.ended_per_s + max(0, done.ended) / span_s,
                known.good_per_s + max(0, done.good) / span_s,
            )
    return found


def class_rows(slos: Mapping[str, Slo], observer: Observer, now_s: float) -> list[Row]:
    """Each class: what it is promised, how it fares now, and over the window of its target."""
    recent = lately(observer)
    rows: list[Row] = []
    for name, slo in sorted(slos.items()):
        now = recent.get(name, Lately())
        rows.append(
            {
                "class": name,
                "ttft_s": slo.ttft_s,
                "tpot_s": slo.tpot_s,
                "target": slo.attainment_target,
                "attainment": _rounded(now.counts.attainment),
                "requests_per_s": round(now.ended_per_s, 3),
                "goodput_per_s": round(now.good_per_s, 3),
                "window_attainment": _rounded(observer.ledgers.attained(slo, now_s).attainment),
                "refused": now.counts.refused,
                "failed": now.counts.failed,
            }
        )
    return rows


def pool_rows(seen: Observation | None, states: Mapping[str, DeploymentState]) -> list[Row]:
    """Each pool: how many replicas it is to have, and what those it has do."""
    rows: list[Row] = []
    for name, state in sorted(states.items()):
        row: dict[str, object] = {"pool": name, "want": state.target}
        pool = None if seen is None else seen.pools.get(name)
        row |= {
            "ready": state.running if pool is None else pool.ready,
            "starting": state.starting if pool is None else pool.starting,
            "draining": state.stopping if pool is None else pool.draining,
        }
        if pool is not None:
            row |= {
                "prefill": pool.prefill,
                "decode": pool.decode,
                "mixed": pool.mixed,
                "cold_start_s": round(pool.cold_start_s, 1),
                "busy": _rounded(pool.busy_fraction),
            }
        rows.append(row | ({"trouble": state.message} if state.message else {}))
    return rows


def demand_row(seen: Observation | None) -> Row | None:
    """What was asked for over the window, and who waits; None before anything was seen."""
    if seen is None:
        return None
    service, demand = seen.service, seen.demand
    return {
        "requests_per_s": round(demand.requests_per_s, 3),
        "prompt_tokens_per_s": round(demand.prompt_tokens_per_s, 1),
        "output_tokens_per_s": round(demand.output_tokens_per_s, 1),
        "refused_per_s": round(service.refused_per_s, 3),
        "attainment": _rounded(service.attainment),
        "in_flight": service.in_flight,
        "held": service.held,
        "slack_s": _rounded(service.slack_s),
        "window_s": round(seen.window_s, 1),
    }


def override_rows(overrides: Mapping[str, Override], now_s: float) -> list[Row]:
    """What operators have said."""
    return [
        {"pool": pool, "replicas": one.replicas, "remaining_s": remaining_s(one, now_s)}
        for pool, one in sorted(overrides.items())
    ]


def remaining_s(override: Override, now_s: float) -> float | None:
    """How much longer it holds; None: until it is taken back."""
    return None if override.until_s is None else round(max(0.0, override.until_s - now_s), 1)


def tick_rows(ticks: Iterable[Tick], now_s: float) -> list[Row]:
    """One row a tick, in the order given."""
    return [_tick(tick, now_s) for tick in ticks]


def action_text(action: Action) -> str:
    """`start 2 of decode`, `flip 1 of prefill to decode`."""
    match action:
        case StartReplicas():
            return f"start {action.replicas} of {action.pool}"
        case StopReplicas():
            return f"stop {action.replicas} of {action.pool}"
        case FlipReplicas():
            return f"flip {action.replicas} of {action.pool} to {action.to}"
        case _:
            assert_never(action)


def _tick(tick: Tick, now_s: float) -> Row:
    return {
        "age_s": round(now_s - tick.at_s, 3),
        "policy": tick.policy,
        "held": tick.held,
        "dry_run": tick.dry_run,
        "actions": [action_text(action) for action in tick.actions],
        "pools": [_decision(decision) for decision in tick.decisions],
    }


def _decision(decision: ScalingDecision) -> Row:
    return {
        "pool": decision.pool,
        "have": decision.have,
        "want": decision.want,
        "asked": decision.asked,
        "reason": str(decision.reason),
        "why": decision.why,
        "clipped_by": decision.clipped_by,
        "flips": {str(role): replicas for role, replicas in decision.flips.items()},
        "inputs": {name: _rounded(value) for name, value in decision.inputs.items()},
    }


def _rounded(value: float | None) -> float | None:
    """JSON has no infinities; None says that there was no number."""
    return None if value is None or not math.isfinite(value) else round(value, 6)
