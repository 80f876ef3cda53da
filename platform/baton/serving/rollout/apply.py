"""Applies another configuration to a running deployment, entirely or not at all.

Theory of operation. First the controller and every ingress check the new configuration (*prepare*).
If one rejects it or does not answer, nothing changes. Then the store takes the new generation
(*commit*), which only one of several concurrent commands can write, and every process is notified.
From then on the store is authoritative: a process that missed the notice finds the generation
there.

Then pools are resized. Last, replicas with a changed build are replaced in watched stages
(`serving.rollout.rollout`); each old replica stays until a new one serves, and drains. The old
configuration becomes the next generation, with the old sizes and builds, if a step fails, new
replicas are worse, a healthy ingress becomes unhealthy, or the operator interrupts.

Sizes: an autoscaler gets the new bounds and keeps its counts. Without one, a changed `start` is the
new size, and changed bounds limit it.

Another version of baton is rolled out separately (`rollout.upgrade`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from baton.config.derive.options import coordinator_limits, slo_classes
from baton.config.diff import Change, Reload, changes_layout, diff
from baton.config.schema.deployment import DeploymentConfig
from baton.control.autoscaling.rollout import replacement_stages
from baton.domain.errors import ApplyRejected, BatonError
from baton.domain.names.words import count_text
from baton.policy.scaling.options import ScalingRule
from baton.serving.application.builds import BuildRecord, with_current_code
from baton.serving.rollout.ports import ApplyResult, ApplyTarget
from baton.serving.rollout.rollout import (
    RolloutOptions,
    RolloutPlan,
    RolloutResult,
    revert,
    run_rollout,
)
from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.serving.store.config_store import ROLLBACK_STATUSES, GenerationStatus, LiveConfig
from baton.telemetry.histograms import ChangedEdges, all_edges, changed_edges

_HEALTH_TIMEOUT_S = 3.0
"""How long ingresses may take to become healthy before a rollback."""
_POLL_S = 0.1


def apply_config(
    deployment: ApplyTarget, new: DeploymentConfig, options: RolloutOptions
) -> ApplyResult:
    """Apply another configuration to a running deployment.

    Raises:
        ApplyRejected: nothing has changed; or the change failed and was rolled back; or it failed
            and stays, because rollback is off or another command changes the deployment.
    """
    started_at_s = options.now_s()
    plan = _plan_change(deployment, new)
    should_apply = bool(plan.changes) and not options.dry_run
    outcome = _execute(deployment, plan, options) if should_apply else None
    return ApplyResult(
        generation=plan.old.generation + should_apply,
        changes=plan.changes,
        histograms=changed_histograms(plan.old.config, new),
        resized={
            pool: (plan.current_sizes[pool], count) for pool, count in plan.target_sizes.items()
        },
        replaced=plan.replaced,
        stage_decisions=() if outcome is None else outcome.stage_decisions,
        took_s=options.now_s() - started_at_s,
        dry_run=options.dry_run,
    )


def roll_back(
    deployment: ApplyTarget, generation: int | None, options: RolloutOptions
) -> ApplyResult:
    """Apply the configuration of an earlier generation as the next generation.

    None selects the last good configuration that differs from the current one.

    Raises:
        ApplyRejected: there is none, or it cannot be applied.
    """
    config = _last_good(deployment) if generation is None else deployment.find(generation)
    if config is None:
        reason = (
            "no other generation was good"
            if generation is None
            else f"generation {generation} is not kept"
        )
        raise ApplyRejected(reason, "'baton history' lists those that are; or apply a file")
    return apply_config(deployment, config, options)


def _last_good(deployment: ApplyTarget) -> DeploymentConfig | None:
    """The newest good configuration that differs from the current one; None without."""
    live = deployment.current()
    for record in reversed(deployment.history()):
        if record.generation < live.generation and record.status in ROLLBACK_STATUSES:
            config = deployment.find(record.generation)
            if config is not None and diff(live.config, config):
                return config
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChangePlan:
    old: LiveConfig
    new: DeploymentConfig
    changes: tuple[Change, ...]
    current_sizes: Mapping[str, int] = field(default_factory=dict)
    """Of every pool."""
    target_sizes: Mapping[str, int] = field(default_factory=dict)
    """Of pools that change."""
    rollout: RolloutPlan | None = None
    was_unhealthy: bool = False

    @property
    def replaced(self) -> tuple[str, ...]:
        """Deployments in the order in which their replicas are replaced."""
        return () if self.rollout is None else tuple(n for s in self.rollout.stages for n in s)


def _plan_change(deployment: ApplyTarget, new: DeploymentConfig) -> _ChangePlan:
    """Check a change in every process, and plan its steps."""
    old = deployment.current()
    changes = diff(old.config, new)
    check_no_restarts(changes)
    if not changes:
        return _ChangePlan(old=old, new=new, changes=())
    record = deployment.build_record()
    _check_code_version(record)
    rollout = _plan_rollout(record, old.config, new, changes)
    was_unhealthy, sizes = bool(deployment.problems()), deployment.sizes()
    pools = [name for stage in rollout.stages for name in stage if name in new.pools]
    blockers = deployment.growth_blockers(new) or (
        deployment.replace_blockers(new, pools) if pools else []
    )
    if blockers := blockers or deployment.prepare(old.generation, new):
        raise ApplyRejected(
            _join_lines(blockers), "nothing has changed; put that right, apply again"
        )
    return _ChangePlan(
        old=old,
        new=new,
        changes=changes,
        current_sizes=sizes,
        target_sizes=target_sizes(old.config, new, sizes),
        rollout=rollout if rollout.stages else None,
        was_unhealthy=was_unhealthy,
    )


def _plan_rollout(
    record: BuildRecord, old: DeploymentConfig, new: DeploymentConfig, changes: Sequence[Change]
) -> RolloutPlan:
    new_builds = record.builds_for_config(new)
    changed_builds = {
        name
        for name, build in new_builds.items()
        if build.version != record.build_refs[name].version
    }
    pools = {name: pool.role for name, pool in new.pools.items() if name in changed_builds}
    control_stages = tuple((name,) for name in (CONTROLLER, INGRESS) if name in changed_builds)
    return RolloutPlan(
        old=record.builds(old),
        new=new_builds,
        stages=(*replacement_stages(pools, together=changes_layout(changes)), *control_stages),
    )


def _execute(deployment: ApplyTarget, plan: _ChangePlan, options: RolloutOptions) -> RolloutResult:
    live = LiveConfig(generation=plan.old.generation + 1, config=plan.new)
    if not deployment.commit(live, options.operation):
        reason = f"generation {live.generation} was applied by another command at the same time"
        raise ApplyRejected(reason, "nothing of yours has changed; look at --diff and apply again")
    try:
        deployment.set_status(live.generation, GenerationStatus.IN_PROGRESS)
        outcome = _run_steps(deployment, plan, live, options)
    except KeyboardInterrupt:
        outcome = RolloutResult(stages_started=0, failure="interrupted")
    except ApplyRejected as error:
        # Another command changes the deployment; a rollback would undo its changes.
        deployment.set_status(live.generation, GenerationStatus.NOT_REVERTED, error.reason)
        raise
    except (BatonError, OSError) as error:
        outcome = RolloutResult(stages_started=0, failure=f"{type(error).__name__}: {error}")
    if outcome.failure:
        _abort(deployment, plan, live.generation, outcome.failure, options)
    deployment.set_status(
        live.generation, GenerationStatus.APPLIED, _join_lines(outcome.stage_decisions)
    )
    return outcome


def _run_steps(
    deployment: ApplyTarget, plan: _ChangePlan, live: LiveConfig, options: RolloutOptions
) -> RolloutResult:
    outcome = RolloutResult(
        stages_started=0, failure=_join_lines(_activate(deployment, live, plan.target_sizes))
    )
    if not outcome.failure and plan.rollout is not None:
        outcome = run_rollout(deployment, plan.rollout, options, generation=live.generation)
    if not outcome.failure and not plan.was_unhealthy:
        outcome = replace(outcome, failure=_join_lines(_await_healthy(deployment, options)))
    return outcome


def _abort(
    deployment: ApplyTarget,
    plan: _ChangePlan,
    generation: int,
    reason: str,
    options: RolloutOptions,
) -> NoReturn:
    """Roll back unless the operator disabled that; then raise."""
    remedy = "look at 'baton status' and the replicas' logs"
    if not options.rollback:
        deployment.set_status(generation, GenerationStatus.NOT_REVERTED, reason)
        raise ApplyRejected(
            f"left as it is, generation {generation} holds: {reason}",
            f"{remedy}; 'baton rollback' goes back",
        )
    problems = [reason, *_revert_generation(deployment, plan, generation + 1, options)]
    deployment.set_status(generation, GenerationStatus.REVERTED, reason)
    raise ApplyRejected(
        f"rolled back, generation {generation + 1} is as before: {_join_lines(problems)}", remedy
    )


def _revert_generation(
    deployment: ApplyTarget, plan: _ChangePlan, generation: int, options: RolloutOptions
) -> Sequence[str]:
    """Make the old configuration the next generation, unless another command has written it."""
    reverted = LiveConfig(generation=generation, config=plan.old.config)
    if not deployment.commit(reverted, "reverted"):
        return ["another command has applied another since"]
    problems = list(
        _activate(
            deployment, reverted, {pool: plan.current_sizes[pool] for pool in plan.target_sizes}
        )
    )
    if plan.rollout is not None:
        problems += revert(deployment, plan.rollout, plan.rollout.old, options)
    deployment.set_status(generation, GenerationStatus.APPLIED, "as before")
    return problems


def _check_code_version(record: BuildRecord) -> None:
    """Raise `ApplyRejected` if another version of baton runs."""
    if not record.matches_current_code():
        raise ApplyRejected(
            f"baton {record.description} runs, and this is {with_current_code(record).description}",
            "nothing has changed; 'baton upgrade' rolls this version out, then apply; or apply with"
            f" baton {record.description}",
        )


def check_no_restarts(changes: Sequence[Change]) -> None:
    """Reject changes that require a restart.

    Raises:
        ApplyRejected: a change requires a restart.
    """
    if blockers := restart_changes(changes):
        lines = [f"{blocker} ({blocker.reload})" for blocker in blockers]
        raise ApplyRejected(
            "not possible while it runs: " + "; ".join(lines),
            "nothing has changed; with --allow-restart the deployment is drained, ended and"
            " started again",
        )


def restart_changes(changes: Sequence[Change]) -> list[Change]:
    """The changes that require a restart."""
    return [change for change in changes if change.reload is Reload.RESTART]


def report(result: ApplyResult, outcome: str) -> dict[str, object]:
    """The result for the command line."""
    return {
        "outcome": outcome,
        "generation": result.generation,
        "changes": [
            {"reload": str(change.reload), "change": str(change)}
            for change in sorted(
                shown_changes(result.changes),
                key=lambda change: list(Reload).index(change.reload),
            )
        ],
        "histograms": [str(changed) for changed in result.histograms],
        "replaced": list(result.replaced),
        "reason": list(result.stage_decisions),
        "code": None if result.code_versions is None else list(result.code_versions),
        "resized": {pool: list(sizes) for pool, sizes in result.resized.items()},
        "took_s": round(result.took_s, 3),
    }


def shown_changes(changes: Iterable[Change]) -> list[Change]:
    """The changes without new or removed sections, whose keys are among them."""
    return [change for change in changes if {change.old, change.new} != {None, "null"}]


def changed_histograms(old: DeploymentConfig, new: DeploymentConfig) -> tuple[ChangedEdges, ...]:
    """Histograms of ingresses whose bucket edges change."""
    if not new.observability.metrics.enabled:
        return ()
    before, after = (
        all_edges(slo_classes(config).classes.values(), coordinator_limits(config))
        for config in (old, new)
    )
    return changed_edges(before, after)


def target_sizes(
    old: DeploymentConfig, new: DeploymentConfig, sizes: Mapping[str, int]
) -> dict[str, int]:
    """New sizes of pools that change; none if an autoscaler decides."""
    scaler = new.autoscaler
    if scaler is not None and scaler.policy != ScalingRule.STATIC and not scaler.dry_run:
        return {}
    changed_sizes = {}
    for name, size in sizes.items():
        old_counts, new_counts = old.pools[name].replicas, new.pools[name].replicas
        new_size = new_counts.initial if new_counts.initial != old_counts.initial else size
        if new_counts != old_counts:
            new_size = min(max(new_size, new_counts.min), new_counts.max)
        if new_size != size:
            changed_sizes[name] = new_size
    return changed_sizes


def _activate(deployment: ApplyTarget, live: LiveConfig, sizes: Mapping[str, int]) -> Sequence[str]:
    if problems := deployment.distribute(live):
        return problems
    for pool, count in sizes.items():
        try:
            deployment.resize(pool, count)
        except (BatonError, OSError, RuntimeError) as error:
            replicas = count_text(count, "replica")
            return [f"pool {pool} cannot have {replicas}: {type(error).__name__}: {error}"]
    return []


def _await_healthy(deployment: ApplyTarget, options: RolloutOptions) -> Sequence[str]:
    until_s = options.now_s() + _HEALTH_TIMEOUT_S
    while problems := deployment.problems():
        if options.now_s() >= until_s:
            return problems
        options.sleep(_POLL_S)
    return []


def _join_lines(lines: Sequence[str]) -> str:
    return "; ".join(lines)
