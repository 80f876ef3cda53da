"""The decisions of an autoscaler tick, and their actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.domain.fleet import Role
from baton.policy.scaling.desired import ScalingReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReplicas:
    """Ask for more replicas of a pool."""

    pool: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReplicas:
    """Let replicas of a pool drain and stop; the executor of the action chooses them."""

    pool: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipReplicas:
    """Have replicas of a pool play another role from now on; nothing is restarted."""

    pool: str
    replicas: int
    role: Role


ScalingAction = StartReplicas | StopReplicas | FlipReplicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """One pool's part of a tick."""

    pool: str
    current_replicas: int
    """Replicas that take work or are starting."""
    target_replicas: int
    """The number of replicas to have now: the policy's, within every bound."""
    desired_replicas: int
    """The policy's number of replicas."""
    reason: ScalingReason
    detail: str = ""
    inputs: Mapping[str, float] = field(default_factory=dict)
    limited_by: str = ""
    """Which bound stood between `desired_replicas` and `target_replicas`; empty for none.

    "max", "gpu_budget", "cooldown" and others.
    """
    role_flips: Mapping[Role, int] = field(default_factory=dict)
    """How many of its replicas are to play another role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerTick:
    """The decisions of one moment, with all their inputs."""

    at_s: float
    policy: str
    decisions: tuple[ScalingDecision, ...] = ()
    actions: tuple[ScalingAction, ...] = ()
    """In order; empty when nothing changes, also in a dry run."""
    paused_reason: str = ""
    """Why nothing was decided; empty when it was."""
    dry_run: bool = False
