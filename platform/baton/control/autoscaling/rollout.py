"""Whether a new generation of replicas may go on taking the place of an old one: a pure judgement.

Theory of operation. Replicas are replaced in *stages*, one pool after the other. While a stage is
under way, and for a while after (it *bakes*), what was done on new replicas is compared with what
was done on those that they replace: legs that broke, and requests that missed what they were
promised. New ones that are worse beyond chance, that end by themselves, or on which nearly
everything breaks, are taken back. Nothing is guessed from few requests: then the time decides, and
the verdict says so.

"Beyond chance" is said by Wilson's interval: the lower end for the new must lie above the upper end
for the old, and by more than a margin. It is looked at many times in a rollout, so the interval is
wide: at z = 3 a single look errs about once in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.domain.fleet import Role


class Tally(NamedTuple):
    """What some replicas have done since they started."""

    legs: int = 0
    """That ran to their end or broke; those moved or cancelled are nobody's fault."""
    broken: int = 0
    judged: int = 0
    """Requests that they took part in and that were good or missed."""
    good: int = 0

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Tally()


class Step(StrEnum):
    """What to do now."""

    HOLD = "hold"
    """Look again in a moment; no further stage begins."""
    GO_ON = "go on"
    """This stage is good; the next may begin."""
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do, and why in words."""

    step: Step
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRules:
    """How strict the judgement is."""

    bake_s: float = 10.0
    """How long new replicas must have served, after the last one of a stage."""
    z: float = 3.0
    """Width of the intervals, in standard deviations."""
    broken_margin: float = 0.01
    """Fraction of legs by which new replicas may be worse."""
    missed_margin: float = 0.1
    """Fraction of requests likewise: new replicas begin with cold caches."""
    hopeless: float = 0.5
    """With nothing to compare with, more broken legs than this are too many."""
    few_legs: int = 20
    """A verdict on fewer says that it rests on little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was seen of one stage."""

    old: Tally = NOTHING
    new: Tally = NOTHING
    deaths: int = 0
    """New replicas that were ready, and ended without having been told to."""
    baked_s: float | None = None
    """Since the last replica of the stage was replaced; None while some are to come."""


def judge(trial: Trial, rules: RolloutRules) -> Verdict:
    """What to do, by what has been seen so far."""
    if why := _too_bad(trial, rules):
        return Verdict(step=Step.ROLL_BACK, why=why)
    if trial.baked_s is None:
        return Verdict(step=Step.HOLD, why="replicas are being replaced")
    if trial.baked_s < rules.bake_s:
        left_s = rules.bake_s - trial.baked_s
        return Verdict(step=Step.HOLD, why=f"watched for {left_s:.0f} s more")
    if trial.new.legs < rules.few_legs:
        why = f"only {trial.new.legs} legs ran on new replicas, too few to compare"
        return Verdict(step=Step.GO_ON, why=why)
    why = f"{_share(trial.new.broken, trial.new.legs)} of legs broke, and nobody ended"
    return Verdict(step=Step.GO_ON, why=why)


def stages(pools: Mapping[str, Role], *, together: bool) -> tuple[tuple[str, ...], ...]:
    """In which order to replace the replicas of some pools.

    Those that decode come first: a decode pool can prefill as well, so once it is proven, the
    fleet can live without the other. Where the generations cannot exchange KV blocks, all pools
    change `together`, so that old prefill replicas keep old decode replicas, and new ones new.
    """
    if together:
        return (tuple(sorted(pools)),) if pools else ()
    first = sorted(name for name, role in pools.items() if role is not Role.PREFILL)
    last = sorted(name for name, role in pools.items() if role is Role.PREFILL)
    return tuple((name,) for name in (*first, *last))


def interval(hits: int, of: int, z: float) -> tuple[float, float]:
    """Where the true fraction lies, by Wilson's score interval; all of 0..1 when nothing was seen.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22 (1927).
    """
    if of <= 0:
        return 0.0, 1.0
    share, weight = hits / of, z * z / of
    middle = share + weight / 2
    spread = z * math.sqrt(share * (1 - share) / of + weight / (4 * of))
    return max(0.0, (middle - spread) / (1 + weight)), min(1.0, (middle + spread) / (1 + weight))


def _too_bad(trial: Trial, rules: RolloutRules) -> str:
    """Why new replicas cannot stay; empty when nothing speaks against them."""
    old, new = trial.old, trial.new
    if trial.deaths > 0:
        return f"{trial.deaths} new replicas ended by themselves"
    if _worse((new.broken, new.legs), (old.broken, old.legs), rules.z, rules.broken_margin):
        now, before = _share(new.broken, new.legs), _share(old.broken, old.legs)
        return f"{now} of {new.legs} legs broke on new replicas, {before} on old ones"
    if not old.legs and interval(new.broken, new.legs, rules.z)[0] > rules.hopeless:
        return f"{_share(new.broken, new.legs)} of {new.legs} legs broke on new replicas"
    missed_now, missed_before = new.judged - new.good, old.judged - old.good
    if _worse((missed_now, new.judged), (missed_before, old.judged), rules.z, rules.missed_margin):
        now, before = _share(missed_now, new.judged), _share(missed_before, old.judged)
        return (
            f"{now} of {new.judged} requests missed an objective on new replicas, {before} before"
        )
    return ""


def _worse(new: tuple[int, int], old: tuple[int, int], z: float, margin: float) -> bool:
    """Whether a fraction is higher than before, by more than chance and a margin."""
    return bool(old[1]) and interval(*new, z)[0] > interval(*old, z)[1] + margin


def _share(hits: int, of: int) -> str:
    return f"{hits / of:.0%}" if of else "none"
