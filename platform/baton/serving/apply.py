"""Another configuration for a deployment that runs: everywhere or nowhere, and back if it ails.

Theory of operation. First every process that works by the configuration says whether it can take
the new one (*prepare*); one that cannot, or does not answer, ends it, and nothing has changed. Then
the new generation is written to the store, which only one of several who apply at once can do
(*commit*), and every process is told. From then on the store is what holds: a process that dies
meanwhile, or is not told, finds it there. Pools are resized next, and last the replicas replaced
that are built from something else now: each stays until another serves, and drains. When something
cannot be carried out, or an ingress ails that was healthy before, the old configuration becomes the
next generation, and pools get their old sizes and replicas again.

Sizes: where an autoscaler decides, it is given the new bounds and keeps its counts. Where none
does, a changed `start` is the new size, and bounds that moved past a pool push it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.config.diff import Change, Reload, diff
from baton.config.schema import DeploymentConfig
from baton.domain.errors import ApplyRefused, BatonError
from baton.policy.scaling.options import ScalingRule
from baton.serving.live_config import LiveConfig

_AILING_S = 3.0
"""How long ingresses may take to be healthy again before the change is taken back."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """How far an operator lets it go."""

    diff: bool = False
    """Only show what differs."""
    dry_run: bool = False
    """Ask everybody, change nothing."""
    allow_restart: bool = False
    timeout_s: float = 600.0
    """Of a restart."""
    address: str | None = None
    """Of the Ray cluster; None: the deployment of this machine."""


class Running(Protocol):
    """A deployment that runs. Every call has a deadline; all of them block."""

    def current(self) -> LiveConfig:
        """What holds now."""
        ...

    def prepare(self, on_top_of: int, config: DeploymentConfig) -> Sequence[str]:
        """Why processes cannot take it, those that do not answer among them; empty: all can."""
        ...

    def commit(self, live: LiveConfig) -> bool:
        """Keep it as the next generation; False: somebody else's is."""
        ...

    def tell(self, live: LiveConfig) -> Sequence[str]:
        """Have every process take it; what went wrong."""
        ...

    def problems(self) -> Sequence[str]:
        """What ails: one line for each ingress that cannot serve; empty: all can."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """How many replicas each pool is to have at present."""
        ...

    def resize(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool, from now on."""
        ...

    def cannot_replace(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        """Why replicas of these pools cannot be replaced one by one; empty: they can."""
        ...

    def replace(
        self, config: DeploymentConfig, sizes: Mapping[str, int], timeout_s: float
    ) -> Sequence[str]:
        """Have replicas replaced that are built from something else now, and wait until they are.

        What went wrong; empty: all of them are there.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What came of it."""

    generation: int
    """That holds now."""
    changes: tuple[Change, ...] = ()
    resized: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Pools, each with its size before and after."""
    replaced: tuple[str, ...] = ()
    """Pools whose replicas were replaced, one after the other."""
    took_s: float = 0.0
    """From the first question to the last answer."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long things may take, and by which clock."""

    replace_s: float = 600.0
    """Until replicas are replaced."""
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def apply_config(
    running: Running,
    new: DeploymentConfig,
    *,
    dry_run: bool = False,
    patience: Patience = Patience(),
) -> Applied:
    """Have a running deployment go by another configuration.

    Raises:
        ApplyRefused: it cannot, and nothing has changed; or it ailed, and went back.
    """
    began_s = patience.now_s()
    plan = _planned(running, new)
    if plan.changes and not dry_run:
        _make(running, plan, patience)
    return Applied(
        generation=plan.old.generation + (1 if plan.changes and not dry_run else 0),
        changes=plan.changes,
        resized={pool: (plan.sizes[pool], count) for pool, count in plan.wanted.items()},
        replaced=plan.replaced,
        took_s=patience.now_s() - began_s,
        dry_run=dry_run,
    )


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
    replaced: tuple[str, ...] = ()
    ailed: bool = False
    """Whether it did before anything was changed."""


def _planned(running: Running, new: DeploymentConfig) -> _Plan:
    """What is to be done, after everybody was asked whether it could."""
    old = running.current()
    changes = diff(old.config, new)
    refuse_restarts(changes)
    if not changes:
        return _Plan(old=old, new=new, changes=())
    ailed, sizes, replaced = bool(running.problems()), running.sizes(), pools_to_replace(changes)
    refusals = running.cannot_replace(new, replaced) if replaced else []
    if refusals := refusals or running.prepare(old.generation, new):
        raise ApplyRefused(_joined(refusals), "nothing has changed; put that right, apply again")
    return _Plan(
        old=old,
        new=new,
        changes=changes,
        sizes=sizes,
        wanted=new_sizes(old.config, new, sizes),
        replaced=replaced,
        ailed=ailed,
    )


def _make(running: Running, plan: _Plan, patience: Patience) -> None:
    """Commit, tell, resize, replace; or take it back."""
    live = LiveConfig(generation=plan.old.generation + 1, config=plan.new)
    if not running.commit(live):
        what = f"generation {live.generation} was applied by somebody else at the same time"
        raise ApplyRefused(what, "nothing of yours has changed; look at --diff and apply again")
    wrong = _carry_out(running, live, plan.wanted)
    if not wrong and plan.replaced:
        wrong = running.replace(plan.new, {**plan.sizes, **plan.wanted}, patience.replace_s)
    if not wrong and not plan.ailed:
        wrong = _still_ailing(running, patience)
    if wrong:
        wrong = [*wrong, *_take_back(running, plan, live.generation + 1, patience)]
        raise ApplyRefused(
            f"taken back, generation {live.generation + 1} is as before: {_joined(wrong)}",
            "look at 'baton status' and the replicas' logs",
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


def pools_to_replace(changes: Sequence[Change]) -> tuple[str, ...]:
    """The pools whose replicas are built from something else."""
    names = [one.path[1] for one in changes if one.reload is Reload.ROLLING]
    return tuple(dict.fromkeys(names))


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
        "replaced": list(applied.replaced),
        "resized": {pool: list(sizes) for pool, sizes in applied.resized.items()},
        "took_s": round(applied.took_s, 3),
    }


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


def _carry_out(running: Running, live: LiveConfig, wanted: Mapping[str, int]) -> Sequence[str]:
    """Tell everybody, then resize; what went wrong."""
    if wrong := running.tell(live):
        return wrong
    for pool, count in wanted.items():
        try:
            running.resize(pool, count)
        except (BatonError, OSError, RuntimeError) as error:
            return [f"pool {pool} cannot have {count} replicas: {type(error).__name__}: {error}"]
    return []


def _still_ailing(running: Running, patience: Patience) -> Sequence[str]:
    until_s = patience.now_s() + _AILING_S
    while problems := running.problems():
        if patience.now_s() >= until_s:
            return problems
        patience.sleep(_POLL_S)
    return []


def _take_back(running: Running, plan: _Plan, generation: int, patience: Patience) -> Sequence[str]:
    """The old configuration as the next generation, unless somebody has applied another since."""
    back = LiveConfig(generation=generation, config=plan.old.config)
    if not running.commit(back):
        return ["somebody else has applied another since"]
    wrong = _carry_out(running, back, {pool: plan.sizes[pool] for pool in plan.wanted})
    if plan.replaced:
        wrong = [*wrong, *running.replace(plan.old.config, plan.sizes, patience.replace_s)]
    return wrong


def _joined(lines: Sequence[str]) -> str:
    return "; ".join(lines)
