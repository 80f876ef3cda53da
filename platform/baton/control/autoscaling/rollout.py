"""Whether a rollout goes on, waits, or is rolled back: a pure evaluation.

Theory of operation. Replicas are replaced in *stages*, one pool after the other. During a stage and
its *soak*, failed legs and SLO misses of new replicas are compared with those of old replicas. New
replicas are rolled back if they are worse beyond chance, end by themselves, or fail nearly every
leg. Few requests prove nothing: then the time decides, and the decision says so.

Beyond chance means that Wilson's lower bound for the new lies above the upper bound for the old, by
more than a margin. A rollout is evaluated many times, so the interval is wide: at z = 3 a single
evaluation errs about once in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.domain.fleet import Role


class RolloutCounts(NamedTuple):
    """Results on some replicas since they started."""

    legs: int = 0
    """Legs that ran to their end or broke; moved and cancelled legs do not count."""
    failed_legs: int = 0
    evaluated: int = 0
    """Requests that they took part in and that were good or missed."""
    good: int = 0

    def add(self, other: RolloutCounts) -> RolloutCounts:
        """Both together."""
        return RolloutCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NO_COUNTS = RolloutCounts()


class RolloutAction(StrEnum):
    """The next action."""

    HOLD = "hold"
    """Look again in a moment; no further stage begins."""
    PROCEED = "proceed"
    """This stage is good; the next may begin."""
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDecision:
    """The action, and its reason in words."""

    action: RolloutAction
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRules:
    """How strict the judgement is."""

    bake_s: float = 10.0
    """How long new replicas must have served, after the last one of a stage."""
    z: float = 3.0
    """Width of the intervals, in standard deviations."""
    failed_margin_fraction: float = 0.01
    """Fraction of legs by which new replicas may be worse."""
    missed_margin_fraction: float = 0.1
    """Fraction of requests likewise: new replicas begin with cold caches."""
    max_failed_fraction: float = 0.5
    """With nothing to compare with, more broken legs than this are too many."""
    min_legs: int = 20
    """A decision on fewer says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageObservation:
    """The observation of one stage."""

    old: RolloutCounts = NO_COUNTS
    new: RolloutCounts = NO_COUNTS
    crashes: int = 0
    """New replicas that were ready, and ended without an order."""
    baked_s: float | None = None
    """Since the last replica of the stage was replaced; None while some are to come."""


def evaluate_stage(stage: StageObservation, rules: RolloutRules) -> RolloutDecision:
    """The action, by the results so far."""
    if reason := _rollback_reason(stage, rules):
        return RolloutDecision(action=RolloutAction.ROLL_BACK, reason=reason)
    if stage.baked_s is None:
        return RolloutDecision(action=RolloutAction.HOLD, reason="replicas are being replaced")
    if stage.baked_s < rules.bake_s:
        remaining_s = rules.bake_s - stage.baked_s
        return RolloutDecision(
            action=RolloutAction.HOLD, reason=f"watched for {remaining_s:.0f} s more"
        )
    if stage.new.legs < rules.min_legs:
        reason = f"only {stage.new.legs} legs ran on new replicas, too few to compare"
        return RolloutDecision(action=RolloutAction.PROCEED, reason=reason)
    reason = (
        f"{_percentage(stage.new.failed_legs, stage.new.legs)} of legs failed, and no replica ended"
    )
    return RolloutDecision(action=RolloutAction.PROCEED, reason=reason)


def replacement_stages(pools: Mapping[str, Role], *, together: bool) -> tuple[tuple[str, ...], ...]:
    """In which order to replace the replicas of some pools.

    Decode pools come first: a decode pool can prefill as well, so once it is proven, the fleet can
    live without the other. Where the generations cannot exchange KV blocks, all pools change
    `together`, so that old prefill replicas keep old decode replicas, and new replicas are paired
    with new replicas.
    """
    if together:
        return (tuple(sorted(pools)),) if pools else ()
    first = sorted(name for name, role in pools.items() if role is not Role.PREFILL)
    last = sorted(name for name, role in pools.items() if role is Role.PREFILL)
    return tuple((name,) for name in (*first, *last))


def wilson_interval(hits: int, total: int, z: float) -> tuple[float, float]:
    """Where the true fraction lies, by Wilson's score interval; all of 0..1 when nothing was seen.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22 (1927).
    """
    if total <= 0:
        return 0.0, 1.0
    share, weight = hits / total, z * z / total
    middle = share + weight / 2
    spread = z * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return max(0.0, (middle - spread) / (1 + weight)), min(1.0, (middle + spread) / (1 + weight))


def _rollback_reason(stage: StageObservation, rules: RolloutRules) -> str:
    """Why new replicas cannot stay; empty when they can."""
    old, new = stage.old, stage.new
    if stage.crashes > 0:
        return f"{stage.crashes} new replicas ended by themselves"
    if _is_worse(
        (new.failed_legs, new.legs),
        (old.failed_legs, old.legs),
        rules.z,
        rules.failed_margin_fraction,
    ):
        new_share, old_share = (
            _percentage(new.failed_legs, new.legs),
            _percentage(old.failed_legs, old.legs),
        )
        return f"{new_share} of {new.legs} legs broke on new replicas, {old_share} on old ones"
    if (
        not old.legs
        and wilson_interval(new.failed_legs, new.legs, rules.z)[0] > rules.max_failed_fraction
    ):
        return f"{_percentage(new.failed_legs, new.legs)} of {new.legs} legs broke on new replicas"
    missed_new, missed_old = new.evaluated - new.good, old.evaluated - old.good
    if _is_worse(
        (missed_new, new.evaluated),
        (missed_old, old.evaluated),
        rules.z,
        rules.missed_margin_fraction,
    ):
        new_share, old_share = (
            _percentage(missed_new, new.evaluated),
            _percentage(missed_old, old.evaluated),
        )
        return (
            f"{new_share} of {new.evaluated} requests missed an objective on new replicas,"
            f" {old_share} before"
        )
    return ""


def _is_worse(new: tuple[int, int], old: tuple[int, int], z: float, margin: float) -> bool:
    """Whether a fraction is higher than before, by more than chance and a margin."""
    return bool(old[1]) and wilson_interval(*new, z)[0] > wilson_interval(*old, z)[1] + margin


def _percentage(hits: int, total: int) -> str:
    return f"{hits / total:.0%}" if total else "none"
