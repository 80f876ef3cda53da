"""The edges of histograms' buckets: those that every process has, and those of its configuration.

*Theory of operation.* A histogram has the catalogue's edges. It has one more at each class's
objective for what it observes, and at each timeout that bounds it. So the share within either is
exact, and no quantile ends below what a timeout permits.

Objectives and most timeouts can be applied to a deployment that runs. Then a bucket at a new edge
knows nothing of what was observed before, nor of ingresses that go by another generation. Added up
by `le` alone, it would be too small beside its neighbours, and `histogram_quantile` wrong without a
word. So each set of edges has series of its own, told apart by the label `edges`. Its value is a
digest of the edges: ingresses that have the same ones are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import assert_never

from prometheus_client.utils import floatToGoString

from baton.control.state.limits import CoordinatorLimits
from baton.domain.slo import Slo
from baton.telemetry.catalogue import CATALOGUE, Deadline, Kind, Metric, Objective

_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedEdges:
    """What another configuration means to one histogram."""

    metric: Metric
    added_s: tuple[float, ...]
    removed_s: tuple[float, ...]

    def __str__(self) -> str:
        new = [f"+{edge_s:g} s" for edge_s in self.added_s]
        old = [f"-{edge_s:g} s" for edge_s in self.removed_s]
        return f"{self.metric.name}: {', '.join((*new, *old))}"


def edges_of(
    metric: Metric, classes: Iterable[Slo], limits: CoordinatorLimits
) -> tuple[float, ...]:
    """All edges of a histogram in ascending order, but for the one at infinity."""
    objective = metric.objective
    objectives = () if objective is None else [_objective_s(objective, slo) for slo in classes]
    timeouts_s = _deadlines_s(limits)
    deadlines = [timeouts_s[deadline] for deadline in metric.deadlines]
    configured = {edge_s for edge_s in (*objectives, *deadlines) if edge_s is not None}
    return tuple(sorted({*metric.edges, *configured}))


def all_edges(
    classes: Iterable[Slo], limits: CoordinatorLimits
) -> Mapping[Metric, tuple[float, ...]]:
    """The edges of each histogram of the catalogue."""
    classes = tuple(classes)
    histograms = (metric for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM)
    return {metric: edges_of(metric, classes, limits) for metric in histograms}


def changed_edges(
    old: Mapping[Metric, tuple[float, ...]], new: Mapping[Metric, tuple[float, ...]]
) -> tuple[ChangedEdges, ...]:
    """Each histogram whose edges differ, in the catalogue's order."""
    return tuple(
        ChangedEdges(
            metric=metric,
            added_s=tuple(sorted({*new[metric]} - {*old[metric]})),
            removed_s=tuple(sorted({*old[metric]} - {*new[metric]})),
        )
        for metric in new
        if new[metric] != old[metric]
    )


def digest(edges: Iterable[float]) -> str:
    """The value of the label `edges`: the same for the same edges, in every process."""
    text = ",".join(map(floatToGoString, edges))
    return sha256(text.encode()).hexdigest()[:_DIGITS]


def _objective_s(objective: Objective, slo: Slo) -> float | None:
    match objective:
        case Objective.TTFT:
            return slo.ttft_s
        case Objective.TPOT:
            return slo.tpot_s
        case Objective.ITL:
            return slo.itl_p99_s
        case Objective.GOODPUT:
            raise ValueError("goodput: has no seconds, expected an objective for a latency")
        case _:
            assert_never(objective)


def _deadlines_s(limits: CoordinatorLimits) -> Mapping[Deadline, float]:
    return {
        Deadline.QUEUE_WAIT: limits.queue_timeout_s,
        Deadline.FIRST_TOKEN: limits.first_token_timeout_s,
        Deadline.STALL: limits.stall_timeout_s,
        Deadline.RESUME: limits.resume_timeout_s,
        Deadline.TOTAL: limits.total_timeout_s,
        Deadline.TRANSFER: limits.transfer_deadline_s,
        Deadline.LEASE: limits.lease_s,
    }
