"""A rollout: replicas replaced stage by stage, watched, and given up when the new ones are worse.

Theory of operation. Each stage is one order to Serve: these deployments have their new build from
now on, all others what they had. Serve starts a new replica, stops an old one when the new one
serves, and goes on; it gives up by itself when a new one does not start three times in a row, and
then keeps the old ones. Meanwhile the fleet is looked at twice a second, and judged
(`control.rollout`). The next stage begins when this one is good. Whatever else ends it, Ctrl-C
among it, ends it as a stage that is no good does. Nothing is taken back here: whoever asked for the
rollout decides that, and knows by the `RolloutResult` how far it came. Only who has lost the right
to change anything hears of it by an error, for what runs is somebody else's to decide then.

A look may fail, for whoever is asked may just be replaced; only the deadline ends that. So may an
order on the way back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.control.autoscaling.rollout import (
    NO_COUNTS,
    RolloutAction,
    RolloutCounts,
    RolloutDecision,
    RolloutRules,
    StageObservation,
    evaluate_stage,
)
from baton.domain.errors import ApplyRejected, BatonError, ClusterFailed
from baton.serving.application.builds import Builds

_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The fleet at one moment of a rollout."""

    done: bool = False
    """Everything runs as it was ordered."""
    failure: str = ""
    """Why Serve has given up; empty while it has not."""
    ready: frozenset[str] = frozenset()
    """The ids of the replicas that serve, of the pools that were asked about."""
    starting: frozenset[str] = frozenset()
    """Those of replicas that are to."""
    targets: Mapping[str, int] = field(default_factory=dict)
    """By pool, how many there are to be."""
    tallies: Mapping[str, RolloutCounts] = field(default_factory=dict)
    """By replica, what all ingresses together have seen it do."""


class RolloutTarget(Protocol):
    """A deployment whose replicas can be replaced. All calls block, and have a deadline."""

    def record_progress(self, progress: Mapping[str, object]) -> None:
        """Write down how far it is, for whoever asks."""
        ...

    def deploy_builds(self, builds: Builds) -> None:
        """Have everything built so, from now on; returns at once.

        Raises:
            ClusterFailed: Serve did not take it.
            ApplyRejected: somebody else is changing it now.
        """
        ...

    def fleet_status(self, pools: Sequence[str]) -> FleetStatus | None:
        """How far it is, and how these pools fare; None when nobody could say.

        Raises:
            ApplyRejected: somebody else is changing it now.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What becomes what, in which order."""

    old: Builds
    new: Builds
    stages: tuple[tuple[str, ...], ...]

    def builds_at(self, stages_started: int) -> Builds:
        """What everything is built from when that many stages have begun."""
        started = {name for stage in self.stages[:stages_started] for name in stage}
        return {
            name: self.new[name] if name in started else build for name, build in self.old.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """How it is done, as far as whoever asks may choose; by which clock, and who is told of it."""

    operation: str = "apply"
    """What this is, in the history."""
    dry_run: bool = False
    wait: bool = True
    """Watch it to its end; otherwise give the order and leave it to Serve."""
    rollback: bool = True
    """Take back what does not work out."""
    rules: RolloutRules = field(default_factory=RolloutRules)
    stage_timeout_s: float = 600.0
    """Until the replicas of a stage are replaced, without what they bake."""
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    on_progress: Callable[[str], None] = lambda _line: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What came of a rollout."""

    stages_started: int
    """Stages that were begun."""
    failure: str = ""
    """Why it was given up; empty: all stages are good."""
    stage_verdicts: tuple[str, ...] = ()
    """By stage, what it was found good by."""


def run_rollout(
    fleet: RolloutTarget,
    plan: RolloutPlan,
    options: RolloutOptions,
    *,
    generation: int | None = None,
) -> RolloutResult:
    """Go through the stages until one is no good, and write down how far it is.

    Raises:
        ApplyRejected: somebody else is changing it now, so that nothing must be taken back.
    """
    header = {"what": options.operation, "generation": generation}

    def report_progress(line: str) -> None:
        fleet.record_progress({**header, "state": "in progress", "why": line})
        options.on_progress(line)

    if not options.wait:
        report_progress("all stages at once, and nobody watches")
        fleet.deploy_builds(plan.builds_at(len(plan.stages)))
        return RolloutResult(stages_started=len(plan.stages), stage_verdicts=("not watched",))
    outcome = _run_stages(fleet, plan, replace(options, on_progress=report_progress))
    state, why = (
        ("failed", outcome.failure)
        if outcome.failure
        else ("done", "; ".join(outcome.stage_verdicts))
    )
    fleet.record_progress({**header, "state": state, "why": why})
    return outcome


def revert(
    fleet: RolloutTarget, plan: RolloutPlan, builds: Builds, options: RolloutOptions
) -> tuple[str, ...]:
    """Have these builds again, and wait until they run; what went wrong."""
    names = tuple(name for stage in plan.stages for name in stage)
    header = {"what": f"{options.operation}, rolled back"}
    fleet.record_progress(
        {**header, "state": "in progress", "why": f"replacing {', '.join(names)}"}
    )
    until_s = options.now_s() + options.stage_timeout_s
    why = order_builds(fleet, builds, options)
    why = why or f"the old replicas were not back after {options.stage_timeout_s:.0f} s"
    while options.now_s() < until_s:
        status = fleet.fleet_status(names)
        if status is not None and (status.done or status.failure):
            why = status.failure
            break
        options.sleep(_POLL_S)
    fleet.record_progress({**header, "state": "failed" if why else "done", "why": why})
    return (why,) if why else ()


def order_builds(fleet: RolloutTarget, builds: Builds, options: RolloutOptions) -> str:
    """Have everything built so, asked for again where Serve does not take it; why it never did.

    What kept it from going on, as Serve's controller that starts again, keeps it from going back
    for a moment, too.
    """
    until_s = options.now_s() + options.stage_timeout_s
    while True:
        try:
            fleet.deploy_builds(builds)
        except ClusterFailed as error:
            if options.now_s() >= until_s:
                return error.why
            options.sleep(_POLL_S)
        else:
            return ""


def _run_stages(fleet: RolloutTarget, plan: RolloutPlan, options: RolloutOptions) -> RolloutResult:
    """Go through the stages until one is no good, or something or somebody ends it."""
    stages_started, failure = 0, ""
    stage_verdicts: list[str] = []
    try:
        for number, stage in enumerate(plan.stages, start=1):
            options.on_progress(f"replacing {', '.join(stage)} ({number} of {len(plan.stages)})")
            until_s = options.now_s() + options.stage_timeout_s
            initial_status = _await_initial_status(fleet, stage, until_s, options)
            if initial_status is None:
                return RolloutResult(
                    stages_started=stages_started,
                    failure="nobody says what runs",
                    stage_verdicts=tuple(stage_verdicts),
                )
            stages_started = number
            fleet.deploy_builds(plan.builds_at(number))
            verdict = _monitor_stage(fleet, _StageMonitor(stage, initial_status, options), until_s)
            if verdict.action is RolloutAction.ROLL_BACK:
                return RolloutResult(
                    stages_started=stages_started,
                    failure=verdict.why,
                    stage_verdicts=tuple(stage_verdicts),
                )
            stage_verdicts.append(f"{', '.join(stage)}: {verdict.why}")
            options.on_progress(stage_verdicts[-1])
    except KeyboardInterrupt:
        failure = "interrupted"
    except ApplyRejected:
        raise
    except (BatonError, OSError) as error:
        failure = f"{type(error).__name__}: {error}"
    return RolloutResult(
        stages_started=stages_started, failure=failure, stage_verdicts=tuple(stage_verdicts)
    )


class _StageMonitor:
    """What is remembered of one stage between two looks."""

    def __init__(
        self, stage: Sequence[str], initial_status: FleetStatus, options: RolloutOptions
    ) -> None:
        self.stage = stage
        self.options = options
        self._old_ids = initial_status.ready | initial_status.starting
        self._targets = dict(initial_status.targets)
        """How many replicas each pool was to have when it was looked at last."""
        self._expected_stops = 0
        """Replicas that were told to end so far: whoever is started later is another."""
        self._new_ids: set[str] = set()
        self._done_at_s: float | None = None

    def evaluate(self, status: FleetStatus, now_s: float) -> RolloutDecision:
        """What to do, by this look and those before."""
        if status.failure:
            return RolloutDecision(action=RolloutAction.ROLL_BACK, why=status.failure)
        if status.done and self._done_at_s is None:
            self._done_at_s = now_s
        self._new_ids |= status.ready - self._old_ids
        for pool, target in status.targets.items():
            self._expected_stops += max(0, self._targets.get(pool, target) - target)
            self._targets[pool] = target
        trial = StageObservation(
            old=_sum_tallies(status.tallies, self._old_ids),
            new=_sum_tallies(status.tallies, self._new_ids),
            crashes=max(0, len(self._new_ids - status.ready) - self._expected_stops),
            baked_s=None if self._done_at_s is None else now_s - self._done_at_s,
        )
        return evaluate_stage(trial, self.options.rules)

    def timeout_reason(self, now_s: float, until_s: float) -> str:
        """Why it is waited for no longer; empty while it is.

        What was done once bakes, and is not late; when it has baked, any look brings a verdict.
        """
        stage_s = self.options.stage_timeout_s
        why = f"not replaced after {stage_s:.0f} s; see --timeout"
        if self._done_at_s is not None:
            until_s = self._done_at_s + self.options.rules.bake_s + stage_s
            why = f"nobody has said for {stage_s:.0f} s how they fare"
        return f"{', '.join(self.stage)}: {why}" if now_s >= until_s else ""


def _await_initial_status(
    fleet: RolloutTarget, stage: Sequence[str], until_s: float, options: RolloutOptions
) -> FleetStatus | None:
    """What there is before anything is replaced; None when nobody said it in time."""
    while (status := fleet.fleet_status(stage)) is None and options.now_s() < until_s:
        options.sleep(_POLL_S)
    return status


def _monitor_stage(fleet: RolloutTarget, monitor: _StageMonitor, until_s: float) -> RolloutDecision:
    """What a stage comes to, by looking again and again."""
    options = monitor.options
    while True:
        status, now_s = fleet.fleet_status(monitor.stage), options.now_s()
        if status is not None:
            verdict = monitor.evaluate(status, now_s)
            if verdict.action is not RolloutAction.HOLD:
                return verdict
        if why := monitor.timeout_reason(now_s, until_s):
            return RolloutDecision(action=RolloutAction.ROLL_BACK, why=why)
        options.sleep(_POLL_S)


def _sum_tallies(tallies: Mapping[str, RolloutCounts], ids: Iterable[str]) -> RolloutCounts:
    total = NO_COUNTS
    for replica_id in ids:
        total = total.add(tallies.get(replica_id, NO_COUNTS))
    return total
