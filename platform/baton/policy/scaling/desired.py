"""The answer of a scaling policy, and the port that every policy matches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from baton.domain.fleet import Role
from baton.policy.scaling.observation import Observation


class ScalingReason(StrEnum):
    """Why a pool should have as many replicas as it should (a metric label, hence an enum)."""

    STEADY = "steady"
    """As many as there are."""
    DEMAND = "demand"
    """Present demand needs this many."""
    FORECAST = "forecast"
    """The demand at the time when a new replica would be ready needs this many."""
    LATE_REQUESTS = "late_requests"
    """Requests that wait now would be late."""
    ROLE_FLIP = "role_flip"
    """Another role has replicas to spare."""
    SURPLUS = "surplus"
    """Fewer will do, and have done for a while."""
    IDLE = "idle"
    """Nothing is asked for."""
    UTILIZATION = "utilization"
    CONCURRENCY = "concurrency"
    PANIC = "panic"
    LATENCY = "latency"
    FIXED = "fixed"
    ORACLE = "oracle"
    """The future was known (simulated only)."""
    OVERRIDE = "override"
    """An operator's override."""
    PAUSED = "paused"
    """Something could not be seen, so nothing is changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredReplicas:
    """How many replicas one pool should have, ready or starting, by present role."""

    replicas: int
    reason: ScalingReason
    detail: str = ""
    """In words, with numbers."""
    inputs: Mapping[str, float] = field(default_factory=dict)
    """Its inputs, by name with unit."""
    role_flips: Mapping[Role, int] = field(default_factory=dict)
    """How many of its replicas should play another role than the pool's own."""


class ScalingPolicy(Protocol):
    """A rule for how many replicas there should be; it may remember what it has seen.

    Bounds, budgets, pauses between changes and an operator's word are not its business: see
    `control.autoscaling.autoscaler`.
    """

    name: str

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """The desired replicas of every pool in `observation`.

        Called once a tick, `observation.at_s` going up.
        """
        ...
