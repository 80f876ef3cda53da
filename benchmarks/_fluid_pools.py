"""Pools of a fluid fleet: replicas by role, their capacity, and the work that waits for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, assert_never

from baton.domain.fleet import Role
from baton.policy.scaling.actions import FlipReplicas, ScalingAction, StartReplicas, StopReplicas


class Inflow(NamedTuple):
    """What arrives in one step."""

    requests: float
    prompt_tokens: float
    output_tokens: float


class FluidCapacity(NamedTuple):
    """What one replica can do, for requests of such lengths; as the fields of `FluidPool`."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    max_streams: float
    least_step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidPool:
    """Replicas of one shape."""

    name: str
    role: Role
    replicas: int
    prefill_tokens_per_s: float
    """Of one replica that does nothing else."""
    decode_tokens_per_s: float
    """Of one replica with `max_streams` streams, doing nothing else."""
    max_streams: float
    """As many as meet the TPOT objective and fit."""
    least_step_s: float
    """How long a step takes with hardly a stream."""
    cold_start_s: float = 60.0
    drain_s: float = 10.0
    """How long a stopped replica still ends what it has."""
    gpus_per_replica: float = 1.0


@dataclass(slots=True)
class _Members:
    """One pool's replicas."""

    plan: FluidPool
    roles: dict[Role, int]
    ready_at_s: list[float] = field(default_factory=list)
    """Of those that start, in order."""
    gone_at_s: list[float] = field(default_factory=list)
    """Of those that drain, in order."""
    replica_seconds: float = 0.0
    counted_at_s: float = 0.0

    @property
    def ready(self) -> int:
        return sum(self.roles.values())

    @property
    def paid(self) -> int:
        """Replicas that are paid for."""
        return self.ready + len(self.ready_at_s) + len(self.gone_at_s)

    def count_until(self, now_s: float) -> None:
        """Pay for all until now."""
        self.replica_seconds += self.paid * (now_s - self.counted_at_s)
        self.counted_at_s = now_s


@dataclass(slots=True)
class _Strength:
    """What the fleet can do as it is; worked out when it changes."""

    prefill_tokens_per_s: float = 0.0
    mixed_prefill_tokens_per_s: float = 0.0
    streams: float = 0.0
    mixed_streams: float = 0.0
    full_tokens_per_s: float = 0.0
    """Generated with all of those streams."""
    mixed_full_tokens_per_s: float = 0.0
    least_step_s: float = 0.0


class FluidFleet:
    """The pools, what waits before them, and what runs in them."""

    def __init__(self, pools: Sequence[FluidPool], *, usable_fraction: float) -> None:
        self._members = {
            pool.name: _Members(pool, dict.fromkeys(Role, 0) | {pool.role: pool.replicas})
            for pool in pools
        }
        self._usable = usable_fraction
        self._strength = _Strength()
        self._next_s = float("inf")
        self.queued_tokens = 0.0
        """Of admitted prompts."""
        self.streams = 0.0
        self._output_tokens = 1.0
        """Of a request, on average over recent arrivals."""
        self.prefill_busy = 0.0
        """Of the last step: share of the capacity that was used."""
        self.stream_share = 0.0
        """Of the streams that there may be, how many there were."""
        self.wait_s = 0.0
        """Of who came last, before its prompt is computed."""
        self.step_s = 0.0
        """Between two tokens of a stream."""
        self._strengthen()

    # ------------------------------------------------------------------ who is there
    @property
    def pools(self) -> Mapping[str, FluidPool]:
        """As they were planned."""
        return {name: members.plan for name, members in self._members.items()}

    def roles(self, pool: str) -> Mapping[Role, int]:
        """A pool's replicas that take work, by role."""
        return self._members[pool].roles

    def starting(self, pool: str) -> int:
        """Those that were asked for and do not serve yet."""
        return len(self._members[pool].ready_at_s)

    def draining(self, pool: str) -> int:
        """Those that end what they have."""
        return len(self._members[pool].gone_at_s)

    def replica_seconds(self, now_s: float) -> dict[str, float]:
        """By pool: from being asked for to being gone, until now."""
        for member in self._members.values():
            member.count_until(now_s)
        return {name: members.replica_seconds for name, members in self._members.items()}

    def carry_out(self, action: ScalingAction, now_s: float) -> None:
        """Do what an autoscaler has decided."""
        one = self._members[action.pool]
        one.count_until(now_s)
        match action:
            case StartReplicas():
                one.ready_at_s += [now_s + one.plan.cold_start_s] * action.replicas
            case StopReplicas():
                self._stop(one, action.replicas, now_s)
            case FlipReplicas():
                self._flip(one, action)
            case _:
                assert_never(action)
        before = self._strength.streams + self._strength.mixed_streams
        self._strengthen()
        after = self._strength.streams + self._strength.mixed_streams
        if after < before:  # a replica that leaves or changes its role finishes its work first
            self.streams *= after / before

    def set_capacity(self, capacity: FluidCapacity) -> None:
        """Requests of other lengths arrive: what a replica, of whichever pool, can do for them."""
        values = capacity._asdict()
        for member in self._members.values():
            member.plan = replace(member.plan, **values)
        self._strengthen()

    def advance(self, now_s: float) -> None:
        """Replicas that are ready by now serve; those that have drained are gone."""
        if now_s < self._next_s:
            return
        for member in self._members.values():
            member.count_until(now_s)
            ready = sum(at_s <= now_s for at_s in member.ready_at_s)
            del member.ready_at_s[:ready]
            member.roles[member.plan.role] += ready
            del member.gone_at_s[: sum(at_s <= now_s for at_s in member.gone_at_s)]
        self._strengthen()

    def _stop(self, one: _Members, replicas: int, now_s: float) -> None:
        """Those that start go first, the newest; then those that play another role than the pool's.

        Nothing is lost by the former. The latter are who the pool can spare most easily.
        """
        cancelled = min(replicas, len(one.ready_at_s))
        if cancelled:
            del one.ready_at_s[-cancelled:]
        left = min(replicas - cancelled, one.ready)
        one.gone_at_s += [now_s + one.plan.drain_s] * left
        own = one.plan.role
        for role in (*(role for role in Role if role is not own), own):
            taken = min(left, one.roles[role])
            one.roles[role] -= taken
            left -= taken

    def _flip(self, one: _Members, action: FlipReplicas) -> None:
        left = action.replicas
        for role in Role:
            if role is not action.role:
                taken = min(left, one.roles[role])
                one.roles[role] -= taken
                one.roles[action.role] += taken
                left -= taken

    def _strengthen(self) -> None:
        strength, members = _Strength(), self._members.values()
        for member in members:
            plan, mixed = member.plan, member.roles[Role.MIXED]
            prefill, decode = member.roles[Role.PREFILL], member.roles[Role.DECODE]
            per_replica = self._usable * plan.prefill_tokens_per_s
            strength.prefill_tokens_per_s += prefill * per_replica
            strength.mixed_prefill_tokens_per_s += mixed * per_replica
            streams = self._usable * plan.max_streams
            strength.streams += decode * streams
            strength.mixed_streams += mixed * streams
            rate = self._usable * plan.decode_tokens_per_s
            strength.full_tokens_per_s += decode * rate
            strength.mixed_full_tokens_per_s += mixed * rate
            strength.least_step_s = max(strength.least_step_s, plan.least_step_s)
        self._strength = strength
        coming = [at_s for member in members for at_s in (*member.ready_at_s, *member.gone_at_s)]
        self._next_s = min(coming, default=float("inf"))

    # ------------------------------------------------------------------ what they do
    def serve(self, inflow: Inflow, step_s: float, longest_wait_s: float) -> float:
        """Let a step pass; how many of its requests are admitted, and so meet their objectives."""
        strength = self._strength
        prompts_per_s, most = strength.prefill_tokens_per_s, strength.streams
        full_per_s = strength.full_tokens_per_s
        if strength.mixed_streams:
            share = self._prompt_share(inflow, step_s)
            prompts_per_s += share * strength.mixed_prefill_tokens_per_s
            most += (1 - share) * strength.mixed_streams
            full_per_s += (1 - share) * strength.mixed_full_tokens_per_s
        requests, prompts, outputs = inflow
        computed = prompts_per_s * step_s
        room = max(0.0, longest_wait_s * prompts_per_s + computed - self.queued_tokens)
        share = 1.0 if prompts <= room else room / prompts
        if requests > 0:
            weight = min(1.0, requests / (requests + self.streams))
            self._output_tokens += weight * (outputs / requests - self._output_tokens)
        share *= self._admit_streams(requests * share, most, full_per_s, step_s)
        before = self.queued_tokens
        after = before + prompts * share - computed
        self.prefill_busy = min(1.0, (before + prompts * share) / computed) if computed else 1.0
        self.queued_tokens = max(0.0, after)
        self.wait_s = self.queued_tokens / prompts_per_s if prompts_per_s else longest_wait_s
        self.stream_share = self.streams / most if most else 1.0
        return requests * share

    def _admit_streams(
        self, arriving: float, most: float, full_per_s: float, step_s: float
    ) -> float:
        """The share of arriving streams that find room, of at most `most`, within a step.

        Streams end while others arrive: those at the end of the step are what was there, and came,
        less those that ended at the rate of the end. So a step may be longer than a stream lives.
        """
        least_s = self._strength.least_step_s
        if not most or not full_per_s:
            self.step_s = least_s
            return 0.0
        slope_s = max(0.0, most / full_per_s - least_s) / most
        per_stream_s = step_s / self._output_tokens
        after = _streams_after(self.streams + arriving, least_s, slope_s, per_stream_s)
        admitted = 1.0
        if after > most and arriving > 0:
            ended = most * per_stream_s / (least_s + slope_s * most)
            admitted = min(1.0, max(0.0, most - self.streams + ended) / arriving)
            total = self.streams + arriving * admitted
            after = _streams_after(total, least_s, slope_s, per_stream_s)
        self.streams = after
        self.step_s = least_s + slope_s * min(after, most)
        return admitted

    def _prompt_share(self, inflow: Inflow, step_s: float) -> float:
        """Of mixed replicas' time: so that prompts and streams are equally near their limits."""
        strength = self._strength
        asked = (self.queued_tokens + inflow.prompt_tokens) / step_s
        prompts = asked / strength.mixed_prefill_tokens_per_s
        apart = strength.prefill_tokens_per_s / strength.mixed_prefill_tokens_per_s
        streams = (self.streams + inflow.requests) / strength.mixed_streams
        others = strength.streams / strength.mixed_streams
        if prompts + streams <= 0:
            return 0.5
        share = (prompts * (others + 1) - streams * apart) / (prompts + streams)
        return min(1.0, max(0.0, share))


def _streams_after(total: float, least_s: float, slope_s: float, per_stream_s: float) -> float:
    """The positive s with s + per_stream_s * s / (least_s + slope_s * s) = total.

    An engine's step takes `least_s + slope_s * s`; in each, a stream generates one token.
    """
    linear = least_s + per_stream_s - total * slope_s
    root = math.sqrt(linear * linear + 4.0 * slope_s * total * least_s)
    if linear > 0:
        return 2.0 * total * least_s / (linear + root)
    return (root - linear) / (2.0 * slope_s)
