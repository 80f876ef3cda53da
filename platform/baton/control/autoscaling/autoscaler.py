"""The autoscaler: turns what a policy wants into what is to be done, within every bound.

Theory of operation. Whoever carries it out ticks the machine every `options.interval_s` with an
`Observation`. A tick goes through five stages, none of which waits for anything:

1. *Doubt.* What is missing, not a number or out of all bounds (`scaling_doubts`), a clock that went
   back, and a policy that raises or answers nonsense make the tick *hold*: every pool stays as it
   is, and the tick says why. Overrides are carried out nevertheless, unless the pool's own counts
   are among the nonsense: an operator has counted himself.
2. *Ask.* The policy says how many replicas each pool should have, and who should flip. In a dry
   run nothing comes of it: only overrides are carried out.
3. *Bound.* Per pool, in this order: an override (exactly that many, no other bound but the budget),
   min and max (at once when they were changed), starts that do not come up, the pause since the
   pool's last change, the largest step (`scaling_pace`). Then the GPU budget, over all pools
   (`budget`).
4. *Act.* Flips, then starts, then stops (`scaling_acts`). Replicas that are starting count as had,
   so a want that stands is not asked for twice. Counts in actions are differences;
   `ScalingDecision.want` is the pool's new target, and setting that target twice does no harm.
5. *Remember.* The tick with all of its inputs: the last few hundred, and those in which something
   was done for longer.

What may fail: starts. A pool whose replicas have been starting for three of its cold starts, with
none becoming ready, gets no more until one does. A pool that is not seen any more is
forgotten, its override is not. One that has no bounds is left as it is. Nothing here is persistent:
after a restart, whoever owns the machine gives it the overrides again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.control.autoscaling.actions import actions_of
from baton.control.autoscaling.preconditions import doubts, pool_doubts
from baton.control.autoscaling.stabilization import PoolPace, fewest
from baton.policy.scaling.actions import (
    Action,
    FlipReplicas,
    ScalingDecision,
    StartReplicas,
    StopReplicas,
    Tick,
)
from baton.policy.scaling.budget import Claim, within_budget
from baton.policy.scaling.desired import ScalingPolicy, ScalingReason, Want
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds

_RECENT_TICKS = 300
"""Ten minutes of ticks every two seconds."""
_ACTED_TICKS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """An operator's word on one pool."""

    replicas: int
    until_s: float | None = None
    """None: until it is taken back."""


class Autoscaler:
    """See the module."""

    def __init__(self, policy: ScalingPolicy, options: AutoscalerOptions) -> None:
        self._policy = policy
        self._options = options
        self._overrides: dict[str, Override] = {}
        self._pools: dict[str, PoolPace] = {}
        self._last_s: float | None = None
        self._recent: deque[Tick] = deque(maxlen=_RECENT_TICKS)
        self._acted: deque[Tick] = deque(maxlen=_ACTED_TICKS)

    # ---------------------------------------------------------------- told by operators

    def override(self, pool: str, replicas: int, *, until_s: float | None, now_s: float) -> None:
        """Keep a pool at exactly so many replicas until then; replaces what was said before.

        Raises:
            ValueError: that many cannot be had, or the time is past.
        """
        bounds = self._options.bounds.get(pool)
        if bounds is None:
            known = ", ".join(sorted(self._options.bounds)) or "none"
            raise ValueError(f"pool {pool!r} is not scaled; pools that are: {known}")
        if not 0 <= replicas <= bounds.max:
            raise ValueError(f"pool {pool!r}: got {replicas} replicas, wanted 0 to {bounds.max}")
        if until_s is not None and not until_s > now_s:
            raise ValueError(f"pool {pool!r}: the override would end at {until_s}, it is {now_s}")
        self._check_budget(pool, replicas)
        self._overrides[pool] = Override(replicas=replicas, until_s=until_s)

    def clear_override(self, pool: str) -> bool:
        """Leave a pool to the policy again; False when it was."""
        return self._overrides.pop(pool, None) is not None

    def overrides(self) -> Mapping[str, Override]:
        """What stands, by pool."""
        return dict(self._overrides)

    def reconfigure(self, policy: ScalingPolicy, options: AutoscalerOptions) -> None:
        """Go on by another policy and other bounds; overrides, pauses and history stay."""
        self._policy, self._options = policy, options

    def history(self) -> tuple[Tick, ...]:
        """The last ticks, and older ones in which something was done; oldest first."""
        oldest_s = self._recent[0].at_s if self._recent else 0.0
        older = (tick for tick in self._acted if tick.at_s < oldest_s)
        return (*older, *self._recent)

    # ---------------------------------------------------------------- the tick

    def tick(self, seen: Observation) -> Tick:
        """Decide what to do about what is seen."""
        found = [*self._time_doubts(seen.at_s), *doubts(seen)]
        self._expire(seen.at_s)
        wants: Mapping[str, Want] = {}
        if not found:
            wants, wrong = self._ask(seen)
            found = wrong
        self._watch(seen)
        held = "; ".join(found)
        decisions = self._decide(seen, wants, held)
        actions = (
            actions_of(decisions, seen) if self._acts(held) else self._by_hand(decisions, seen)
        )
        tick = Tick(
            at_s=seen.at_s,
            policy=self._policy.name,
            decisions=decisions,
            actions=actions,
            held=held,
            dry_run=self._options.dry_run,
        )
        self._remember(tick)
        return tick

    def check_integrity(self) -> None:
        """Raise AssertionError when the last tick breaks what every tick must keep."""
        assert len(self._recent) <= _RECENT_TICKS, "history grows without bound"
        assert len(self._acted) <= _ACTED_TICKS, "history of acts grows without bound"
        if not self._recent:
            return
        tick = self._recent[-1]
        changed: dict[str, int] = {}
        for action in tick.actions:
            assert action.replicas > 0, f"{action} does nothing"
            match action:
                case StartReplicas():
                    changed[action.pool] = action.replicas
                case StopReplicas():
                    changed[action.pool] = -action.replicas
                case FlipReplicas():
                    pass
        for decision in tick.decisions:
            difference = changed.get(decision.pool, 0)
            assert decision.want >= 0, f"{decision} wants fewer than none"
            assert difference in {0, decision.want - decision.have}, (
                f"{decision} and actions differ"
            )

    def _acts(self, held: str) -> bool:
        return not held and not self._options.dry_run

    def _time_doubts(self, at_s: float) -> list[str]:
        if not math.isfinite(at_s):
            return [f"the time is {at_s}"]
        last_s, self._last_s = self._last_s, at_s
        if last_s is None or at_s >= last_s:
            return []
        for pace in self._pools.values():
            pace.set_back(at_s)
        return [f"time went back from {last_s} to {at_s}"]

    def _expire(self, at_s: float) -> None:
        for pool, override in list(self._overrides.items()):
            if override.until_s is not None and at_s >= override.until_s:
                del self._overrides[pool]

    def _ask(self, seen: Observation) -> tuple[Mapping[str, Want], list[str]]:
        name = self._policy.name
        try:
            told: object = self._policy.wants(seen)
            if not isinstance(told, Mapping):
                got = type(told).__name__
                return {}, [f"policy {name!r} answers {got}, wanted a Want for each pool"]
            wants = {pool: told[pool] for pool in sorted(seen.pools.keys() & told.keys())}
            wrong = [
                f"policy {name!r} {why}"
                for pool, want in wants.items()
                if (why := _nonsense(pool, want))
            ]
        except Exception as error:  # noqa: BLE001 - a user's own code; the pools must not suffer
            return {}, [f"policy {name!r} raised {type(error).__name__}: {error}"]
        return wants, wrong

    def _watch(self, seen: Observation) -> None:
        """Take note of how starts get on; forget pools that are gone."""
        self._pools = {name: self._pools.get(name) or PoolPace() for name in seen.pools}
        for name, pool in seen.pools.items():
            if math.isfinite(seen.at_s):
                self._pools[name].watch(pool, seen.at_s)

    # ---------------------------------------------------------------- bounds

    def _decide(
        self, seen: Observation, wants: Mapping[str, Want], held: str
    ) -> tuple[ScalingDecision, ...]:
        decisions = {
            name: self._bounded(seen, name, wants.get(name), held) for name in sorted(seen.pools)
        }
        granted = within_budget(
            (self._claim(seen.pools[name], decision) for name, decision in decisions.items()),
            self._options.gpu_budget,
        )
        for name, decision in decisions.items():
            if granted[name] != decision.want:
                decisions[name] = replace(decision, want=granted[name], clipped_by="gpu_budget")
        return tuple(decisions.values())

    def _bounded(
        self, seen: Observation, name: str, want: Want | None, held: str
    ) -> ScalingDecision:
        pool = seen.pools[name]
        if any(pool_doubts(pool)):
            return _kept(name, 0, held)  # whatever it has; nobody can tell
        have = pool.ready + pool.starting
        override, bounds = self._overrides.get(name), self._options.bounds.get(name)
        if override is not None:
            return _overridden(name, have, override, seen.at_s)
        if held or want is None or bounds is None:
            return _kept(name, have, held or _why_kept(want, bounds))
        pace = self._pools[name]
        target, clipped_by = pace.step(pool, want.replicas, options=self._options, at_s=seen.at_s)
        stuck_s = pace.stuck_s(pool, seen.at_s) if clipped_by == "starting" else None
        return ScalingDecision(
            pool=name,
            have=have,
            want=target,
            asked=want.replicas,
            reason=want.reason,
            why=want.why if stuck_s is None else f"{want.why}; {_stuck(pool, stuck_s)}",
            inputs=want.inputs,
            clipped_by=clipped_by,
            flips=want.flips,
        )

    def _claim(self, pool: PoolObservation, decision: ScalingDecision) -> Claim:
        bounds = self._options.bounds.get(decision.pool)
        fixed = decision.reason is ScalingReason.OVERRIDE
        least = decision.have
        if bounds is not None and decision.reason is not ScalingReason.HELD:
            least = fewest(bounds, scale_to_zero=self._options.scale_to_zero)
        return Claim(
            pool=decision.pool,
            have=decision.have,
            want=decision.want,
            least=0 if fixed else least,
            gpus=pool.gpus_per_replica,
            leaving=pool.draining,
            fixed=fixed,
        )

    def _check_budget(self, pool: str, replicas: int) -> None:
        budget, bounds = self._options.gpu_budget, self._options.bounds
        if budget is None:
            return
        counts = {name: override.replicas for name, override in self._overrides.items()}
        counts[pool] = replicas
        wanted = sum(
            counts[name] * bounds[name].gpus_per_replica for name in counts if name in bounds
        )
        if wanted > budget:
            raise ValueError(
                f"pool {pool!r}: {replicas} replicas and the other overrides take {wanted:g} GPUs,"
                f" autoscaler.gpu_budget is {budget:g}"
            )

    def _by_hand(
        self, decisions: tuple[ScalingDecision, ...], seen: Observation
    ) -> tuple[Action, ...]:
        """What is done although nothing is decided: what operators have asked for by name."""
        return actions_of(tuple(each for each in decisions if each.pool in self._overrides), seen)

    def _remember(self, tick: Tick) -> None:
        self._recent.append(tick)
        if tick.actions:
            self._acted.append(tick)
        for action in tick.actions:
            if not isinstance(action, FlipReplicas):
                self._pools[action.pool].changed(tick.at_s)


def _nonsense(pool: str, want: object) -> str:
    """What is wrong with a policy's answer for a pool; empty when nothing is."""
    if not isinstance(want, Want):
        return f"answers {type(want).__name__} for {pool!r}, wanted a Want"
    if type(want.replicas) is not int or want.replicas < 0:
        return f"wants {want.replicas!r} replicas of {pool!r}"
    return ""


def _overridden(name: str, have: int, override: Override, at_s: float) -> ScalingDecision:
    lasts = "until it is taken back"
    if override.until_s is not None:
        lasts = f"for {override.until_s - at_s:.0f} s more"
    return ScalingDecision(
        pool=name,
        have=have,
        want=override.replicas,
        asked=override.replicas,
        reason=ScalingReason.OVERRIDE,
        why=f"set to {override.replicas} by hand, {lasts}",
    )


def _stuck(pool: PoolObservation, stuck_s: float) -> str:
    return (
        f"{pool.starting} have been starting for {stuck_s:.0f} s, which takes"
        f" {pool.cold_start_s:.0f} s: no more are asked for until one is ready"
    )


def _kept(name: str, have: int, why: str) -> ScalingDecision:
    return ScalingDecision(
        pool=name, have=have, want=have, asked=have, reason=ScalingReason.HELD, why=why
    )


def _why_kept(want: Want | None, bounds: PoolBounds | None) -> str:
    if bounds is None:
        return "no bounds are configured for this pool, so it is left as it is"
    assert want is None, "asked only why a pool is kept"
    return "the policy says nothing of this pool"
