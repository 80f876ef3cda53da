"""A rollout: replaces replicas in watched stages, and ends when new replicas are worse.

Theory of operation. Each stage is one order to Serve: its deployments get their new build, all
others keep theirs. Serve starts a new replica, stops an old one when the new one serves, and
continues. It gives up after three failed starts in a row and keeps the old replicas. Meanwhile the
rollout polls the fleet twice a second and evaluates it (`control.autoscaling.rollout`). A good
stage starts the next; a bad stage, an error or Ctrl-C ends the rollout.

The caller rolls back; `RolloutResult` says how far the rollout came. A lost lease raises an error
instead, because another command changes the deployment then. A poll may fail while the polled
process is replaced; only the deadline ends the rollout. An order of a rollback may fail and is
repeated.
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
from baton.runtime.process.progress import StatusLine
from baton.serving.application.builds import Builds

_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The fleet at one moment of a rollout."""

    done: bool = False
    """All deployments run as ordered."""
    failure: str = ""
    """Set if Serve has given up."""
    ready: frozenset[str] = frozenset()
    """Ids of replicas in the requested pools."""
    starting: frozenset[str] = frozenset()
    """Ids of replicas in the requested pools."""
    targets: Mapping[str, int] = field(default_factory=dict)
    """Desired replicas by pool."""
    tallies: Mapping[str, RolloutCounts] = field(default_factory=dict)
    """By replica, the sum over all ingresses."""
    phases: str = ""
    """The phases of starting replicas, with seconds; shown only."""


class RolloutTarget(Protocol):
    """A deployment whose replicas can be replaced. All calls block and have a deadline."""

    def record_progress(self, progress: Mapping[str, object]) -> None:
        """Store the progress for `baton status`."""
        ...

    def deploy_builds(self, builds: Builds) -> None:
        """Order these builds; returns at once.

        Raises:
            ClusterFailed: Serve did not accept the order.
            ApplyRejected: another command has the lease now.
        """
        ...

    def fleet_status(self, names: Sequence[str]) -> FleetStatus | None:
        """Progress of a rollout in these deployments; None if the cluster does not answer.

        Raises:
            ApplyRejected: another command has the lease now.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Old and new builds, and the order of deployments."""

    old: Builds
    new: Builds
    stages: tuple[tuple[str, ...], ...]

    def builds_at(self, stages_started: int) -> Builds:
        """The build of each deployment once this number of stages has started."""
        started = {name for stage in self.stages[:stages_started] for name in stage}
        return {
            name: self.new[name] if name in started else build for name, build in self.old.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """An operator's options, with the clock and a callback for progress."""

    operation: str = "apply"
    """For the history."""
    dry_run: bool = False
    wait: bool = True
    """Watch the rollout to its end; otherwise order it and return."""
    rollback: bool = True
    """Roll back after a failure."""
    rules: RolloutRules = field(default_factory=RolloutRules)
    stage_timeout_s: float = 600.0
    """Until the replicas of a stage are replaced, without the bake time."""
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    on_progress: Callable[[str], None] = lambda _line: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The result of a rollout."""

    stages_started: int
    failure: str = ""
    """Empty if all stages are good."""
    stage_decisions: tuple[str, ...] = ()
    """Why each stage was good."""


def run_rollout(
    fleet: RolloutTarget,
    plan: RolloutPlan,
    options: RolloutOptions,
    *,
    generation: int | None = None,
) -> RolloutResult:
    """Run the stages until one fails, and store the progress.

    Raises:
        ApplyRejected: another command has the lease now, so there must be no rollback.
    """
    header = {"what": options.operation, "generation": generation}

    def report_progress(line: str) -> None:
        if isinstance(line, StatusLine):
            options.on_progress(line)
            return
        fleet.record_progress({**header, "state": "in progress", "reason": line})
        options.on_progress(line)

    if not options.wait:
        report_progress("all stages at once, not watched")
        fleet.deploy_builds(plan.builds_at(len(plan.stages)))
        return RolloutResult(stages_started=len(plan.stages), stage_decisions=("not watched",))
    outcome = _run_stages(fleet, plan, replace(options, on_progress=report_progress))
    state, reason = (
        ("failed", outcome.failure)
        if outcome.failure
        else ("done", "; ".join(outcome.stage_decisions))
    )
    fleet.record_progress({**header, "state": state, "reason": reason})
    return outcome


def revert(
    fleet: RolloutTarget, plan: RolloutPlan, builds: Builds, options: RolloutOptions
) -> tuple[str, ...]:
    """Order these builds, and wait until they run; returns failures."""
    names = tuple(name for stage in plan.stages for name in stage)
    header = {"what": f"{options.operation}, rolled back"}
    fleet.record_progress(
        {**header, "state": "in progress", "reason": f"replacing {', '.join(names)}"}
    )
    until_s = options.now_s() + options.stage_timeout_s
    reason = order_builds(fleet, builds, options)
    reason = reason or f"the old replicas were not back after {options.stage_timeout_s:.0f} s"
    while options.now_s() < until_s:
        status = fleet.fleet_status(names)
        if status is not None and (status.done or status.failure):
            reason = status.failure
            break
        options.sleep(_POLL_S)
    fleet.record_progress({**header, "state": "failed" if reason else "done", "reason": reason})
    return (reason,) if reason else ()


def order_builds(fleet: RolloutTarget, builds: Builds, options: RolloutOptions) -> str:
    """Order these builds, with retries until the deadline; returns the last failure.

    A cause that failed the rollout, such as a restart of Serve's controller, may still last.
    """
    until_s = options.now_s() + options.stage_timeout_s
    while True:
        try:
            fleet.deploy_builds(builds)
        except ClusterFailed as error:
            if options.now_s() >= until_s:
                return error.reason
            options.sleep(_POLL_S)
        else:
            return ""


def _run_stages(fleet: RolloutTarget, plan: RolloutPlan, options: RolloutOptions) -> RolloutResult:
    stages_started, failure = 0, ""
    stage_decisions: list[str] = []
    try:
        for number, stage in enumerate(plan.stages, start=1):
            options.on_progress(f"replacing {', '.join(stage)} ({number} of {len(plan.stages)})")
            until_s = options.now_s() + options.stage_timeout_s
            initial_status = _await_initial_status(fleet, stage, until_s, options)
            if initial_status is None:
                failure = "no report of the running replicas"
                break
            stages_started = number
            fleet.deploy_builds(plan.builds_at(number))
            decision = _monitor_stage(fleet, _StageMonitor(stage, initial_status, options), until_s)
            if decision.action is RolloutAction.ROLL_BACK:
                failure = decision.reason
                break
            stage_decisions.append(f"{', '.join(stage)}: {decision.reason}")
            options.on_progress(stage_decisions[-1])
    except KeyboardInterrupt:
        failure = "interrupted"
    except ApplyRejected:
        raise
    except (BatonError, OSError) as error:
        failure = f"{type(error).__name__}: {error}"
    return RolloutResult(
        stages_started=stages_started, failure=failure, stage_decisions=tuple(stage_decisions)
    )


class _StageMonitor:
    def __init__(
        self, stage: Sequence[str], initial_status: FleetStatus, options: RolloutOptions
    ) -> None:
        self.stage = stage
        self.options = options
        self._old_ids = initial_status.ready | initial_status.starting
        self._targets = dict(initial_status.targets)
        self._expected_stops = 0
        """Stops by scaling down, which are no crashes."""
        self._new_ids: set[str] = set()
        self._done_at_s: float | None = None

    def evaluate(self, status: FleetStatus, now_s: float) -> RolloutDecision:
        """The decision by this poll and earlier polls."""
        if status.failure:
            return RolloutDecision(action=RolloutAction.ROLL_BACK, reason=status.failure)
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

    def describe(self, status: FleetStatus, now_s: float) -> str:
        """How far the stage is at this poll."""
        names = ", ".join(self.stage)
        if self._done_at_s is not None:
            bake_s = self.options.rules.bake_s
            return f"{names}: watched for {now_s - self._done_at_s:.0f} of {bake_s:.0f} s"
        ready = len(status.ready - self._old_ids)
        text = f"{names}: {ready} of {sum(status.targets.values())} replicas replaced"
        return f"{text}; {status.phases}" if status.phases else text

    def timeout_reason(self, now_s: float, until_s: float) -> str:
        """Why the wait ends; empty while it goes on.

        A replaced stage bakes without the timeout; after the bake time the next poll decides.
        """
        stage_s = self.options.stage_timeout_s
        reason = f"not replaced after {stage_s:.0f} s; see --timeout"
        if self._done_at_s is not None:
            until_s = self._done_at_s + self.options.rules.bake_s + stage_s
            reason = f"no report of them for {stage_s:.0f} s"
        return f"{', '.join(self.stage)}: {reason}" if now_s >= until_s else ""


def _await_initial_status(
    fleet: RolloutTarget, stage: Sequence[str], until_s: float, options: RolloutOptions
) -> FleetStatus | None:
    while (status := fleet.fleet_status(stage)) is None and options.now_s() < until_s:
        options.sleep(_POLL_S)
    return status


def _monitor_stage(fleet: RolloutTarget, monitor: _StageMonitor, until_s: float) -> RolloutDecision:
    options = monitor.options
    while True:
        status, now_s = fleet.fleet_status(monitor.stage), options.now_s()
        if status is not None:
            decision = monitor.evaluate(status, now_s)
            if decision.action is not RolloutAction.HOLD:
                return decision
            options.on_progress(StatusLine(monitor.describe(status, now_s)))
        if reason := monitor.timeout_reason(now_s, until_s):
            return RolloutDecision(action=RolloutAction.ROLL_BACK, reason=reason)
        options.sleep(_POLL_S)


def _sum_tallies(tallies: Mapping[str, RolloutCounts], ids: Iterable[str]) -> RolloutCounts:
    total = NO_COUNTS
    for replica_id in ids:
        total = total.add(tallies.get(replica_id, NO_COUNTS))
    return total
