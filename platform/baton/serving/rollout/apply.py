"""Another configuration for a deployment that runs: everywhere or nowhere, and back if it ails.

Theory of operation. First every process that works by the configuration says whether it can take
the new one (*prepare*); one that cannot, or does not answer, ends it, and nothing has changed. Then
the new generation is written to the store, which only one of several who apply at once can do
(*commit*), and every process is told. From then on the store is what holds: a process that dies
meanwhile, or is not told, finds it there. Pools are resized next, and last the replicas replaced
that are built from something else now, stage by stage and watched (`serving.rolling`): each stays
until another serves, and drains. When something cannot be carried out, or new replicas are worse
than those they replace, or an ingress ails that was healthy before, the old configuration becomes
the next generation, and pools get their old sizes and replicas again. So it is when whoever applies
interrupts it.

Sizes: where an autoscaler decides, it is given the new bounds and keeps its counts. Where none
does, a changed `start` is the new size, and bounds that moved past a pool push it.

Another version of baton changes no configuration: it is rolled out by itself (`upgrade`), and only
then takes part in this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from baton.config.derive.options import coordinator_limits, slo_book
from baton.config.diff import Change, Reload, changes_layout, diff
from baton.config.schema.deployment import DeploymentConfig
from baton.control.autoscaling.rollout import stages
from baton.domain.errors import ApplyRefused, BatonError
from baton.policy.scaling.options import ScalingRule
from baton.serving.application.builds import Built, of_this_code
from baton.serving.rollout.ports import Applied, Running
from baton.serving.rollout.rollout import Course, Manner, Outcome, ordered_back, rolled
from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.serving.store.config_store import GOOD, Fate, LiveConfig
from baton.telemetry.edges import ChangedEdges, all_edges, changed_edges

_AILING_S = 3.0
"""How long ingresses may take to be healthy again before the change is taken back."""
_POLL_S = 0.1


def apply_config(running: Running, new: DeploymentConfig, manner: Manner) -> Applied:
    """Have a running deployment go by another configuration.

    Raises:
        ApplyRefused: it cannot, and nothing has changed; or it did not work out, and went back or,
            where that is not wanted or somebody else is changing what runs now, stays as it is.
    """
    began_s = manner.now_s()
    plan = _planned(running, new)
    make = bool(plan.changes) and not manner.dry_run
    outcome = _make(running, plan, manner) if make else None
    return Applied(
        generation=plan.old.generation + make,
        changes=plan.changes,
        histograms=changed_histograms(plan.old.config, new),
        resized={pool: (plan.sizes[pool], count) for pool, count in plan.wanted.items()},
        replaced=plan.replaced,
        why=() if outcome is None else outcome.why,
        took_s=manner.now_s() - began_s,
        dry_run=manner.dry_run,
    )


def roll_back(running: Running, to: int | None, manner: Manner) -> Applied:
    """Go back to the configuration of an earlier generation, as another one.

    With None, to the last one that was good and is not as what holds.

    Raises:
        ApplyRefused: there is none, or it cannot be applied.
    """
    config = _last_good(running) if to is None else running.find(to)
    if config is None:
        what = "no other generation was good" if to is None else f"generation {to} is not kept"
        raise ApplyRefused(what, "'baton history' lists those that are; or apply a file")
    return apply_config(running, config, manner)


def _last_good(running: Running) -> DeploymentConfig | None:
    """The newest configuration that was good and differs from what holds; None: there is none."""
    live = running.current()
    for kept in reversed(running.history()):
        if kept.generation < live.generation and kept.fate in GOOD:
            config = running.find(kept.generation)
            if config is not None and diff(live.config, config):
                return config
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What everybody could take."""

    old: LiveConfig
    new: DeploymentConfig
    changes: tuple[Change, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of all pools, as they are."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Of those that change."""
    course: Course | None = None
    """Of the replicas that are replaced."""
    ailed: bool = False
    """Whether it did before anything was changed."""

    @property
    def replaced(self) -> tuple[str, ...]:
        """Deployments, in the order in which their replicas are replaced."""
        return () if self.course is None else tuple(n for s in self.course.stages for n in s)


def _planned(running: Running, new: DeploymentConfig) -> _Plan:
    """What is to be done, after everybody was asked whether it could."""
    old = running.current()
    changes = diff(old.config, new)
    refuse_restarts(changes)
    if not changes:
        return _Plan(old=old, new=new, changes=())
    built = running.built()
    _refuse_other_code(built)
    course = _course(built, old.config, new, changes)
    ailed, sizes = bool(running.problems()), running.sizes()
    pools = [name for stage in course.stages for name in stage if name in new.pools]
    refusals = running.cannot_grow(new) or (running.cannot_replace(new, pools) if pools else [])
    if refusals := refusals or running.prepare(old.generation, new):
        raise ApplyRefused(_joined(refusals), "nothing has changed; put that right, apply again")
    return _Plan(
        old=old,
        new=new,
        changes=changes,
        sizes=sizes,
        wanted=new_sizes(old.config, new, sizes),
        course=course if course.stages else None,
        ailed=ailed,
    )


def _course(
    built: Built, old: DeploymentConfig, new: DeploymentConfig, changes: Sequence[Change]
) -> Course:
    """Which replicas are built from something else now, and in which order they are replaced."""
    after = built.with_config(new)
    other = {name for name, build in after.items() if build.version != built.marks[name].version}
    pools = {name: pool.role for name, pool in new.pools.items() if name in other}
    front = tuple((name,) for name in (CONTROLLER, INGRESS) if name in other)
    return Course(
        old=built.builds(old),
        new=after,
        stages=(*stages(pools, together=changes_layout(changes)), *front),
    )


def _make(running: Running, plan: _Plan, manner: Manner) -> Outcome:
    """Commit, tell, resize, replace; or take it back."""
    live = LiveConfig(generation=plan.old.generation + 1, config=plan.new)
    if not running.commit(live, manner.by):
        what = f"generation {live.generation} was applied by somebody else at the same time"
        raise ApplyRefused(what, "nothing of yours has changed; look at --diff and apply again")
    try:
        running.settle(live.generation, Fate.UNDER_WAY)
        outcome = _carried_out(running, plan, live, manner)
    except KeyboardInterrupt:
        outcome = Outcome(reached=0, failed="interrupted")
    except ApplyRefused as error:
        # Somebody else is changing what runs now, and whatever was taken back would be theirs.
        running.settle(live.generation, Fate.LEFT, error.why)
        raise
    except (BatonError, OSError) as error:
        outcome = Outcome(reached=0, failed=f"{type(error).__name__}: {error}")
    if outcome.failed:
        _refuse(running, plan, live.generation, outcome.failed, manner)
    running.settle(live.generation, Fate.APPLIED, _joined(outcome.why))
    return outcome


def _carried_out(running: Running, plan: _Plan, live: LiveConfig, manner: Manner) -> Outcome:
    """Tell, resize, replace, and look whether all is well."""
    outcome = Outcome(reached=0, failed=_joined(_take_up(running, live, plan.wanted)))
    if not outcome.failed and plan.course is not None:
        outcome = rolled(running, plan.course, manner, generation=live.generation)
    if not outcome.failed and not plan.ailed:
        outcome = replace(outcome, failed=_joined(_still_ailing(running, manner)))
    return outcome


def _refuse(running: Running, plan: _Plan, generation: int, why: str, manner: Manner) -> NoReturn:
    """Take a generation back, unless its operator would rather have it stay; say why."""
    look = "look at 'baton status' and the replicas' logs"
    if not manner.rollback:
        running.settle(generation, Fate.LEFT, why)
        raise ApplyRefused(
            f"left as it is, generation {generation} holds: {why}",
            f"{look}; 'baton rollback' goes back",
        )
    wrong = [why, *_taken_back(running, plan, generation + 1, manner)]
    running.settle(generation, Fate.TAKEN_BACK, why)
    raise ApplyRefused(
        f"taken back, generation {generation + 1} is as before: {_joined(wrong)}", look
    )


def _taken_back(running: Running, plan: _Plan, generation: int, manner: Manner) -> Sequence[str]:
    """The old configuration as the next generation, unless somebody has applied another since."""
    back = LiveConfig(generation=generation, config=plan.old.config)
    if not running.commit(back, "taken back"):
        return ["somebody else has applied another since"]
    wrong = list(_take_up(running, back, {pool: plan.sizes[pool] for pool in plan.wanted}))
    if plan.course is not None:
        wrong += ordered_back(running, plan.course, plan.course.old, manner)
    running.settle(generation, Fate.APPLIED, "as before")
    return wrong


def _refuse_other_code(built: Built) -> None:
    """Refuse to change the configuration of another version of baton.

    Raises:
        ApplyRefused: that is what runs.
    """
    if not built.is_of_this_code():
        raise ApplyRefused(
            f"baton {built.text} runs, and this is {of_this_code(built).text}",
            "nothing has changed; 'baton upgrade' rolls this version out, then apply; or apply with"
            f" baton {built.text}",
        )


def refuse_restarts(changes: Sequence[Change]) -> None:
    """Refuse what takes more than telling and replacing.

    Raises:
        ApplyRefused: some change cannot be made while the deployment runs.
    """
    if beyond := restarts(changes):
        lines = [f"{one} ({one.reload})" for one in beyond]
        raise ApplyRefused(
            "not possible while it runs: " + "; ".join(lines),
            "nothing has changed; with --allow-restart the deployment is drained, ended and"
            " started again",
        )


def restarts(changes: Sequence[Change]) -> list[Change]:
    """Those that no deployment can take while it runs."""
    return [one for one in changes if one.reload is Reload.RESTART]


def report(applied: Applied, outcome: str) -> dict[str, object]:
    """For the command line."""
    return {
        "outcome": outcome,
        "generation": applied.generation,
        "changes": [
            {"reload": str(one.reload), "change": str(one)}
            for one in sorted(applied.changes, key=lambda one: list(Reload).index(one.reload))
            if {one.old, one.new} != {None, "null"}  # a section that comes or goes says enough
        ],
        "histograms": [str(changed) for changed in applied.histograms],
        "replaced": list(applied.replaced),
        "why": list(applied.why),
        "code": None if applied.code is None else list(applied.code),
        "resized": {pool: list(sizes) for pool, sizes in applied.resized.items()},
        "took_s": round(applied.took_s, 3),
    }


def changed_histograms(old: DeploymentConfig, new: DeploymentConfig) -> tuple[ChangedEdges, ...]:
    """The histograms of ingresses that have other edges by another configuration."""
    if not new.observability.metrics.enabled:
        return ()
    before, after = (
        all_edges(slo_book(config).classes.values(), coordinator_limits(config))
        for config in (old, new)
    )
    return changed_edges(before, after)


def new_sizes(
    old: DeploymentConfig, new: DeploymentConfig, sizes: Mapping[str, int]
) -> dict[str, int]:
    """The pools whose size changes with the configuration; none where an autoscaler decides."""
    scaler = new.autoscaler
    if scaler is not None and scaler.policy != ScalingRule.STATIC and not scaler.dry_run:
        return {}
    wanted = {}
    for name, size in sizes.items():
        was, counts = old.pools[name].replicas, new.pools[name].replicas
        size_now = counts.start if counts.start != was.start else size
        if counts != was:
            size_now = min(max(size_now, counts.min), counts.max)
        if size_now != size:
            wanted[name] = size_now
    return wanted


def _take_up(running: Running, live: LiveConfig, wanted: Mapping[str, int]) -> Sequence[str]:
    """Tell everybody, then resize; what went wrong."""
    if wrong := running.tell(live):
        return wrong
    for pool, count in wanted.items():
        try:
            running.resize(pool, count)
        except (BatonError, OSError, RuntimeError) as error:
            return [f"pool {pool} cannot have {count} replicas: {type(error).__name__}: {error}"]
    return []


def _still_ailing(running: Running, manner: Manner) -> Sequence[str]:
    until_s = manner.now_s() + _AILING_S
    while problems := running.problems():
        if manner.now_s() >= until_s:
            return problems
        manner.sleep(_POLL_S)
    return []


def _joined(lines: Sequence[str]) -> str:
    return "; ".join(lines)
