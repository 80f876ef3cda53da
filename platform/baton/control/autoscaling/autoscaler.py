"""The autoscaler: turns what a policy wants into what is to be done, within every bound.

Theory of operation. Whoever carries it out ticks the machine every `options.interval_s` with an
`Observation`. A tick goes through five stages, none of which waits for anything:

1. *Doubt.* What is missing, not a number or out of all bounds (`preconditions`), a clock that went
   back, and a policy that raises or answers nonsense make the tick *hold*: every pool stays as it
   is, and the tick says why. Overrides are carried out nevertheless, unless the pool's own counts
   are among the nonsense: an operator has counted himself.
2. *Ask.* The policy says how many replicas each pool should have, and who should flip. In a dry
   run nothing comes of it: only overrides are carried out.
3. *Bound.* Per pool, in this order: an override (exactly that many, no other bound but the budget),
   min and max (at once when they were changed), starts that do not come up, the pause since the
   pool's last change, the largest step (`stabilization`). Then the GPU budget, over all pools
   (`budget`).
4. *Act.* Flips, then starts, then stops (`actions`). Replicas that are starting count as had,
   so a want that stands is not asked for twice. Counts in actions are differences;
   `ScalingDecision.target_replicas` is the pool's new target, and setting that target twice does
   no harm.
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
from baton.control.autoscaling.preconditions import unmet_pool_preconditions, unmet_preconditions
from baton.control.autoscaling.stabilization import ScalingBehavior, min_replicas
from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingAction,
    ScalingDecision,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.budget import GpuClaim, apply_gpu_budget
from baton.policy.scaling.desired import DesiredReplicas, ScalingPolicy, ScalingReason
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds

_RECENT_TICKS = 300
"""Ten minutes of ticks every two seconds."""
_ACTION_TICKS = 300


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
        self._behaviors: dict[str, ScalingBehavior] = {}
        self._last_tick_at_s: float | None = None
        self._recent_ticks: deque[AutoscalerTick] = deque(maxlen=_RECENT_TICKS)
        self._action_ticks: deque[AutoscalerTick] = deque(maxlen=_ACTION_TICKS)

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

    def history(self) -> tuple[AutoscalerTick, ...]:
        """The last ticks, and older ones in which something was done; oldest first."""
        oldest_s = self._recent_ticks[0].at_s if self._recent_ticks else 0.0
        older = (tick for tick in self._action_ticks if tick.at_s < oldest_s)
        return (*older, *self._recent_ticks)

    # ---------------------------------------------------------------- the tick

    def tick(self, observation: Observation) -> AutoscalerTick:
        """Decide what to do about what is seen."""
        problems = [*self._clock_problems(observation.at_s), *unmet_preconditions(observation)]
        self._expire_overrides(observation.at_s)
        desired: Mapping[str, DesiredReplicas] = {}
        if not problems:
            desired, policy_problems = self._desired(observation)
            problems = policy_problems
        self._observe_pools(observation)
        hold_reason = "; ".join(problems)
        decisions = self._decide(observation, desired, hold_reason)
        actions = (
            actions_of(decisions, observation)
            if self._may_act(hold_reason)
            else self._override_actions(decisions, observation)
        )
        tick = AutoscalerTick(
            at_s=observation.at_s,
            policy=self._policy.name,
            decisions=decisions,
            actions=actions,
            paused_reason=hold_reason,
            dry_run=self._options.dry_run,
        )
        self._remember(tick)
        return tick

    def check_integrity(self) -> None:
        """Raise AssertionError when the last tick breaks what every tick must keep."""
        assert len(self._recent_ticks) <= _RECENT_TICKS, "history grows without bound"
        assert len(self._action_ticks) <= _ACTION_TICKS, "history of acts grows without bound"
        if not self._recent_ticks:
            return
        tick = self._recent_ticks[-1]
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
            assert decision.target_replicas >= 0, f"{decision} wants fewer than none"
            assert difference in {0, decision.target_replicas - decision.current_replicas}, (
                f"{decision} and actions differ"
            )

    def _may_act(self, hold_reason: str) -> bool:
        return not hold_reason and not self._options.dry_run

    def _clock_problems(self, at_s: float) -> list[str]:
        if not math.isfinite(at_s):
            return [f"the time is {at_s}"]
        last_s, self._last_tick_at_s = self._last_tick_at_s, at_s
        if last_s is None or at_s >= last_s:
            return []
        for behavior in self._behaviors.values():
            behavior.on_clock_set_back(at_s)
        return [f"time went back from {last_s} to {at_s}"]

    def _expire_overrides(self, at_s: float) -> None:
        for pool, override in list(self._overrides.items()):
            if override.until_s is not None and at_s >= override.until_s:
                del self._overrides[pool]

    def _desired(self, observation: Observation) -> tuple[Mapping[str, DesiredReplicas], list[str]]:
        name = self._policy.name
        try:
            answer: object = self._policy.desired(observation)
            if not isinstance(answer, Mapping):
                answer_type = type(answer).__name__
                return {}, [
                    f"policy {name!r} answers {answer_type}, wanted DesiredReplicas for each pool"
                ]
            desired = {
                pool: answer[pool] for pool in sorted(observation.pools.keys() & answer.keys())
            }
            problems = [
                f"policy {name!r} {why}"
                for pool, want in desired.items()
                if (why := _invalid_answer(pool, want))
            ]
        except Exception as error:  # noqa: BLE001 - a user's own code; the pools must not suffer
            return {}, [f"policy {name!r} raised {type(error).__name__}: {error}"]
        return desired, problems

    def _observe_pools(self, observation: Observation) -> None:
        """Take note of how starts get on; forget pools that are gone."""
        self._behaviors = {
            name: self._behaviors.get(name) or ScalingBehavior() for name in observation.pools
        }
        for name, pool in observation.pools.items():
            if math.isfinite(observation.at_s):
                self._behaviors[name].observe(pool, observation.at_s)

    # ---------------------------------------------------------------- bounds

    def _decide(
        self, observation: Observation, desired: Mapping[str, DesiredReplicas], hold_reason: str
    ) -> tuple[ScalingDecision, ...]:
        decisions = {
            name: self._decide_pool(observation, name, desired.get(name), hold_reason)
            for name in sorted(observation.pools)
        }
        granted = apply_gpu_budget(
            (
                self._claim(observation.pools[name], decision)
                for name, decision in decisions.items()
            ),
            self._options.gpu_budget,
        )
        for name, decision in decisions.items():
            if granted[name] != decision.target_replicas:
                decisions[name] = replace(
                    decision, target_replicas=granted[name], limited_by="gpu_budget"
                )
        return tuple(decisions.values())

    def _decide_pool(
        self, observation: Observation, name: str, desired: DesiredReplicas | None, hold_reason: str
    ) -> ScalingDecision:
        pool = observation.pools[name]
        if any(unmet_pool_preconditions(pool)):
            return _hold_decision(name, 0, hold_reason)  # whatever it has; nobody can tell
        have = pool.ready_replicas + pool.starting
        override, bounds = self._overrides.get(name), self._options.bounds.get(name)
        if override is not None:
            return _override_decision(name, have, override, observation.at_s)
        if hold_reason or desired is None or bounds is None:
            return _hold_decision(name, have, hold_reason or _hold_reason(desired, bounds))
        behavior = self._behaviors[name]
        target, clipped_by = behavior.clip(
            pool, desired.replicas, options=self._options, at_s=observation.at_s
        )
        stuck_s = behavior.stuck_s(pool, observation.at_s) if clipped_by == "starting" else None
        return ScalingDecision(
            pool=name,
            current_replicas=have,
            target_replicas=target,
            desired_replicas=desired.replicas,
            reason=desired.reason,
            why=desired.why
            if stuck_s is None
            else f"{desired.why}; {_stuck_message(pool, stuck_s)}",
            inputs=desired.inputs,
            limited_by=clipped_by,
            role_flips=desired.role_flips,
        )

    def _claim(self, pool: PoolObservation, decision: ScalingDecision) -> GpuClaim:
        bounds = self._options.bounds.get(decision.pool)
        fixed = decision.reason is ScalingReason.OVERRIDE
        lower_bound = decision.current_replicas
        if bounds is not None and decision.reason is not ScalingReason.PAUSED:
            lower_bound = min_replicas(bounds, scale_to_zero=self._options.scale_to_zero)
        return GpuClaim(
            pool=decision.pool,
            current_replicas=decision.current_replicas,
            desired_replicas=decision.target_replicas,
            min_replicas=0 if fixed else lower_bound,
            gpus_per_replica=pool.gpus_per_replica,
            draining_replicas=pool.draining,
            is_overridden=fixed,
        )

    def _check_budget(self, pool: str, replicas: int) -> None:
        budget, bounds = self._options.gpu_budget, self._options.bounds
        if budget is None:
            return
        counts = {name: override.replicas for name, override in self._overrides.items()}
        counts[pool] = replicas
        requested_gpus = sum(
            counts[name] * bounds[name].gpus_per_replica for name in counts if name in bounds
        )
        if requested_gpus > budget:
            raise ValueError(
                f"pool {pool!r}: {replicas} replicas and the other overrides take"
                f" {requested_gpus:g} GPUs,"
                f" autoscaler.gpu_budget is {budget:g}"
            )

    def _override_actions(
        self, decisions: tuple[ScalingDecision, ...], observation: Observation
    ) -> tuple[ScalingAction, ...]:
        """What is done although nothing is decided: what operators have asked for by name."""
        return actions_of(
            tuple(each for each in decisions if each.pool in self._overrides), observation
        )

    def _remember(self, tick: AutoscalerTick) -> None:
        self._recent_ticks.append(tick)
        if tick.actions:
            self._action_ticks.append(tick)
        for action in tick.actions:
            if not isinstance(action, FlipReplicas):
                self._behaviors[action.pool].on_scaled(tick.at_s)


def _invalid_answer(pool: str, want: object) -> str:
    """What is wrong with a policy's answer for a pool; empty when nothing is."""
    if not isinstance(want, DesiredReplicas):
        return f"answers {type(want).__name__} for {pool!r}, wanted DesiredReplicas"
    if type(want.replicas) is not int or want.replicas < 0:
        return f"wants {want.replicas!r} replicas of {pool!r}"
    return ""


def _override_decision(name: str, have: int, override: Override, at_s: float) -> ScalingDecision:
    duration = "until it is taken back"
    if override.until_s is not None:
        duration = f"for {override.until_s - at_s:.0f} s more"
    return ScalingDecision(
        pool=name,
        current_replicas=have,
        target_replicas=override.replicas,
        desired_replicas=override.replicas,
        reason=ScalingReason.OVERRIDE,
        why=f"set to {override.replicas} by hand, {duration}",
    )


def _stuck_message(pool: PoolObservation, stuck_s: float) -> str:
    return (
        f"{pool.starting} have been starting for {stuck_s:.0f} s, which takes"
        f" {pool.cold_start_s:.0f} s: no more are asked for until one is ready"
    )


def _hold_decision(name: str, have: int, why: str) -> ScalingDecision:
    return ScalingDecision(
        pool=name,
        current_replicas=have,
        target_replicas=have,
        desired_replicas=have,
        reason=ScalingReason.PAUSED,
        why=why,
    )


def _hold_reason(want: DesiredReplicas | None, bounds: PoolBounds | None) -> str:
    if bounds is None:
        return "no bounds are configured for this pool, so it is left as it is"
    assert want is None, "asked only why a pool is kept"
    return "the policy says nothing of this pool"
