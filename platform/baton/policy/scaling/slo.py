"""baton's own policy: as many replicas as keep the objectives, and no more.

Theory of operation. Demand is prompt tokens to be computed and tokens to be generated, a second;
each has a `Forecast`. Pools fall into *groups*, one for each need: those that prefill, those that
decode, and those that do both (`groups`). A group's need, in replicas, is the greatest of

- what demand needs *now*, so that the tail is served, not just the mean (`needs`);
- what it will need when a replica started now is ready, at a quantile (`forecast`);
- what works off, in time, the backlog that will be left by then, when somebody who waits would be
  late (the fast loop);
- what the streams under way occupy, and those that are held at the door will.

A `Correction` raises needs when requests are late although there should be enough. A `Track` turns
the need into a target: up at once, down when that is worth going back on. A role that is short
takes the cheapest that there is: replicas of the other role that have been to spare (`rebalance`),
then new ones. What is to spare in the end is stopped.

A pool whose capacity is not known yet stays as it is, and gets one replica at a time while somebody
would be late. Units: tokens per second, seconds, replicas of a group's strongest pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.domain.fleet import Role
from baton.policy.scaling.correction import Correction, is_unexplained
from baton.policy.scaling.desired import ScalingReason, Want
from baton.policy.scaling.estimators.burstiness import ArrivalMeter
from baton.policy.scaling.estimators.stabilization import Track, whole
from baton.policy.scaling.estimators.windows import Slope
from baton.policy.scaling.forecast import Forecast
from baton.policy.scaling.needs import promise_of
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.pools.groups import (
    SPLIT_ROLES,
    Groups,
    Rates,
    busy_replicas,
    group_needs,
    groups_of,
)
from baton.policy.scaling.pools.pool_assignment import Roster, Seat, other, resize
from baton.policy.scaling.pools.role_flips import Rebalance, SplitNeeds

_OVERDUE_COLD_STARTS = 3.0
"""As many cold starts are waited for as by the autoscaler, before starts count as stuck."""
_WORTH_TELLING = 1.01
"""Corrections that have faded to less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """One group's, in replicas of its first pool."""

    now: float | None
    """None while capacities are not known."""
    later: float = 0.0
    backlog: float = 0.0
    busy: float = 0.0
    rising: float = 0.0
    """What `busy` will come to within seconds, while streams become more."""
    inputs: Mapping[str, float] = field(default_factory=dict)

    @property
    def greatest(self) -> float | None:
        """Of all; None when nothing can be said."""
        return None if self.now is None else max(self.present, self.later)

    @property
    def present(self) -> float:
        """Without what is foreseen."""
        return max(self.now or 0.0, self.backlog, self.busy)

    @property
    def soon(self) -> float:
        """For flips, which are done within seconds."""
        return max(self.present, self.rising)

    @property
    def reason(self) -> ScalingReason:
        """Which of them it is."""
        now = self.now or 0.0
        if self.backlog > max(now, self.later, self.busy):
            return ScalingReason.SLACK
        return ScalingReason.FORECAST if self.later > max(now, self.busy) else ScalingReason.DEMAND


class SloPolicy:
    """See the module."""

    name = "slo"

    def __init__(self, options: AutoscalerOptions) -> None:
        self._options = options
        self._prompts, self._outputs = Forecast(), Forecast()
        self._meter = ArrivalMeter()
        self._tracks = {role: self._track() for role in Role}
        self._corrections = {role: Correction(options.slo.max_correction) for role in Role}
        self._rebalance = Rebalance(options)
        self._rise = Slope(options.slo.flip_urgent_s)
        self._idle_since_s: float | None = None

    def wants(self, seen: Observation) -> Mapping[str, Want]:
        """What every pool should have."""
        now, later = self._learn(seen)
        groups = groups_of(seen, self._options.bounds)
        needs = self._needs(seen, groups, now, later)
        targets = {
            role: self._target(seen, role, need, groups.players(role))
            for role, need in needs.items()
        }
        for role, target in targets.items():
            if any(_may_come(pool) for pool in groups.pools(role)):
                targets[role] = max(1, target)  # the first one is not called off
        if self._is_idle(seen):
            return {name: _nothing(self._options.down.cooldown_s) for name in seen.pools}
        if groups.roster is not None:
            self._arrange(seen, groups.roster, needs, targets)
        if Role.MIXED in targets:
            resize(groups.mixed, targets[Role.MIXED])
        return dict(_told(groups, needs, targets))

    # ---------------------------------------------------------------- what is needed

    def _track(self) -> Track:
        down = self._options.down
        return Track(
            down.cooldown_s,
            headroom_fraction=down.headroom_fraction,
            patience_s=self._options.slo.patience_cooldowns * down.cooldown_s,
        )

    def _horizon_s(self, seen: Observation) -> float:
        return _cold_start_s(seen) + self._options.interval_s

    def _learn(self, seen: Observation) -> tuple[Rates, Rates]:
        """Demand as it is, and as it may be when a replica that is started now is ready."""
        demand, at_s, horizon_s = seen.demand, seen.at_s, self._horizon_s(seen)
        now = Rates(prompts=demand.prompt_tokens_per_s, outputs=demand.output_tokens_per_s)
        self._prompts.observe(at_s, now.prompts, horizon_s=horizon_s)
        self._outputs.observe(at_s, now.outputs, horizon_s=horizon_s)
        self._meter.observe(
            at_s, window_s=seen.window_s, rate=now.prompts, size=demand.mean_uncached_tokens
        )
        quantile = self._options.slo.quantile
        return now, Rates(
            prompts=self._prompts.predict(horizon_s, quantile=quantile),
            outputs=self._outputs.predict(horizon_s, quantile=quantile),
        )

    def _needs(
        self, seen: Observation, groups: Groups, now: Rates, later: Rates
    ) -> dict[Role, _Need]:
        promise = promise_of(seen, self._meter.squared_variation())
        size = seen.demand.mean_uncached_tokens
        needed = group_needs(groups, promise, now, mean_tokens=size)
        foreseen = group_needs(groups, promise, later, mean_tokens=size)
        needs = {}
        for role, need in needed.items():
            factor = self._corrected(seen, groups, role, need)
            need_s = {
                "now": (need or 0.0) * factor,
                "later": (foreseen[role] or 0.0) * factor,
                "backlog": 0.0 if role is Role.DECODE else self._backlog(seen, groups, role, later),
                "busy": 0.0
                if role is Role.PREFILL
                else busy_replicas(groups.pools(role), promise, held=seen.service.held),
            }
            need_s["rising"] = self._rising(seen.at_s, role, need, need_s["busy"])
            inputs = {f"need_{name}": value for name, value in need_s.items()}
            inputs |= {"correction": factor, "squared_variation": promise.squared_variation}
            needs[role] = _Need(
                now=None if need is None else need_s["now"],
                later=need_s["later"],
                backlog=need_s["backlog"],
                busy=need_s["busy"],
                rising=need_s["rising"],
                inputs=inputs | self._inputs(seen, groups.firsts()[role], now, later),
            )
        return needs

    def _rising(self, at_s: float, role: Role, need: float | None, busy: float) -> float:
        """What the streams of decode will occupy shortly.

        How long answers are is known when they end, but that more run than before at once. While
        it is not known what a replica can do, they occupy nothing: that they do afterwards is no
        rise.
        """
        if role is not Role.DECODE:
            return 0.0
        if need is None:
            self._rise = Slope(self._options.slo.flip_urgent_s)
            return busy
        return busy + max(0.0, self._rise.push(at_s, busy)) * self._options.slo.flip_lead_s

    def _inputs(
        self, seen: Observation, pool: PoolObservation, now: Rates, later: Rates
    ) -> dict[str, float]:
        return {
            "prompt_tokens_per_s": now.prompts,
            "prompt_tokens_per_s_later": later.prompts,
            "output_tokens_per_s": now.outputs,
            "output_tokens_per_s_later": later.outputs,
            "prefill_capacity_tokens_per_s": pool.prefill_tokens_per_s or 0.0,
            "decode_capacity_tokens_per_s": pool.decode_tokens_per_s or 0.0,
            "horizon_s": self._horizon_s(seen),
        }

    def _corrected(
        self, seen: Observation, groups: Groups, role: Role, need: float | None
    ) -> float:
        correction = self._corrections[role]
        pools = groups.pools(role)
        enough = (
            need is not None
            and groups.players(role) >= need * correction.factor
            and not any(pool.starting for pool in pools)
        )
        correction.update(seen.at_s, wrong=enough and is_unexplained(seen, role))
        return correction.factor

    def _backlog(self, seen: Observation, groups: Groups, role: Role, later: Rates) -> float:
        """What clears in time what will still wait when a new replica is ready."""
        pools, slack_s = groups.pools(role), seen.service.slack_s
        capacity = pools[0].prefill_tokens_per_s
        if slack_s is None or slack_s >= 0 or capacity is None:
            return 0.0
        held = seen.service.held * seen.demand.mean_uncached_tokens
        waiting = held + sum(pool.queued_tokens * pool.ready for pool in pools)
        able = capacity * (groups.players(role) - sum(pool.starting for pool in pools))
        left = min(waiting, waiting + (later.prompts - able) * self._horizon_s(seen))
        if left <= 0:
            return 0.0
        return (later.prompts + left / self._options.slo.clear_backlog_s) / capacity

    # ---------------------------------------------------------------- what follows from it

    def _target(self, seen: Observation, role: Role, need: _Need, have: int) -> int:
        wanted = need.greatest
        if wanted is not None:
            cold_start_s = _cold_start_s(seen)
            track = self._tracks[role]
            return track.target(seen.at_s, have=have, need=wanted, cold_start_s=cold_start_s)
        service = seen.service
        late = service.slack_s is not None and service.slack_s < 0
        asked = service.held > 0 or seen.demand.requests_per_s > 0
        starting = any(pool.starting for pool in seen.pools.values())
        return have + 1 if not starting and (late or (asked and have == 0)) else have

    def _arrange(
        self,
        seen: Observation,
        roster: Roster,
        needs: Mapping[Role, _Need],
        targets: Mapping[Role, int],
    ) -> None:
        soon = {role: needs[role].soon for role in SPLIT_ROLES}
        wanted = {role: max(targets[role], whole(soon[role])) for role in SPLIT_ROLES}
        split = SplitNeeds(
            greatest={role: needs[role].greatest for role in SPLIT_ROLES}, present=soon
        )
        short = {role: wanted[role] - roster.players(role) for role in SPLIT_ROLES}
        flips = self._rebalance.flip(seen, roster, split, short)
        for role in SPLIT_ROLES:
            players = roster.players(role)
            lacks, spare = targets[role] - players, players - wanted[role]
            if spare > 0 and not flips.awaited:
                roster.shrink(role, min(spare, players - 1))
            elif lacks > 0 and role is flips.to:
                roster.grow(role, max(0, lacks - flips.awaited))
            elif lacks > 0 and not flips.made:  # else it gave what it could spare
                roster.grow(role, lacks)

    def _is_idle(self, seen: Observation) -> bool:
        """Whether nothing has been asked for, and nothing has run, for a whole window.

        The window begins when a start under way is over: the client that it is for may have left,
        and come back when it is told to. A start that takes three times as long as others does not
        count.
        """
        service = seen.service
        starts = any(_may_come(pool) for pool in seen.pools.values())
        if seen.demand.requests_per_s > 0 or service.in_flight or service.held or starts:
            self._idle_since_s = None
        elif self._idle_since_s is None or self._idle_since_s > seen.at_s:
            self._idle_since_s = seen.at_s
        if self._idle_since_s is None or not self._options.scale_to_zero:
            return False
        return seen.at_s - self._idle_since_s >= self._options.down.cooldown_s


def _may_come(pool: PoolObservation) -> bool:
    """Whether a replica of a pool without any starts, and is not long overdue."""
    if pool.ready or pool.starting <= 0:
        return False
    return (pool.starting_for_s or 0.0) <= _OVERDUE_COLD_STARTS * pool.cold_start_s


def _cold_start_s(seen: Observation) -> float:
    return max((pool.cold_start_s for pool in seen.pools.values()), default=0.0)


def _told(
    groups: Groups, needs: Mapping[Role, _Need], targets: Mapping[Role, int]
) -> list[tuple[str, Want]]:
    seated: list[tuple[Role, Seat]] = [(Role.MIXED, seat) for seat in groups.mixed]
    if groups.roster is not None:
        seated += [(role, seat) for role in SPLIT_ROLES for seat in groups.roster.seats[role]]
    firsts = {role: pool.name for role, pool in groups.firsts().items()}
    inputs: dict[Role, Mapping[str, float]] = {
        # What is not met is what pools' bounds do not let the role have.
        role: {"target": float(target), "unmet": max(0.0, target - groups.players(role))}
        for role, target in targets.items()
    }
    return [
        (seat.pool.name, _want(seat, needs[role], inputs[role], role=role, unit=firsts[role]))
        for role, seat in seated
    ]


def _want(seat: Seat, need: _Need, target: Mapping[str, float], *, role: Role, unit: str) -> Want:
    have = seat.pool.ready + seat.pool.starting
    flips = {other(role): seat.away} if role is not Role.MIXED and seat.away else {}
    return Want(
        replicas=seat.size,
        reason=_reason(role, seat, need, have),
        why=_why(seat, need, int(target["target"]), role=role, unit=unit),
        inputs={**need.inputs, **target},
        flips=flips,
    )


def _reason(role: Role, seat: Seat, need: _Need, have: int) -> ScalingReason:
    if role is not Role.MIXED and seat.away != seat.away_before:
        return ScalingReason.BALANCE
    if seat.size > have:
        return need.reason
    return ScalingReason.SPARE if seat.size < have else ScalingReason.STEADY


def _why(seat: Seat, need: _Need, target: int, *, role: Role, unit: str) -> str:
    """`unit` is the pool in whose replicas the role's needs are counted."""
    if need.now is None:
        return "how much a replica can do is not known yet"
    parts = [
        f"{role} needs {need.now:.1f} now, {need.later:.1f} in {need.inputs['horizon_s']:.0f} s"
    ]
    if need.backlog > 0:
        parts.append(f"{need.backlog:.1f} to clear what waits")
    if need.inputs["correction"] > _WORTH_TELLING:
        parts.append(f"raised {need.inputs['correction']:.2f} times, requests were late")
    parts.append(f"so {target}, counted in replicas of {unit}")
    if seat.away != seat.away_before:
        parts.append(f"{seat.away} of this pool's play the other role")
    return ", ".join(parts)


def _nothing(idle_s: float) -> Want:
    return Want(
        replicas=0, reason=ScalingReason.IDLE, why=f"nothing was asked for in {idle_s:.0f} s"
    )
