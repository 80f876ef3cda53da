"""Keys of autoscaling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

from baton.config.language.bounds import Positive
from baton.config.language.scalars import Bounds, Pluggable
from baton.policy.scaling.options import AutoscalerOptions, ScalingRule

_OPTIONS = AutoscalerOptions()
_Cooldown = Bounds(low=0, high=7 * 86_400)

MOVED_POLICIES: Final = {
    "hpa": "benchmarks.policies.hpa:Hpa",
    "kpa": "benchmarks.policies.kpa:Kpa",
    "dynamo": "benchmarks.policies.dynamo_planner:DynamoPlanner",
    "wva": "benchmarks.policies.wva:Wva",
}
"""Former names of policies, and their present places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpConfig:
    """Speed at which a pool may grow."""

    cooldown_s: Annotated[float, _Cooldown] = _OPTIONS.scale_up.cooldown_s
    """Since the pool's last change."""
    max_step: Annotated[int, Positive] = _OPTIONS.scale_up.max_step
    """Replicas at a time; half of the pool where that is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDownConfig:
    """Speed at which a pool may shrink."""

    cooldown_s: Annotated[float, _Cooldown] = _OPTIONS.scale_down.cooldown_s
    """Since the pool's last change."""
    max_step: Annotated[int, Positive] = _OPTIONS.scale_down.max_step
    """Replicas at a time; half of the pool where that is more."""
    headroom: Annotated[float, Bounds(low=0, high=0.9)] = _OPTIONS.scale_down.headroom_fraction
    """Capacity that must stay free after the step, so that it is not undone at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerConfig:
    """Autoscaling, within each pool's `min` and `max`."""

    MAIN_KEY: ClassVar[str] = "policy"

    policy: Annotated[str, Pluggable(ScalingRule, MOVED_POLICIES)] = ScalingRule.SLO
    """A policy's name, or your own function that creates one."""
    interval_s: Annotated[float, Bounds(low=0.1, high=3_600)] = _OPTIONS.interval_s
    """Between two decisions."""
    gpu_budget: Annotated[float | None, Bounds(low=1)] = _OPTIONS.gpu_budget
    """GPUs of all pools together, at least those of the initial replicas; a replica without GPUs
    counts one for each of its workers."""
    scale_up: ScaleUpConfig = field(default_factory=ScaleUpConfig)
    scale_down: ScaleDownConfig = field(default_factory=ScaleDownConfig)
    scale_to_zero: bool = _OPTIONS.scale_to_zero
    """Stop the last replica of pools whose `min` is 0 when there are no requests."""
    dry_run: bool = _OPTIONS.dry_run
    """Log decisions and change nothing."""
