"""What is recorded: walks, faults and whole days of fleets in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.domain.tenant import Tenant
from baton.policy.admission.decision import AdmissionOptions, AdmissionPolicy
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.port import Disaggregate
from baton.policy.scaling.catalogue import make_scaling_policy
from baton.policy.scaling.options import (
    AutoscalerOptions,
    PoolBounds,
    ScalingRule,
    StepLimits,
)
from baton.simulator.faults import (
    Freeze,
    Kill,
    SetBandwidth,
    SetRole,
    Start,
    Stop,
    StopReplica,
)
from baton.simulator.scenario import Scenario, simulate
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.chaos.cases import virtual
from tests.recorded.walks import PLANS, Walk
from tests.simulator.scenes import pool, scenario, trace

_RULES = ServiceRules(
    slos=SloClasses(
        classes={
            "default": Slo(ttft_s=0.8, tpot_s=0.02),
            "fast": Slo(name="fast", ttft_s=0.3, priority=1),
        }
    ),
    tenants={
        "acme": Tenant(name="acme", max_in_flight=12, weight=2.0, classes=("fast", "default"))
    },
    admission=AdmissionOptions(policy=AdmissionPolicy.PREDICTED),
)


def _both(prefill: int = 2, decode: int = 3, **changes: object) -> Scenario:
    return scenario(pool(Role.PREFILL, prefill), pool(Role.DECODE, decode), **changes)  # type: ignore[arg-type]


def _served(scene: Scenario, asked: Trace) -> None:
    simulate(scene, asked)


def _tenants(count: int, *, rate_per_s: float) -> Trace:
    rng, at_s, asked = random.Random(3), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s)
        tenant, slo_class = rng.choice([("acme", "fast"), ("acme", None), ("default", None)])
        asked.append(
            TraceRequest(
                at_s,
                rng.randint(50, 900),
                rng.randint(1, 60),
                slo_class=slo_class,
                tenant=tenant,
            )
        )
    return Trace(name="tenants", requests=tuple(asked))


def _waves(waves: int, *, apart_s: float) -> Trace:
    rng = random.Random(4)
    asked = [
        TraceRequest(apart_s * (wave + 1) + 0.05 * number, rng.randint(50, 600), 40)
        for wave in range(waves)
        for number in range(60)
    ]
    return Trace(name="waves", requests=tuple(asked))


def _scaled(rule: ScalingRule = ScalingRule.SLO, *, least: int = 1, most: int = 4) -> Scenario:
    roles = (Role.PREFILL, Role.DECODE)
    options = AutoscalerOptions(
        bounds={str(role): PoolBounds(min=least, initial=1, max=most) for role in roles},
        scale_down=StepLimits(cooldown_s=10.0, max_step=1),
        scale_to_zero=least == 0,
    )
    return scenario(
        *(replace(pool(role, max(1, least)), cold_start_s=8.0) for role in roles),
        rules=_RULES,
        limits=CoordinatorLimits(cold_start_timeout_s=60.0),
        autoscaler=lambda: Autoscaler(make_scaling_policy(rule, options), options),
        scaling_interval_s=2.0,
        coordinators=2,
    )


def _turning(phases: int, *, lasts_s: float, rate_per_s: float) -> Trace:
    """Long prompts and short answers, then the other way round, and again."""
    rng, at_s, asked = random.Random(5), 0.0, []
    while at_s < phases * lasts_s:
        at_s += rng.expovariate(rate_per_s)
        prompt, output = (3000, 4) if int(at_s / lasts_s) % 2 == 0 else (30, 150)
        asked.append(TraceRequest(at_s, prompt, output))
    return Trace(name="turning", requests=tuple(asked))


_HAPPENINGS = (
    Kill(at_s=2.0, replica_id="decode-0"),
    Freeze(at_s=4.0, replica_id="prefill-0", duration_s=6.0),
    Start(at_s=5.0, pool="decode"),
    SetRole(at_s=7.0, replica_id="decode-1", role=Role.MIXED),
    SetBandwidth(at_s=9.0, replica_id="prefill-1", bytes_per_s=1e7),
    StopReplica(at_s=11.0, replica_id="decode-2"),
    Stop(at_s=13.0, pool="prefill"),
)

CASES: Mapping[str, Callable[[], object]] = {
    **{name: partial(lambda plan: Walk(plan).run(), plan) for name, plan in PLANS.items()},
    "frozen": lambda: virtual.freeze(virtual.FleetRun(requests=300)),
    "half lost": lambda: virtual.kill_half(virtual.FleetRun(requests=300)),
    "flapping": lambda: virtual.flap(virtual.FleetRun(requests=400)),
    "storm": lambda: virtual.fail_everything(virtual.FleetRun(requests=400), duration_s=3.0),
    "mixed": lambda: _served(scenario(pool(Role.MIXED, 3)), trace(300, groups=12)),
    "split": lambda: _served(_both(), trace(300, rate_per_s=40.0)),
    "split always": lambda: _served(
        _both(disaggregate=Disaggregate.ALWAYS), trace(300, rate_per_s=40.0, groups=8)
    ),
    "split, two ingresses": lambda: _served(
        _both(coordinators=2), trace(300, rate_per_s=60.0, groups=20)
    ),
    "everything happens": lambda: _served(
        _both(3, 3, scheduled_events=_HAPPENINGS, coordinators=2), trace(400, groups=6)
    ),
    "too much": lambda: _served(_both(1, 1, rules=_RULES), _tenants(300, rate_per_s=60.0)),
    "waves": lambda: _served(_scaled(), _waves(4, apart_s=40.0)),
    "roles change": lambda: _served(
        _scaled(least=3, most=3), _turning(2, lasts_s=45.0, rate_per_s=12.0)
    ),
    "from zero": lambda: _served(_scaled(least=0), _waves(3, apart_s=90.0)),
}
