"""baton's own policy: as many replicas as keep the objectives, and no more.

Theory of operation. Demand is prompt tokens to be computed and tokens to be generated, a second;
each has a `RateForecast`. Pools fall into *groups*, one for each need: those that prefill, those
that decode, and those that do both (`groups`). A group's need, in replicas, is the greatest of

- the need of *present* demand, so that the tail is served, not just the mean (`needs`);
- the need when a replica started now is ready, at a quantile (`RateForecast`);
- the need to work off the backlog that will be left by then, if requests would be late (the fast
  loop);
- the need of the running streams, and of those that admission holds.

A `CapacityCorrection` raises needs when requests are late although there should be enough. A
`NeedStabilizer` turns the need into a target: up at once, down when that is worth going back on. A
role that is short takes the cheapest replicas: spare replicas of the other role (`role_flips`),
then new replicas. Replicas that are still spare are stopped.

A pool whose capacity is not known yet stays as it is, and gets one replica at a time while requests
would be late. Units: tokens per second, seconds, replicas of a group's strongest pool.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from baton.domain.fleet import Role
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.estimators.stabilization import NeedStabilizer, whole_replicas
from baton.policy.scaling.estimators.windows import SampledRate, SlidingSlope
from baton.policy.scaling.needs import objective_of
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.pools.groups import (
    SPLIT_ROLES,
    PoolGroups,
    TokenRates,
    group_needs,
    occupied_replicas,
    pool_groups,
)
from baton.policy.scaling.pools.pool_assignment import (
    PlannedPool,
    PoolAssignment,
    other_role,
    resize,
)
from baton.policy.scaling.pools.role_flips import RoleNeeds, RoleRebalancer

_STUCK_START_COLD_STARTS = 3.0
"""As many cold starts are waited for as by the autoscaler, before starts count as stuck."""
_MIN_CORRECTION_SHOWN = 1.01
"""Corrections that have faded to less."""
_CORRECTION_STEP = 1.1
_CORRECTION_STEP_INTERVAL_S = 60.0
"""A step is given so long to show before the next."""
_CORRECTION_DECAY_S = 1800.0
_MIN_CORRECTION_REQUESTS = 20
"""Fewer in a window say too little about a share."""
_MAX_WINDOW_PAIRS = 40
_MIN_WINDOW_PAIRS = 20
"""A step of the load and its way back spoil four or five pairs; the median is to be of others."""
_NORMAL_MEDIAN = 0.455
"""The median of the square of a standard normal deviate."""
_MAX_SQUARED_VARIATION = 3.0
"""The irregularity that single requests can explain: prompts as varied as published traces (Azure's
code and conversation: 0.9) that come in clumps of two. Above it the rate itself varies over half a
minute, and stays high for longer than a TTFT objective. No surplus averages that out, though the
formula of the queue assumes it. Replicas held ready against it stand idle until the next burst, and
are too few then. The forecast and the backlog answer that. Believed up to 16, it cost a seventh
more GPU-hours on Azure's code completions, for two requests in a hundred more in time."""
_POISSON_SQUARED_VARIATION = 2.0
"""Poisson arrivals (1) of prompts as varied as an exponential distribution's (1)."""
_MAX_ERRORS = 64
"""Errors that are remembered: enough for a 95th percentile, few enough to follow a change."""
_MIN_ERRORS = 8
_CHECKS_PER_HORIZON = 4
"""How often within a horizon a prediction is put aside."""
_MIN_CHECK_INTERVAL_S = 5.0
_MAX_RELATIVE_ERROR = 3.0
"""Relative: four times what was predicted, or more, says no more than that it was a burst."""
_ERROR_SCALE_FLOOR_FRACTION = 0.05
"""Of the usual level: errors are not taken relative to less, so that idle time does not count for
much."""
_BASELINE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """One group's, in replicas of its first pool."""

    current: float | None
    """None while capacities are not known."""
    forecast: float = 0.0
    backlog: float = 0.0
    occupied: float = 0.0
    occupied_soon: float = 0.0
    """The value of `occupied` within seconds, while streams increase."""
    inputs: Mapping[str, float] = field(default_factory=dict)

    @property
    def greatest(self) -> float | None:
        """Of all; None when there is no estimate."""
        return None if self.current is None else max(self.without_forecast, self.forecast)

    @property
    def without_forecast(self) -> float:
        """Without what is foreseen."""
        return max(self.current or 0.0, self.backlog, self.occupied)

    @property
    def for_flips(self) -> float:
        """For flips, which are done within seconds."""
        return max(self.without_forecast, self.occupied_soon)

    @property
    def reason(self) -> ScalingReason:
        """Which of them it is."""
        current = self.current or 0.0
        if self.backlog > max(current, self.forecast, self.occupied):
            return ScalingReason.LATE_REQUESTS
        return (
            ScalingReason.FORECAST
            if self.forecast > max(current, self.occupied)
            else ScalingReason.DEMAND
        )


class SloPolicy:
    """See the module."""

    name = "slo"

    def __init__(self, options: AutoscalerOptions) -> None:
        self._options = options
        self._prompt_forecast, self._output_forecast = RateForecast(), RateForecast()
        self._prompt_rate, self._output_rate = SampledRate(), SampledRate()
        self._burstiness = BurstinessEstimator()
        self._stabilizers = {role: self._make_stabilizer() for role in Role}
        self._corrections = {role: CapacityCorrection(options.slo.max_correction) for role in Role}
        self._rebalancer = RoleRebalancer(options)
        self._stream_slope = SlidingSlope(options.slo.flip_urgent_s)
        self._idle_since_s: float | None = None

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """The desired replicas of every pool."""
        now, later = self._observe_demand(observation)
        groups = pool_groups(observation, self._options.bounds)
        needs = self._needs(observation, groups, now, later)
        targets = {
            role: self._target(observation, role, need, groups.replicas(role))
            for role, need in needs.items()
        }
        for role, target in targets.items():
            if any(_is_first_start_pending(pool) for pool in groups.pools(role)):
                targets[role] = max(1, target)  # the first one is not called off
        if self._is_idle(observation):
            return {
                name: _scale_to_zero(self._options.scale_down.cooldown_s)
                for name in observation.pools
            }
        if groups.assignment is not None:
            self._assign_pools(observation, groups.assignment, needs, targets)
        if Role.MIXED in targets:
            resize(groups.mixed, targets[Role.MIXED])
        kept_for_s = {role: self._stabilizers[role].kept_for_s for role in needs}
        return dict(_desired_replicas(groups, needs, targets, kept_for_s))

    # ---------------------------------------------------------------- what is needed

    def _make_stabilizer(self) -> NeedStabilizer:
        down = self._options.scale_down
        return NeedStabilizer(
            down.cooldown_s,
            headroom_fraction=down.headroom_fraction,
            min_surplus_s=self._options.slo.surplus_cooldowns * down.cooldown_s,
        )

    def _horizon_s(self, observation: Observation) -> float:
        return _cold_start_s(observation) + self._options.interval_s

    def _observe_demand(self, observation: Observation) -> tuple[TokenRates, TokenRates]:
        """Demand as it is, and as it may be when a replica that is started now is ready."""
        demand, at_s, horizon_s = observation.demand, observation.at_s, self._horizon_s(observation)
        requests = demand.requests_per_s * observation.window_s
        now = TokenRates(
            prompt_tokens_per_s=self._prompt_rate.update(
                at_s,
                demand.prompt_tokens_per_s,
                requests=requests,
                squared_variation=self._burstiness.squared_variation(),
            ),
            output_tokens_per_s=self._output_rate.update(
                at_s,
                demand.output_tokens_per_s,
                requests=requests,
                squared_variation=_POISSON_SQUARED_VARIATION,
            ),
        )
        self._prompt_forecast.observe(at_s, now.prompt_tokens_per_s, horizon_s=horizon_s)
        self._output_forecast.observe(at_s, now.output_tokens_per_s, horizon_s=horizon_s)
        self._burstiness.observe(
            at_s,
            window_s=observation.window_s,
            rate=demand.prompt_tokens_per_s,
            mean_tokens=demand.mean_uncached_tokens,
        )
        quantile = self._options.slo.quantile
        return now, TokenRates(
            prompt_tokens_per_s=self._prompt_forecast.predict(horizon_s, quantile=quantile),
            output_tokens_per_s=self._output_forecast.predict(horizon_s, quantile=quantile),
        )

    def _needs(
        self, observation: Observation, groups: PoolGroups, now: TokenRates, later: TokenRates
    ) -> dict[Role, _Need]:
        objective = objective_of(observation, self._burstiness.squared_variation())
        mean_uncached_tokens = observation.demand.mean_uncached_tokens
        current_needs = group_needs(groups, objective, now, mean_tokens=mean_uncached_tokens)
        forecast_needs = group_needs(groups, objective, later, mean_tokens=mean_uncached_tokens)
        needs = {}
        for role, need in current_needs.items():
            factor = self._correction_factor(observation, groups, role, need)
            parts = {
                "now": (need or 0.0) * factor,
                "later": (forecast_needs[role] or 0.0) * factor,
                "backlog": 0.0
                if role is Role.DECODE
                else self._backlog_need(observation, groups, role, later),
                "busy": 0.0
                if role is Role.PREFILL
                else occupied_replicas(
                    groups.pools(role),
                    objective,
                    queued_requests=observation.service.queued_requests,
                ),
            }
            parts["rising"] = self._occupied_soon(observation.at_s, role, need, parts["busy"])
            inputs = {f"need_{name}": value for name, value in parts.items()}
            inputs |= {"correction": factor, "squared_variation": objective.squared_variation}
            needs[role] = _Need(
                current=None if need is None else parts["now"],
                forecast=parts["later"],
                backlog=parts["backlog"],
                occupied=parts["busy"],
                occupied_soon=parts["rising"],
                inputs=inputs
                | self._inputs(observation, groups.reference_pools()[role], now, later),
            )
        return needs

    def _occupied_soon(self, at_s: float, role: Role, need: float | None, occupied: float) -> float:
        """The replicas that the streams of decode will occupy shortly.

        How long answers are is known when they end, but that more run than before at once. While
        it is not known what a replica can do, they occupy nothing: that they do afterwards is no
        rise.
        """
        if role is not Role.DECODE:
            return 0.0
        if need is None:
            self._stream_slope = SlidingSlope(self._options.slo.flip_urgent_s)
            return occupied
        return (
            occupied
            + max(0.0, self._stream_slope.push(at_s, occupied)) * self._options.slo.flip_lead_s
        )

    def _inputs(
        self, observation: Observation, pool: PoolObservation, now: TokenRates, later: TokenRates
    ) -> dict[str, float]:
        return {
            "prompt_tokens_per_s": now.prompt_tokens_per_s,
            "prompt_tokens_per_s_later": later.prompt_tokens_per_s,
            "output_tokens_per_s": now.output_tokens_per_s,
            "output_tokens_per_s_later": later.output_tokens_per_s,
            "prefill_capacity_tokens_per_s": pool.prefill_tokens_per_s or 0.0,
            "decode_capacity_tokens_per_s": pool.decode_tokens_per_s or 0.0,
            "horizon_s": self._horizon_s(observation),
        }

    def _correction_factor(
        self, observation: Observation, groups: PoolGroups, role: Role, need: float | None
    ) -> float:
        correction = self._corrections[role]
        pools = groups.pools(role)
        has_enough = (
            need is not None
            and groups.replicas(role) >= need * correction.factor
            and not any(pool.starting for pool in pools)
        )
        correction.update(
            observation.at_s, is_unexplained=has_enough and is_miss_unexplained(observation, role)
        )
        return correction.factor

    def _backlog_need(
        self, observation: Observation, groups: PoolGroups, role: Role, later: TokenRates
    ) -> float:
        """The need that clears, in time, the backlog at the readiness of a new replica."""
        pools, slack_s = groups.pools(role), observation.service.min_ttft_slack_s
        capacity = pools[0].prefill_tokens_per_s
        if slack_s is None or slack_s >= 0 or capacity is None:
            return 0.0
        queued_tokens = (
            observation.service.queued_requests * observation.demand.mean_uncached_tokens
        )
        waiting_tokens = queued_tokens + sum(
            pool.queued_tokens * pool.ready_replicas for pool in pools
        )
        capacity_tokens_per_s = capacity * (
            groups.replicas(role) - sum(pool.starting for pool in pools)
        )
        remaining_tokens = min(
            waiting_tokens,
            waiting_tokens
            + (later.prompt_tokens_per_s - capacity_tokens_per_s) * self._horizon_s(observation),
        )
        if remaining_tokens <= 0:
            return 0.0
        return (
            later.prompt_tokens_per_s + remaining_tokens / self._options.slo.clear_backlog_s
        ) / capacity

    # ---------------------------------------------------------------- what follows from it

    def _target(self, observation: Observation, role: Role, need: _Need, current: int) -> int:
        needed = need.greatest
        if needed is not None:
            cold_start_s = _cold_start_s(observation)
            stabilizer = self._stabilizers[role]
            return stabilizer.target(
                observation.at_s, current=current, need=needed, cold_start_s=cold_start_s
            )
        service = observation.service
        has_late_requests = service.min_ttft_slack_s is not None and service.min_ttft_slack_s < 0
        has_demand = service.queued_requests > 0 or observation.demand.requests_per_s > 0
        is_starting = any(pool.starting for pool in observation.pools.values())
        return (
            current + 1
            if not is_starting and (has_late_requests or (has_demand and current == 0))
            else current
        )

    def _assign_pools(
        self,
        observation: Observation,
        assignment: PoolAssignment,
        needs: Mapping[Role, _Need],
        targets: Mapping[Role, int],
    ) -> None:
        flip_needs = {role: needs[role].for_flips for role in SPLIT_ROLES}
        required = {
            role: max(targets[role], whole_replicas(flip_needs[role])) for role in SPLIT_ROLES
        }
        role_needs = RoleNeeds(
            greatest={role: needs[role].greatest for role in SPLIT_ROLES}, present=flip_needs
        )
        lacking = {role: required[role] - assignment.whole_replicas(role) for role in SPLIT_ROLES}
        flips = self._rebalancer.flip(observation, assignment, role_needs, lacking)
        for role in SPLIT_ROLES:
            replicas = assignment.whole_replicas(role)
            shortage, surplus = targets[role] - replicas, replicas - required[role]
            if surplus > 0 and not flips.pending:
                assignment.shrink(role, min(surplus, replicas - 1))
            elif shortage > 0 and role is flips.role:
                assignment.grow(role, max(0, shortage - flips.pending))
            elif shortage > 0 and not flips.flipped:  # else it gave what it could spare
                assignment.grow(role, shortage)

    def _is_idle(self, observation: Observation) -> bool:
        """Whether nothing has been asked for, and nothing has run, for a whole window.

        The window begins when a start under way is over: the client that it is for may have left,
        and come back when ordered. A start that takes three times as long as others does not
        count.
        """
        service = observation.service
        has_first_start = any(_is_first_start_pending(pool) for pool in observation.pools.values())
        if (
            observation.demand.requests_per_s > 0
            or service.in_flight
            or service.queued_requests
            or has_first_start
        ):
            self._idle_since_s = None
        elif self._idle_since_s is None or self._idle_since_s > observation.at_s:
            self._idle_since_s = observation.at_s
        if self._idle_since_s is None or not self._options.scale_to_zero:
            return False
        return observation.at_s - self._idle_since_s >= self._options.scale_down.cooldown_s


def _is_first_start_pending(pool: PoolObservation) -> bool:
    """Whether a replica of a pool without any starts, and is not long overdue."""
    if pool.ready_replicas or pool.starting <= 0:
        return False
    return (pool.oldest_start_age_s or 0.0) <= _STUCK_START_COLD_STARTS * pool.cold_start_s


def _cold_start_s(observation: Observation) -> float:
    return max((pool.cold_start_s for pool in observation.pools.values()), default=0.0)


def _desired_replicas(
    groups: PoolGroups,
    needs: Mapping[Role, _Need],
    targets: Mapping[Role, int],
    kept_for_s: Mapping[Role, float | None],
) -> list[tuple[str, DesiredReplicas]]:
    planned_pools: list[tuple[Role, PlannedPool]] = [
        (Role.MIXED, planned_pool) for planned_pool in groups.mixed
    ]
    if groups.assignment is not None:
        planned_pools += [
            (role, planned_pool)
            for role in SPLIT_ROLES
            for planned_pool in groups.assignment.planned[role]
        ]
    reference_pools = {role: pool.name for role, pool in groups.reference_pools().items()}
    inputs: dict[Role, Mapping[str, float]] = {
        # Bounds of pools deny the role the unmet need.
        role: {"target": float(target), "unmet": max(0.0, target - groups.replicas(role))}
        for role, target in targets.items()
    }
    return [
        (
            planned_pool.pool.name,
            _desired_of_pool(
                planned_pool,
                needs[role],
                inputs[role],
                role=role,
                reference_pool=reference_pools[role],
                kept_for_s=kept_for_s[role],
            ),
        )
        for role, planned_pool in planned_pools
    ]


def _desired_of_pool(
    planned_pool: PlannedPool,
    need: _Need,
    target: Mapping[str, float],
    *,
    role: Role,
    reference_pool: str,
    kept_for_s: float | None,
) -> DesiredReplicas:
    current = planned_pool.pool.ready_replicas + planned_pool.pool.starting
    flips = (
        {other_role(role): planned_pool.flipped}
        if role is not Role.MIXED and planned_pool.flipped
        else {}
    )
    return DesiredReplicas(
        # Not within bounds, so that the autoscaler sees what they deny.
        replicas=planned_pool.replicas + planned_pool.denied,
        reason=_reason(role, planned_pool, need, current),
        detail=_detail(
            planned_pool,
            need,
            int(target["target"]),
            role=role,
            reference_pool=reference_pool,
            kept_for_s=kept_for_s,
        ),
        inputs={**need.inputs, **target},
        role_flips=flips,
    )


def _reason(role: Role, planned_pool: PlannedPool, need: _Need, current: int) -> ScalingReason:
    if role is not Role.MIXED and planned_pool.flipped != planned_pool.flipped_before:
        return ScalingReason.ROLE_FLIP
    if planned_pool.replicas > current:
        return need.reason
    return ScalingReason.SURPLUS if planned_pool.replicas < current else ScalingReason.STEADY


def _detail(
    planned_pool: PlannedPool,
    need: _Need,
    target: int,
    *,
    role: Role,
    reference_pool: str,
    kept_for_s: float | None,
) -> str:
    """`reference_pool` is the pool in whose replicas the role's needs are counted."""
    if need.current is None:
        return "how much a replica can do is not known yet"
    parts = [
        f"{role} needs {need.current:.1f} now, {need.forecast:.1f} in"
        f" {need.inputs['horizon_s']:.0f} s"
    ]
    if need.backlog > 0:
        parts.append(f"{need.backlog:.1f} to clear what waits")
    if need.inputs["correction"] > _MIN_CORRECTION_SHOWN:
        parts.append(f"raised {need.inputs['correction']:.2f} times, requests were late")
    parts.append(f"so {target}, counted in replicas of {reference_pool}")
    if kept_for_s is not None:
        parts.append(f"what is to spare is kept for {kept_for_s:.0f} s more")
    if planned_pool.flipped != planned_pool.flipped_before:
        parts.append(f"{planned_pool.flipped} of this pool's play the other role")
    return ", ".join(parts)


def _scale_to_zero(idle_s: float) -> DesiredReplicas:
    return DesiredReplicas(
        replicas=0, reason=ScalingReason.IDLE, detail=f"nothing was asked for in {idle_s:.0f} s"
    )


class CapacityCorrection:
    """A factor on one role's need, from 1 to a bound.

    Theory of operation. Capacities come from models, and models err. The factor goes up a tenth a
    minute while attainment is below its target because of this role's objective. The role must also
    have had its whole need for a minute. Otherwise the factor fades, with a time constant of half
    an hour.
    """

    def __init__(self, max_factor: float) -> None:
        self.factor = 1.0
        self._max_factor = max(1.0, max_factor)
        self._updated_at_s: float | None = None
        self._unexplained_since_s: float | None = None

    def update(self, at_s: float, *, is_unexplained: bool) -> None:
        """Take in whether requests are late now for a reason that needs do not explain."""
        elapsed_s = 0.0 if self._updated_at_s is None else max(0.0, at_s - self._updated_at_s)
        self._updated_at_s = at_s
        if not is_unexplained:
            self._unexplained_since_s = None
            self.factor = 1.0 + (self.factor - 1.0) * math.exp(-elapsed_s / _CORRECTION_DECAY_S)
        elif self._unexplained_since_s is None or self._unexplained_since_s > at_s:
            self._unexplained_since_s = at_s
        elif at_s - self._unexplained_since_s >= _CORRECTION_STEP_INTERVAL_S:
            self._unexplained_since_s = at_s
            self.factor = min(self._max_factor, self.factor * _CORRECTION_STEP)


def is_miss_unexplained(observation: Observation, role: Role) -> bool:
    """Whether the target is missed, and more on account of this role than of the other."""
    service = observation.service
    if service.attainment is None or service.attainment >= observation.attainment_target:
        return False
    if observation.demand.requests_per_s * observation.window_s < _MIN_CORRECTION_REQUESTS:
        return False
    ttft_ratio = _objective_ratio(service.ttft_p90_s, observation.ttft_s)
    tpot_ratio = _objective_ratio(service.tpot_p90_s, observation.tpot_s)
    match role:
        case Role.PREFILL:
            return ttft_ratio >= tpot_ratio
        case Role.DECODE:
            return tpot_ratio > ttft_ratio
        case Role.MIXED:
            return True


def _objective_ratio(measured_s: float | None, objective_s: float | None) -> float:
    return 0.0 if measured_s is None or objective_s is None else measured_s / objective_s


class BurstinessEstimator:
    """Estimates ca^2 + cs^2: of arrivals and of prompts' lengths.

    The work W that arrives in a window has Var(W) / (E[W] E[n]) = ca^2 + cs^2 when the window holds
    many arrivals. The variance is taken from differences between adjacent windows, so that slow
    changes of the rate do not count. It is taken from their median, so that single jumps do not.

    Source: the variance of a compound renewal process (D. Cox, Renewal Theory, 1962).
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._ratios: deque[float] = deque(maxlen=_MAX_WINDOW_PAIRS)

    def observe(self, at_s: float, *, window_s: float, rate: float, mean_tokens: float) -> None:
        """Take in tokens a second over the window that ends now, and a request's mean tokens."""
        if self._last is not None and 0 <= at_s - self._last[0] < window_s:
            return  # overlaps with the one before
        previous, self._last = self._last, (at_s, rate)
        if previous is None or not 0 <= at_s - previous[0] <= 2 * window_s:
            return
        mean = (rate + previous[1]) / 2 * window_s
        if mean > 0 and mean_tokens > 0:
            difference = (rate - previous[1]) * window_s
            self._ratios.append(difference * difference / (2 * mean * mean_tokens))

    def squared_variation(self) -> float:
        """ca^2 + cs^2, not less than of arrivals at random and not more than can be believed."""
        if len(self._ratios) < _MIN_WINDOW_PAIRS:
            return _POISSON_SQUARED_VARIATION
        return min(
            max(median(self._ratios) / _NORMAL_MEDIAN, _POISSON_SQUARED_VARIATION),
            _MAX_SQUARED_VARIATION,
        )


class RateForecast:
    """One series of rates, and its near future.

    Theory of operation. A level and a damped trend are smoothed by the time between ticks, so
    uneven ticks and gaps do no harm. Every so often the forecast for one horizon ahead is kept, and
    compared when its time comes. A quantile of the last few dozen relative errors is added to the
    next forecast. So steady demand costs little headroom, and jumpy demand much. Relative errors of
    a lull are large, so the addition never leads beyond the highest rate of about an hour.

    Source: E. Gardner and E. McKenzie, Forecasting trends in time series (1985), for the damped
    trend, here for uneven steps: with smoothing times T the weight of a step dt is 1 - exp(-dt /
    T). The rate of a day before is no help: in ServeGen's m-large trace it correlates by 0.1 and
    less.
    """

    def __init__(self, *, level_s: float = 15.0, trend_s: float = 120.0) -> None:
        """Smooth the level and the trend over these times; a trend lasts as long again."""
        self._level_s, self._trend_s = level_s, trend_s
        self._at_s: float | None = None
        self._level = 0.0
        self._trend = 0.0
        self._baseline = 0.0
        self._peak = 0.0
        """Highest rate seen, falling to the usual rate."""
        self._pending_checks: deque[tuple[float, float]] = deque()
        self._errors: deque[float] = deque(maxlen=_MAX_ERRORS)

    def observe(self, at_s: float, rate: float, *, horizon_s: float) -> None:
        """Take in the present rate, and put aside the forecast for one horizon ahead."""
        if not (math.isfinite(rate) and rate >= 0):
            return
        if self._at_s is None or at_s < self._at_s:
            self._reset(at_s, rate)
        elif at_s > self._at_s:
            self._smooth(at_s - self._at_s, rate)
            self._at_s = at_s
            self._check_predictions(at_s, rate)
        self._schedule_check(at_s, horizon_s)

    def predict(self, horizon_s: float, *, quantile: float | None = None) -> float:
        """The rate `horizon_s` after the last rate seen; at its mean without a quantile."""
        mean = self._mean(horizon_s)
        if quantile is None or len(self._errors) < _MIN_ERRORS:
            return mean
        error = _quantile(sorted(self._errors), quantile)
        return max(0.0, min(mean + error * self._error_scale(mean), max(mean, self._peak)))

    def _mean(self, horizon_s: float) -> float:
        damped_horizon_s = self._trend_s * -math.expm1(-horizon_s / self._trend_s)
        return max(0.0, self._level + self._trend * damped_horizon_s)

    def _error_scale(self, predicted: float) -> float:
        return max(predicted, _ERROR_SCALE_FLOOR_FRACTION * self._baseline, 1e-9)

    def _reset(self, at_s: float, rate: float) -> None:
        self._at_s, self._level, self._trend = at_s, rate, 0.0
        self._baseline = self._peak = rate
        self._pending_checks.clear()

    def _smooth(self, step_s: float, rate: float) -> None:
        expected = self._mean(step_s)
        previous_level = self._level
        self._level = expected + (rate - expected) * -math.expm1(-step_s / self._level_s)
        observed_trend = (self._level - previous_level) / step_s
        trend_decay = math.exp(-step_s / self._trend_s)
        self._trend = self._trend * trend_decay + observed_trend * (1.0 - trend_decay)
        baseline_weight = -math.expm1(-step_s / _BASELINE_S)
        self._baseline += (rate - self._baseline) * baseline_weight
        self._peak = max(rate, self._peak + (self._baseline - self._peak) * baseline_weight)

    def _check_predictions(self, at_s: float, rate: float) -> None:
        while self._pending_checks and self._pending_checks[0][0] <= at_s:
            due_s, predicted = self._pending_checks.popleft()
            if at_s - due_s <= max(self._level_s, _MIN_CHECK_INTERVAL_S):  # else it fell into a gap
                error = (rate - predicted) / self._error_scale(predicted)
                self._errors.append(min(error, _MAX_RELATIVE_ERROR))

    def _schedule_check(self, at_s: float, horizon_s: float) -> None:
        due_s = at_s + horizon_s
        every_s = max(horizon_s / _CHECKS_PER_HORIZON, _MIN_CHECK_INTERVAL_S)
        if self._pending_checks and due_s < self._pending_checks[-1][0] + every_s:
            return
        self._pending_checks.append((due_s, self._mean(horizon_s)))


def _quantile(ordered: Sequence[float], quantile: float) -> float:
    """Linear between the two nearest (Hyndman and Fan's type 7)."""
    rank = quantile * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
