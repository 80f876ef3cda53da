"""The autoscaler: turns the desired replicas of a policy into actions, within every bound.

Theory of operation. The caller ticks the machine every `options.interval_s` with an `Observation`,
and executes its actions. A tick has five stages, none of which waits:

1. *Validate.* A tick *holds* every pool, with the reason, after input that is missing, not a number
   or out of bounds (`unmet_preconditions`). So it does after a clock that went back, and a policy
   that raises or gives an invalid answer. Overrides are executed nevertheless, unless the pool's
   own counts are invalid.
2. *Ask.* The policy returns desired replicas of each pool, and role changes. A dry run executes
   only overrides.
3. *Bound.* An override sets exactly that many, within the GPU budget. Otherwise the bounds are, in
   order: min and max (at once after a change), overdue starts, the pool's last change, the largest
   step (`ScalingBehavior`). Last comes the GPU budget over all pools (`budget`).
4. *Act.* Role changes, then starts, then stops (`_actions_of`). Starting replicas count as present,
   so a repeated wish starts nothing twice. Counts in actions are differences;
   `ScalingDecision.target_replicas` is absolute, and setting it twice does no harm.
5. *Remember.* The last few hundred ticks with their inputs; those with actions for longer.

A pool whose replicas have been starting for three of its cold starts, with none ready, gets no more
until one is. A pool that disappears is forgotten, its override is not. A pool without bounds stays
as it is. Nothing is persistent: after a restart, the owner sets the overrides again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from baton.domain.fleet import Role
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
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, ServiceLevel
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds

_RECENT_TICKS = 300
"""Ten minutes of ticks every two seconds."""
_ACTION_TICKS = 300

_MAX_VALUE = 1e12
"""Beyond any rate, count or time that a fleet could have."""
_MAX_REPLICAS = 100_000
_SIGNED = frozenset({"min_ttft_slack_s"})
_FRACTIONS = frozenset({"attainment", "kv_used_fraction"})
_POSITIVE = frozenset({"gpus_per_replica", "prefill_tokens_per_s", "decode_tokens_per_s"})
_COUNTS = frozenset({"prefill", "decode", "mixed", "starting", "draining"})
_MAX_FRACTION = 1.01
"""Shares are worked out in floating point, some from two clocks."""

STUCK_COLD_STARTS = 3.0
"""A start that takes three times as long as starts do is not waited for by starting more."""
_MIN_STUCK_S = 30.0
"""Cold starts of engines that need almost none vary by more than a factor."""


class ScalingBehavior:
    """How far one pool may change now: its pauses, and starts that do not come up."""

    def __init__(self) -> None:
        self._changed_at_s: float | None = None
        self._starting = self._ready = 0
        self._starting_since_s: float | None = None
        """When the replicas that are starting were asked for, or one of them last became ready."""

    def observe(self, pool: PoolObservation, at_s: float) -> None:
        """Take note of how starts get on.

        Where one is asked for as soon as another becomes ready, as many are starting as before.
        """
        progressed = pool.starting < self._starting or pool.ready_replicas > self._ready
        if pool.starting <= 0:
            self._starting_since_s = None
        elif self._starting_since_s is None or progressed:
            self._starting_since_s = at_s
        self._starting, self._ready = pool.starting, pool.ready_replicas

    def on_scaled(self, at_s: float) -> None:
        """Replicas were asked for, or stopped."""
        self._changed_at_s = at_s

    def on_clock_set_back(self, at_s: float) -> None:
        """The clock went back to `at_s`: nothing can have happened after it."""
        if self._changed_at_s is not None:
            self._changed_at_s = min(self._changed_at_s, at_s)
        if self._starting_since_s is not None:
            self._starting_since_s = min(self._starting_since_s, at_s)

    def stuck_s(self, pool: PoolObservation, at_s: float) -> float | None:
        """How long starts are overdue; None while they are in time."""
        timeout_s = max(STUCK_COLD_STARTS * pool.cold_start_s, _MIN_STUCK_S)
        if self._starting_since_s is None or at_s - self._starting_since_s <= timeout_s:
            return None
        return at_s - self._starting_since_s

    def clip(
        self, pool: PoolObservation, desired: int, *, options: AutoscalerOptions, at_s: float
    ) -> tuple[int, str]:
        """As many as asked for, within the pool's own bounds; and which of them it was."""
        bounds = options.bounds[pool.name]
        lower_bound = min_replicas(bounds, scale_to_zero=options.scale_to_zero)
        bounded = max(min(desired, bounds.max), lower_bound)
        clipped_by = "" if bounded == desired else ("max" if desired > bounded else "min")
        current = max(
            min(pool.ready_replicas + pool.starting, bounds.max), lower_bound
        )  # put right at once
        if bounded == current:
            return bounded, clipped_by
        scales_up = bounded > current
        if scales_up and self.stuck_s(pool, at_s) is not None:
            return current, "starting"
        limits = options.scale_up if scales_up else options.scale_down
        if self._changed_at_s is not None and at_s - self._changed_at_s < limits.cooldown_s:
            return current, "cooldown"
        max_change = max(1, limits.max_step, math.ceil(limits.max_fraction * current))
        if abs(bounded - current) > max_change:
            return current + (max_change if scales_up else -max_change), "max_step"
        return bounded, clipped_by


def min_replicas(bounds: PoolBounds, *, scale_to_zero: bool) -> int:
    """How few replicas a pool may have."""
    return min(bounds.min if scale_to_zero else max(bounds.min, 1), bounds.max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """An operator's word on one pool."""

    replicas: int
    until_s: float | None = None
    """None: without an end."""


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

    # ---------------------------------------------------------------- operators' commands

    def override(self, pool: str, replicas: int, *, until_s: float | None, now_s: float) -> None:
        """Keep a pool at exactly `replicas` replicas until then; replaces its last override.

        Raises:
            ValueError: that many cannot be had, or the time is past.
        """
        bounds = self._options.bounds.get(pool)
        if bounds is None:
            known = ", ".join(sorted(self._options.bounds)) or "none"
            raise ValueError(f"pool {pool!r} is not scaled; pools that are: {known}")
        if not 0 <= replicas <= bounds.max:
            raise ValueError(f"pool {pool!r}: got {replicas} replicas, expected 0 to {bounds.max}")
        if until_s is not None and not until_s > now_s:
            raise ValueError(f"pool {pool!r}: the override would end at {until_s}, it is {now_s}")
        self._check_budget(pool, replicas)
        self._overrides[pool] = Override(replicas=replicas, until_s=until_s)

    def clear_override(self, pool: str) -> bool:
        """Leave a pool to the policy again; False when it was."""
        return self._overrides.pop(pool, None) is not None

    def overrides(self) -> Mapping[str, Override]:
        """The active overrides, by pool."""
        return dict(self._overrides)

    def reconfigure(self, policy: ScalingPolicy, options: AutoscalerOptions) -> None:
        """Go on by another policy and other bounds; overrides, pauses and history stay."""
        self._policy, self._options = policy, options

    def history(self) -> tuple[AutoscalerTick, ...]:
        """The last ticks, and older ticks with actions; oldest first."""
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
            _actions_of(decisions, observation)
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
                    f"policy {name!r} answers {answer_type}, expected DesiredReplicas for each pool"
                ]
            desired = {
                pool: answer[pool] for pool in sorted(observation.pools.keys() & answer.keys())
            }
            problems = [
                f"policy {name!r} {reason}"
                for pool, want in desired.items()
                if (reason := _invalid_answer(pool, want))
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
            return _hold_decision(name, 0, hold_reason)  # its number of replicas is unknown
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
            detail=desired.detail
            if stuck_s is None
            else f"{desired.detail}; {_stuck_message(pool, stuck_s)}",
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
        """The actions of a tick without decisions: the operators' overrides."""
        return _actions_of(
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
    """The fault of a policy's answer for a pool; empty when it is valid."""
    if not isinstance(want, DesiredReplicas):
        return f"answers {type(want).__name__} for {pool!r}, expected DesiredReplicas"
    if type(want.replicas) is not int or want.replicas < 0:
        return f"wants {want.replicas!r} replicas of {pool!r}"
    return ""


def _override_decision(name: str, have: int, override: Override, at_s: float) -> ScalingDecision:
    duration = "until removed"
    if override.until_s is not None:
        duration = f"for {override.until_s - at_s:.0f} s more"
    return ScalingDecision(
        pool=name,
        current_replicas=have,
        target_replicas=override.replicas,
        desired_replicas=override.replicas,
        reason=ScalingReason.OVERRIDE,
        detail=f"override: {override.replicas} replicas, {duration}",
    )


def _stuck_message(pool: PoolObservation, stuck_s: float) -> str:
    return (
        f"{pool.starting} have been starting for {stuck_s:.0f} s, which takes"
        f" {pool.cold_start_s:.0f} s: no more are asked for until one is ready"
    )


def _hold_decision(name: str, have: int, reason: str) -> ScalingDecision:
    return ScalingDecision(
        pool=name,
        current_replicas=have,
        target_replicas=have,
        desired_replicas=have,
        reason=ScalingReason.PAUSED,
        detail=reason,
    )


def _hold_reason(want: DesiredReplicas | None, bounds: PoolBounds | None) -> str:
    if bounds is None:
        return "no bounds are configured for this pool, so it is left as it is"
    assert want is None, "asked only why a pool is kept"
    return "the policy says nothing of this pool"


def unmet_preconditions(observation: Observation) -> Iterator[str]:
    """Everything that is missing, not a number, or out of all bounds."""
    yield from observation.missing_inputs
    if not math.isfinite(observation.window_s) or observation.window_s <= 0:
        yield f"the window is {observation.window_s} s, expected more than 0"
    for name, objective in (("ttft_s", observation.ttft_s), ("tpot_s", observation.tpot_s)):
        if objective is not None and not 0 < objective < _MAX_VALUE:
            yield f"the objective {name} is {objective}, expected more than 0"
    yield from _out_of_range_fields("demand", observation.demand)
    yield from _out_of_range_fields("service", observation.service)
    for name in sorted(observation.pools):
        if observation.pools[name].name != name:
            yield f"pool {name!r} calls itself {observation.pools[name].name!r}"
        yield from _out_of_range_fields(f"pool {name!r}", observation.pools[name])


def unmet_pool_preconditions(pool: PoolObservation) -> Iterator[str]:
    """Likewise of one pool's counts alone."""
    for name in sorted(_COUNTS):
        count = getattr(pool, name)
        if _is_out_of_range(name, count):
            yield f"{name} is {count}"


def _out_of_range_fields(
    label: str, figures: Demand | ServiceLevel | PoolObservation
) -> Iterator[str]:
    for field in fields(figures):
        value: object = getattr(figures, field.name)
        if isinstance(value, int | float) and _is_out_of_range(field.name, value):
            yield f"{label}: {field.name} is {value}"


def _is_out_of_range(name: str, value: float) -> bool:
    if not math.isfinite(value) or abs(value) > _MAX_VALUE:
        return True
    if name in _SIGNED:
        return False
    if name in _COUNTS:
        return not 0 <= value <= _MAX_REPLICAS
    if name in _POSITIVE:
        return value <= 0
    return value < 0 or (name in _FRACTIONS and value > _MAX_FRACTION)


def _actions_of(
    decisions: tuple[ScalingDecision, ...], observation: Observation
) -> tuple[ScalingAction, ...]:
    """Flips, then starts, then stops: the cheapest first."""
    flips: list[ScalingAction] = []
    starts: list[ScalingAction] = []
    stops: list[ScalingAction] = []
    for decision in decisions:
        if decision.reason not in {ScalingReason.PAUSED, ScalingReason.OVERRIDE}:
            flips.extend(_flips(observation.pools[decision.pool], decision.role_flips))
        difference = decision.target_replicas - decision.current_replicas
        if difference > 0:
            starts.append(StartReplicas(pool=decision.pool, replicas=difference))
        elif difference < 0:
            stops.append(StopReplicas(pool=decision.pool, replicas=-difference))
    return (*flips, *starts, *stops)


def _flips(pool: PoolObservation, desired_roles: Mapping[Role, int]) -> list[ScalingAction]:
    """The flips from the present roles of the pool's replicas to the desired roles."""
    replicas_by_role = {
        Role.PREFILL: pool.prefill,
        Role.DECODE: pool.decode,
        Role.MIXED: pool.mixed,
    }
    spare = replicas_by_role.pop(pool.role)
    flips: list[ScalingAction] = []
    for role, replicas in replicas_by_role.items():
        if (surplus := replicas - desired_roles.get(role, 0)) > 0:
            flips.append(FlipReplicas(pool=pool.name, replicas=surplus, role=pool.role))
            spare += surplus
    for role, replicas in replicas_by_role.items():
        if (missing := min(desired_roles.get(role, 0) - replicas, spare)) > 0:
            flips.append(FlipReplicas(pool=pool.name, replicas=missing, role=role))
            spare -= missing
    return flips
