"""Classes and tenants in virtual time: what traces say of them, and what outcomes keep."""

from __future__ import annotations

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.autoscaling.observer import ObserverOptions
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.domain.tenant import Tenant
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.scaling.fixed import Static
from baton.policy.scaling.options import AutoscalerOptions
from baton.simulator.scenario import Simulation, simulate
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.simulator.scenes import pool, scenario

FAST = Slo(name="fast", ttft_s=0.5)
RULES = ServiceRules(slos=SloClasses(classes={"default": Slo(), "fast": FAST}))


def requests_of(trace: Trace, rules: ServiceRules) -> list[tuple[str, str | None]]:
    asked = trace.to_requests(classes=rules.slos.classes)
    return [(request.tenant, request.slo_class) for request in asked]


def test_requests_ask_only_for_classes_that_the_deployment_has() -> None:
    trace = Trace(
        name="t",
        requests=(
            TraceRequest(0.0, 10, 2, slo_class="fast", tenant="acme"),
            TraceRequest(0.1, 10, 2, slo_class="code"),
            TraceRequest(0.2, 10, 2),
        ),
    )
    assert requests_of(trace, RULES) == [("acme", "fast"), ("default", None), ("default", None)]
    assert {asked for _, asked in requests_of(trace, ServiceRules())} == {None}


def test_outcomes_say_whose_they_are_and_that_who_was_cut_off_got_nothing() -> None:
    trace = Trace(
        name="t",
        requests=(
            TraceRequest(0.0, 10, 2, tenant="acme"),
            TraceRequest(0.1, 10, 2000, slo_class="fast"),
        ),
    )
    run = simulate(scenario(pool(Role.MIXED, 1), rules=RULES), trace, until_s=1.0)
    assert [outcome.tenant for outcome in run.outcomes] == ["acme", "default"]
    assert [outcome.slo_met for outcome in run.outcomes] == [True, False]
    assert run.outcomes[1].slo_class == "fast"


def test_limits_of_a_tenant_are_those_of_all_coordinators_together() -> None:
    rules = ServiceRules(tenants={"acme": Tenant(name="acme", max_in_flight=2)})
    asked = [TraceRequest(0.01 * number, 10, 500, tenant="acme") for number in range(8)]
    trace = Trace(name="t", requests=tuple(asked))
    served = {}
    for coordinators in (1, 2):
        fleet = scenario(pool(Role.MIXED, 1), rules=rules, coordinators=coordinators)
        outcomes = simulate(fleet, trace).outcomes
        served[coordinators] = sum(outcome.slo_met for outcome in outcomes)
    assert served == {1: 2, 2: 2}


def test_who_scales_looks_at_as_many_ticks_as_a_live_controller() -> None:
    fleet = scenario(pool(Role.MIXED, 1), scaling_interval_s=10.0)
    stage = Simulation(fleet, Trace(name="t", requests=()))
    body = stage._build_scaling_loop(Autoscaler(Static(AutoscalerOptions()), AutoscalerOptions()))
    assert body._observer._options == ObserverOptions.for_interval(10.0)
    assert ObserverOptions.for_interval(10.0).window_s == 150.0
