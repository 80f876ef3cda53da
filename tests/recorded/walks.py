"""Coordinators under events in any order, drawn by a generator that knows no names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.commands import CheckSideChannel, Command
from baton.domain.events import QuotasAllocated, SideChannelChecked
from baton.domain.fleet import Load, LossReason, Role
from baton.domain.handoff import LegFailure
from baton.domain.request import FinishReason, LocalOnlyReason
from baton.domain.slo import Slo
from baton.domain.tenant import QuotaShare, RateLimit, Tenant
from baton.domain.value import evolve
from baton.policy.admission.decision import AdmissionOptions, AdmissionPolicy
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.port import Placer
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.control.world import LIMITS, World, request
from tests.fakes.timings import LinearTiming

_T = TypeVar("_T")
_REPLICAS = {
    "p0": Role.PREFILL,
    "p1": Role.PREFILL,
    "d0": Role.DECODE,
    "d1": Role.DECODE,
    "m0": Role.MIXED,
}
_FINISHES = tuple(literal for literal in FinishReason if literal is not FinishReason.LENGTH)
_WAITS_S = (0.005, 0.02, 0.1, 0.5, 2.0, 11.0, 31.0)
_SLOW = LinearTiming(per_step_s=0.01, per_token_s=0.004, per_stream_s=0.001)
_CLASSES = {
    "default": Slo(ttft_s=1.0, tpot_s=0.05),
    "rush": Slo(name="rush", ttft_s=0.3, priority=1),
    "batch": Slo(name="batch", priority=-1),
}
_TENANTS = {
    "gold": Tenant(name="gold", priority=1, weight=3.0, classes=("default", "rush", "batch")),
    "slow": Tenant(name="slow", rate=RateLimit(requests_per_s=1.0, tokens_per_s=200.0)),
    "narrow": Tenant(name="narrow", weight=2.0, max_in_flight=2),
}
RULES = ServiceRules(slos=SloClasses(classes=_CLASSES), tenants=_TENANTS)
_OTHER_RULES = (
    RULES,
    ServiceRules(),
    ServiceRules(slos=RULES.slos, tenants={"slow": Tenant(name="slow", max_in_flight=1)}),
    ServiceRules(slos=RULES.slos, admission=AdmissionOptions(policy=AdmissionPolicy.BOUNDED)),
)


def predicted() -> Placer:
    """The placement that ships, with objectives that a queue of a few prompts misses."""
    return PredictedPlacer(PredictedOptions(ttft_slo_s=1.0, tpot_slo_s=0.05))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a walk goes through."""

    steps: int = 1200
    limits: CoordinatorLimits = LIMITS
    placer: Callable[[], Placer | None] = lambda: None
    rules: ServiceRules | None = None
    probing: bool = False
    early: bool = False
    seed: int = 1


@dataclass(slots=True)
class Walk:
    """Requests come and go while replicas join, drain, fail, fall silent and come back."""

    plan: Plan
    rng: Random = field(init=False)
    world: World = field(init=False)
    requests: int = 0
    updates: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        self.rng = Random(plan.seed)
        self.world = World(
            replace(plan.limits, early_first_token=plan.early),
            policy=plan.placer(),
            probing=ProbeOptions() if plan.probing else None,
            rules=plan.rules,
            priors={str(role): _SLOW for role in Role} if plan.rules else None,
        )

    def run(self) -> None:
        """All steps, then a fleet that is well until every request has ended."""
        self.world.join_prefill_decode(prefill=2, decode=2)
        weights = [weight for _, weight in _STEPS]
        for _ in range(self.plan.steps):
            ((step, _),) = self.rng.choices(_STEPS, weights)
            step(self)
            self._answer_checks()
        for replica_id, role in _REPLICAS.items():
            if replica_id in self.world.alive:
                self.world.disconnect(replica_id)
            self.world.join(replica_id, role)
        for _ in range(60):
            self.world.advance(1.0)
            self.world.run_to_end()

    def arrive(self) -> None:
        self.requests += 1
        known = self.plan.rules is not None
        tokens = self.rng.randint(1, 120)
        item = request(
            f"r{self.requests}",
            max_tokens=self.rng.randint(1, 5),
            local_only=self.rng.choice([None, None, None, LocalOnlyReason.FAN_OUT]),
            resumable=self.rng.random() < 0.7,
            tenant=self.rng.choice([*_TENANTS, "stranger"]) if known else "default",
            slo_class=self.rng.choice([None, None, "rush", "batch", "none"]) if known else None,
            arrived_at_s=self.world.now_s,
        )
        shared = self.rng.randrange(3) * 1000
        self.world.arrive(evolve(item, prompt_token_ids=tuple(range(shared, shared + tokens))))

    def step(self) -> None:
        if self.world.legs:
            self.world.step(self._one(list(self.world.legs)))

    def break_leg(self) -> None:
        if self.world.legs:
            self.world.step(self._one(list(self.world.legs)), finish=self._one(_FINISHES))

    def fail_leg(self) -> None:
        if self.world.legs:
            self.world.fail_leg(self._one(list(self.world.legs)), self._one(tuple(LegFailure)))

    def cancel(self) -> None:
        if phases := self.world.coordinator.phases():
            self.world.cancel(self._one(list(phases)))

    def join(self) -> None:
        replica_id = self._one(tuple(_REPLICAS))
        if replica_id not in self.world.alive:
            self.world.join(replica_id, _REPLICAS[replica_id])

    def lose(self) -> None:
        if self.world.alive:
            self.world.disconnect(self._one(list(self.world.alive)), self._one(tuple(LossReason)))

    def drain(self) -> None:
        if self.world.alive:
            self.world.drain(self._one(list(self.world.alive)))

    def flip(self) -> None:
        if self.world.alive:
            self.world.change_role(self._one(list(self.world.alive)), self._one(tuple(Role)))

    def report(self) -> None:
        for replica_id in tuple(self.world.alive):
            if self.rng.random() < 0.7:
                load = Load(
                    running_requests=self.rng.randint(0, 64),
                    queued_requests=self.rng.randint(0, 3),
                    cache_sequence=self.updates.get(replica_id, 0),
                )
                self.world.load(replica_id, load, received_legs=self.rng.randint(0, 9))

    def report_a_cache(self) -> None:
        if self.world.alive and self.world.requests:
            replica_id = self._one(list(self.world.alive))
            item = self.world.requests[self._one(list(self.world.requests))]
            sequence = self.updates.get(replica_id, 0) + self.rng.choice([1, 1, 1, 2])
            self.updates[replica_id] = sequence
            self.world.report_cached(replica_id, item, sequence=sequence)

    def change_rules(self) -> None:
        if self.plan.rules is not None:
            self.world.coordinator.reconfigure(rules=self._one(_OTHER_RULES))
            self.world.advance(0.0)

    def share_quotas(self) -> None:
        if self.plan.rules is not None:
            share = QuotaShare(
                requests_per_s=0.5, tokens_per_s=100.0, max_in_flight=self.rng.randint(0, 3)
            )
            self.world.handle(QuotasAllocated(shares={"narrow": share, "slow": share}))

    def wait(self) -> None:
        self.world.advance(self._one(_WAITS_S))

    def confirm(self) -> None:
        self.world.confirm_aborts()

    def _one(self, items: Sequence[_T]) -> _T:
        return items[self.rng.randrange(len(items))]

    def _answer_checks(self) -> None:
        commands: list[Command] = self.world.commands
        asked = [command for command in commands if isinstance(command, CheckSideChannel)]
        commands.clear()
        for channel in asked:
            if channel.replica_id in self.world.alive and (draw := self.rng.random()) < 0.8:
                answer = SideChannelChecked(
                    replica_id=channel.replica_id,
                    source_id=channel.source_id,
                    is_reachable=draw < 0.6,
                    elapsed_s=0.001,
                    reason="" if draw < 0.6 else "no answer",
                )
                self.world.handle(answer)


_STEPS: Sequence[tuple[Callable[[Walk], None], float]] = (
    (Walk.arrive, 12),
    (Walk.step, 40),
    (Walk.break_leg, 1.5),
    (Walk.fail_leg, 2),
    (Walk.cancel, 1.5),
    (Walk.join, 4),
    (Walk.lose, 1),
    (Walk.drain, 0.7),
    (Walk.flip, 0.7),
    (Walk.report, 8),
    (Walk.report_a_cache, 4),
    (Walk.change_rules, 0.5),
    (Walk.share_quotas, 0.5),
    (Walk.wait, 8),
    (Walk.confirm, 4),
)

PLANS: Mapping[str, Plan] = {
    "walk": Plan(),
    "walk early": Plan(early=True, seed=2),
    "walk predicted": Plan(placer=predicted, seed=3),
    "walk probing": Plan(placer=predicted, probing=True, seed=4),
    "walk classes": Plan(
        placer=predicted, rules=RULES, limits=replace(LIMITS, max_queued_requests=4), seed=5
    ),
    "walk everything": Plan(
        placer=predicted,
        rules=RULES,
        limits=replace(LIMITS, max_queued_requests=8),
        probing=True,
        early=True,
        seed=6,
        steps=3000,
    ),
}
