"""The operator's options of scaling, and the bounds of every policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ScalingRule(StrEnum):
    """The policies that ship."""

    SLO = "slo"
    """baton's own."""
    STATIC = "static"
    """As many as the configuration starts with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How fast a pool may change in one direction."""

    cooldown_s: float = 0.0
    """Since the last change of that pool, in whichever direction."""
    max_step: int = 4
    """Replicas at a time, ..."""
    max_fraction: float = 0.5
    """... or this share of the pool, where that is more: large pools change as fast as small
    pools."""
    headroom_fraction: float = 0.2
    """Down only: the free share that must remain after a step down, so that it need not be undone.
    It is at most 0.6 replicas, or half of this share where that is more, for the need of a large
    pool wavers by a smaller part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBounds:
    """How many replicas a pool may have."""

    min: int = 1
    initial: int = 1
    max: int = 1
    gpus_per_replica: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SloScalingOptions:
    """The options of baton's own policy."""

    quantile: float = 0.3
    """Of its own recent errors, by which a forecast is raised. Below the median: needs have
    headroom for the tail of their own, and bursts pass sooner than replicas start. Found by trying
    on the bursts of `make bench-slo`; for its fortnight it hardly matters."""
    flips: bool = True
    """Whether replicas may play another role than their pool's while it is short of them."""
    flip_window_s: float = 30.0
    """For so long a role must have had replicas to spare before one of them is flipped."""
    flip_urgent_s: float = 6.0
    """For so long needs are looked at where requests suffer and nothing can be started."""
    flip_lead_s: float = 10.0
    """How far ahead a flip looks while streams increase. It is about the time until their number is
    reached, and the limit of a forecast from a window as short as that of urgent flips. Where ticks
    are so rare that three do not fall into that, it does not look ahead."""
    flip_dwell_s: float = 120.0
    """Between a flip one way and the next the other way."""
    clear_backlog_s: float = 10.0
    """Within which a backlog that would be late is to be worked off."""
    surplus_cooldowns: float = 0.5
    """How long a pool without any need is kept after it has grown, in cooldowns of stops, and one
    cold start more. A partly needed pool stays longer in proportion."""
    max_correction: float = 2.0
    """The most by which needs are raised when requests are late although there should be enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerOptions:
    """The options of all policies."""

    interval_s: float = 2.0
    gpu_budget: float | None = None
    """GPUs of all pools together; None for no bound but those of the pools."""
    scale_up: StepLimits = StepLimits(cooldown_s=0.0, max_step=4)
    scale_down: StepLimits = StepLimits(cooldown_s=360.0, max_step=1)
    """`cooldown_s` is also the window over which baton's own policy looks back for the greatest
    need. A need within six minutes is kept, and surplus goes sooner than by the cooldown alone:
    found by trying on both loads of `make bench-slo`."""
    scale_to_zero: bool = False
    """Pools with `min` 0 may lose their last replica when there was no demand."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""
    bounds: Mapping[str, PoolBounds] = field(default_factory=dict)
    """By pool."""
    slo: SloScalingOptions = SloScalingOptions()
