"""A fleet of two pools in virtual time: carries out what an autoscaler says, shows it demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.domain.fleet import Role
from baton.policy.scaling.actions import AutoscalerTick, FlipReplicas, StartReplicas, StopReplicas
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, ServiceLevel
from baton.policy.scaling.options import (
    AutoscalerOptions,
    PoolBounds,
    SloScalingOptions,
    StepLimits,
)
from baton.policy.scaling.slo import SloPolicy

PREFILL_RATE, DECODE_RATE, STREAMS = 10_000.0, 2_000.0, 100.0
"""Of a replica: tokens a second, and how many streams the latter takes."""


def demand(prefills: float, decodes: float, *, mean_tokens: float = 1000.0) -> Demand:
    """What so many replicas could just do."""
    prompts, outputs = prefills * PREFILL_RATE, decodes * DECODE_RATE
    return Demand(
        requests_per_s=prompts / mean_tokens,
        prompt_tokens_per_s=prompts,
        output_tokens_per_s=outputs,
        mean_prompt_tokens=mean_tokens,
        mean_uncached_tokens=mean_tokens,
        mean_output_tokens=outputs * mean_tokens / prompts if prompts else 0.0,
    )


def pool(
    name: str,
    role: Role,
    role_counts: Mapping[Role, int],
    *,
    starting: int = 0,
    cold_start_s: float = 60.0,
    speed: float | None = 1.0,
) -> PoolObservation:
    """One pool; `speed` None: not known yet."""
    return PoolObservation(
        name=name,
        role=role,
        prefill=role_counts.get(Role.PREFILL, 0),
        decode=role_counts.get(Role.DECODE, 0),
        mixed=role_counts.get(Role.MIXED, 0),
        starting=starting,
        cold_start_s=cold_start_s,
        prefill_tokens_per_s=None if speed is None else speed * PREFILL_RATE,
        decode_tokens_per_s=None if speed is None else speed * DECODE_RATE,
        decode_streams=None if speed is None else speed * STREAMS,
    )


def prefill_pool(count: int, *, flipped: int = 0, starting: int = 0) -> PoolObservation:
    """The pool that prefills; `flipped` of its replicas decode."""
    role_counts = {Role.PREFILL: count - flipped, Role.DECODE: flipped}
    return pool("prefill", Role.PREFILL, role_counts, starting=starting)


def decode_pool(count: int, *, flipped: int = 0, starting: int = 0) -> PoolObservation:
    """The pool that decodes; `flipped` of its replicas prefill."""
    role_counts = {Role.DECODE: count - flipped, Role.PREFILL: flipped}
    return pool("decode", Role.DECODE, role_counts, starting=starting)


def observe(
    at_s: float, offered: Demand, *pools: PoolObservation, service: ServiceLevel | None = None
) -> Observation:
    """An observation of these pools, with objectives of 2 s and 50 ms."""
    return Observation(
        at_s=at_s,
        window_s=30.0,
        demand=offered,
        service=service or ServiceLevel(),
        pools={each.name: each for each in pools},
        ttft_s=2.0,
        tpot_s=0.05,
    )


def options(
    *,
    max_replicas: int = 20,
    min_replicas: int = 1,
    gpu_budget: float | None = None,
    scale_to_zero: bool = False,
    slo: SloScalingOptions | None = None,
    names: tuple[str, ...] = ("prefill", "decode"),
) -> AutoscalerOptions:
    """The same bounds for every pool, and no cooldown but the policy's own pauses."""
    return AutoscalerOptions(
        interval_s=5.0,
        gpu_budget=gpu_budget,
        scale_to_zero=scale_to_zero,
        scale_up=StepLimits(cooldown_s=0.0, max_step=100),
        scale_down=StepLimits(cooldown_s=120.0, max_step=100),
        bounds={name: PoolBounds(min=min_replicas, initial=1, max=max_replicas) for name in names},
        slo=slo or SloScalingOptions(),
    )


@dataclass
class SimulatedPools:
    """A pool that prefills and one that decodes, `baton`'s policy, and the clock."""

    options: AutoscalerOptions
    cold_start_s: float = 60.0
    now_s: float = 0.0
    roles: dict[str, dict[Role, int]] = field(
        default_factory=lambda: {
            "prefill": {Role.PREFILL: 1, Role.DECODE: 0},
            "decode": {Role.PREFILL: 0, Role.DECODE: 1},
        }
    )
    ready_times_s: dict[str, list[float]] = field(
        default_factory=lambda: {"prefill": [], "decode": []}
    )
    ticks: list[AutoscalerTick] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.autoscaler = Autoscaler(SloPolicy(self.options), self.options)

    def run(
        self,
        duration_s: float,
        offered: Callable[[float], Demand],
        service: ServiceLevel | None = None,
    ) -> None:
        """Tick every five seconds."""
        until_s = self.now_s + duration_s
        while self.now_s < until_s:
            self.now_s += 5.0
            for name, times in self.ready_times_s.items():
                ready = [at_s for at_s in times if at_s <= self.now_s]
                self.ready_times_s[name] = [at_s for at_s in times if at_s > self.now_s]
                self.roles[name][Role(name)] += len(ready)
            tick = self.autoscaler.tick(
                observe(self.now_s, offered(self.now_s), *self.pools(), service=service)
            )
            assert not tick.paused_reason
            self.ticks.append(tick)
            self.apply_actions(tick)
            self.autoscaler.check_integrity()

    def pools(self) -> list[PoolObservation]:
        return [
            pool(
                name,
                Role(name),
                roles,
                starting=len(self.ready_times_s[name]),
                cold_start_s=self.cold_start_s,
            )
            for name, roles in self.roles.items()
        ]

    def apply_actions(self, tick: AutoscalerTick) -> None:
        for action in tick.actions:
            roles = self.roles[action.pool]
            match action:
                case StartReplicas():
                    self.ready_times_s[action.pool] += [
                        self.now_s + self.cold_start_s
                    ] * action.replicas
                case StopReplicas():
                    for _ in range(action.replicas):
                        if self.ready_times_s[action.pool]:
                            self.ready_times_s[action.pool].pop()
                        else:
                            roles[max(roles, key=lambda role: roles[role])] -= 1
                case FlipReplicas():
                    other = Role.DECODE if action.role is Role.PREFILL else Role.PREFILL
                    assert roles[other] >= action.replicas
                    roles[other] -= action.replicas
                    roles[action.role] += action.replicas

    def replicas_of_role(self, role: Role) -> int:
        """Who plays a role now."""
        return sum(roles[role] for roles in self.roles.values())

    def size(self, name: str) -> int:
        """Replicas of a pool that take work or start."""
        return sum(self.roles[name].values()) + len(self.ready_times_s[name])

    def reversals(self) -> int:
        """How often a pool's size changed the other way than before."""
        count = 0
        for name in self.roles:
            last_direction = 0
            for tick in self.ticks:
                for action in tick.actions:
                    if isinstance(action, FlipReplicas) or action.pool != name:
                        continue
                    direction = 1 if isinstance(action, StartReplicas) else -1
                    count += direction == -last_direction
                    last_direction = direction
        return count
