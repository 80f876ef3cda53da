"""A rollout: replicas replaced stage by stage, watched, and given up when the new ones are worse.

Theory of operation. Each stage is one order to Serve: these deployments have their new build from
now on, all others what they had. Serve starts a new replica, stops an old one when the new one
serves, and goes on; it gives up by itself when a new one does not start three times in a row, and
then keeps the old ones. Meanwhile the fleet is looked at twice a second, and judged
(`control.rollout`). The next stage begins when this one is good. Whatever else ends it, Ctrl-C
among it, ends it as a stage that is no good does. Nothing is taken back here: whoever asked for the
rollout decides that, and knows by the `Outcome` how far it came. Only who has lost the right to
change anything hears of it by an error, for what runs is somebody else's to decide then.

A look may fail, for whoever is asked may just be replaced; only the deadline ends that. So may an
order on the way back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.control.autoscaling.rollout import (
    NOTHING,
    RolloutRules,
    Step,
    Tally,
    Trial,
    Verdict,
    judge,
)
from baton.domain.errors import ApplyRefused, BatonError, ClusterFailed
from baton.serving.application.builds import Builds

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The fleet at one moment of a rollout."""

    done: bool = False
    """Everything runs as it was ordered."""
    failed: str = ""
    """Why Serve has given up; empty while it has not."""
    ready: frozenset[str] = frozenset()
    """The ids of the replicas that serve, of the pools that were asked about."""
    starting: frozenset[str] = frozenset()
    """Those of replicas that are to."""
    targets: Mapping[str, int] = field(default_factory=dict)
    """By pool, how many there are to be."""
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    """By replica, what all ingresses together have seen it do."""


class Rolled(Protocol):
    """A deployment whose replicas can be replaced. All calls block, and have a deadline."""

    def note(self, told: Mapping[str, object]) -> None:
        """Write down how far it is, for whoever asks."""
        ...

    def order(self, builds: Builds) -> None:
        """Have everything built so, from now on; returns at once.

        Raises:
            ClusterFailed: Serve did not take it.
            ApplyRefused: somebody else is changing it now.
        """
        ...

    def look(self, pools: Sequence[str]) -> Sight | None:
        """How far it is, and how these pools fare; None when nobody could say.

        Raises:
            ApplyRefused: somebody else is changing it now.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What becomes what, in which order."""

    old: Builds
    new: Builds
    stages: tuple[tuple[str, ...], ...]

    def builds(self, reached: int) -> Builds:
        """What everything is built from when that many stages have begun."""
        begun = {name for stage in self.stages[:reached] for name in stage}
        return {
            name: self.new[name] if name in begun else build for name, build in self.old.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How it is done, as far as whoever asks may choose; by which clock, and who is told of it."""

    by: str = "apply"
    """What this is, in the history."""
    dry_run: bool = False
    wait: bool = True
    """Watch it to its end; otherwise give the order and leave it to Serve."""
    rollback: bool = True
    """Take back what does not work out."""
    rules: RolloutRules = field(default_factory=RolloutRules)
    stage_s: float = 600.0
    """Until the replicas of a stage are replaced, without what they bake."""
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    tell: Callable[[str], None] = lambda _line: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a rollout."""

    reached: int
    """Stages that were begun."""
    failed: str = ""
    """Why it was given up; empty: all stages are good."""
    why: tuple[str, ...] = ()
    """By stage, what it was found good by."""


def rolled(
    fleet: Rolled, course: Course, manner: Manner, *, generation: int | None = None
) -> Outcome:
    """Go through the stages until one is no good, and write down how far it is.

    Raises:
        ApplyRefused: somebody else is changing it now, so that nothing must be taken back.
    """
    about = {"what": manner.by, "generation": generation}

    def tell(line: str) -> None:
        fleet.note({**about, "state": "under way", "why": line})
        manner.tell(line)

    if not manner.wait:
        tell("all stages at once, and nobody watches")
        fleet.order(course.builds(len(course.stages)))
        return Outcome(reached=len(course.stages), why=("not watched",))
    outcome = _roll_out(fleet, course, replace(manner, tell=tell))
    state, why = ("failed", outcome.failed) if outcome.failed else ("done", "; ".join(outcome.why))
    fleet.note({**about, "state": state, "why": why})
    return outcome


def ordered_back(fleet: Rolled, course: Course, builds: Builds, manner: Manner) -> tuple[str, ...]:
    """Have these builds again, and wait until they run; what went wrong."""
    names = tuple(name for stage in course.stages for name in stage)
    about = {"what": f"{manner.by}, taken back"}
    fleet.note({**about, "state": "under way", "why": f"replacing {', '.join(names)}"})
    until_s = manner.now_s() + manner.stage_s
    why = ordered(fleet, builds, manner)
    why = why or f"the old replicas were not back after {manner.stage_s:.0f} s"
    while manner.now_s() < until_s:
        sight = fleet.look(names)
        if sight is not None and (sight.done or sight.failed):
            why = sight.failed
            break
        manner.sleep(_LOOK_S)
    fleet.note({**about, "state": "failed" if why else "done", "why": why})
    return (why,) if why else ()


def ordered(fleet: Rolled, builds: Builds, manner: Manner) -> str:
    """Have everything built so, asked for again where Serve does not take it; why it never did.

    What kept it from going on, as Serve's controller that starts again, keeps it from going back
    for a moment, too.
    """
    until_s = manner.now_s() + manner.stage_s
    while True:
        try:
            fleet.order(builds)
        except ClusterFailed as error:
            if manner.now_s() >= until_s:
                return error.why
            manner.sleep(_LOOK_S)
        else:
            return ""


def _roll_out(fleet: Rolled, course: Course, manner: Manner) -> Outcome:
    """Go through the stages until one is no good, or something or somebody ends it."""
    reached, failed = 0, ""
    why: list[str] = []
    try:
        for number, stage in enumerate(course.stages, start=1):
            manner.tell(f"replacing {', '.join(stage)} ({number} of {len(course.stages)})")
            until_s = manner.now_s() + manner.stage_s
            before = _first_look(fleet, stage, until_s, manner)
            if before is None:
                return Outcome(reached=reached, failed="nobody says what runs", why=tuple(why))
            reached = number
            fleet.order(course.builds(number))
            verdict = _watched(fleet, _Watch(stage, before, manner), until_s)
            if verdict.step is Step.ROLL_BACK:
                return Outcome(reached=reached, failed=verdict.why, why=tuple(why))
            why.append(f"{', '.join(stage)}: {verdict.why}")
            manner.tell(why[-1])
    except KeyboardInterrupt:
        failed = "interrupted"
    except ApplyRefused:
        raise
    except (BatonError, OSError) as error:
        failed = f"{type(error).__name__}: {error}"
    return Outcome(reached=reached, failed=failed, why=tuple(why))


class _Watch:
    """What is remembered of one stage between two looks."""

    def __init__(self, stage: Sequence[str], before: Sight, manner: Manner) -> None:
        self.stage = stage
        self.manner = manner
        self._old = before.ready | before.starting
        self._targets = dict(before.targets)
        """How many replicas each pool was to have when it was looked at last."""
        self._told_to = 0
        """Replicas that were told to end so far: whoever is started later is another."""
        self._born: set[str] = set()
        self._done_at_s: float | None = None

    def judged(self, sight: Sight, now_s: float) -> Verdict:
        """What to do, by this look and those before."""
        if sight.failed:
            return Verdict(step=Step.ROLL_BACK, why=sight.failed)
        if sight.done and self._done_at_s is None:
            self._done_at_s = now_s
        self._born |= sight.ready - self._old
        for pool, target in sight.targets.items():
            self._told_to += max(0, self._targets.get(pool, target) - target)
            self._targets[pool] = target
        trial = Trial(
            old=_sum(sight.tallies, self._old),
            new=_sum(sight.tallies, self._born),
            deaths=max(0, len(self._born - sight.ready) - self._told_to),
            baked_s=None if self._done_at_s is None else now_s - self._done_at_s,
        )
        return judge(trial, self.manner.rules)

    def late(self, now_s: float, until_s: float) -> str:
        """Why it is waited for no longer; empty while it is.

        What was done once bakes, and is not late; when it has baked, any look brings a verdict.
        """
        stage_s = self.manner.stage_s
        why = f"not replaced after {stage_s:.0f} s; see --timeout"
        if self._done_at_s is not None:
            until_s = self._done_at_s + self.manner.rules.bake_s + stage_s
            why = f"nobody has said for {stage_s:.0f} s how they fare"
        return f"{', '.join(self.stage)}: {why}" if now_s >= until_s else ""


def _first_look(
    fleet: Rolled, stage: Sequence[str], until_s: float, manner: Manner
) -> Sight | None:
    """What there is before anything is replaced; None when nobody said it in time."""
    while (sight := fleet.look(stage)) is None and manner.now_s() < until_s:
        manner.sleep(_LOOK_S)
    return sight


def _watched(fleet: Rolled, watch: _Watch, until_s: float) -> Verdict:
    """What a stage comes to, by looking again and again."""
    manner = watch.manner
    while True:
        sight, now_s = fleet.look(watch.stage), manner.now_s()
        if sight is not None:
            verdict = watch.judged(sight, now_s)
            if verdict.step is not Step.HOLD:
                return verdict
        if why := watch.late(now_s, until_s):
            return Verdict(step=Step.ROLL_BACK, why=why)
        manner.sleep(_LOOK_S)


def _sum(tallies: Mapping[str, Tally], ids: Iterable[str]) -> Tally:
    total = NOTHING
    for replica_id in ids:
        total = total.plus(tallies.get(replica_id, NOTHING))
    return total
