"""Classes and tenants in virtual time: what traces say of them, and what outcomes keep."""

from __future__ import annotations

from baton.control.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.slo_book import SloBook
from baton.simulator.scenario import simulate
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.simulator.scenes import pool, scenario

FAST = Slo(name="fast", ttft_s=0.5)
RULES = ServiceRules(slos=SloBook(classes={"default": Slo(), "fast": FAST}))


def requests_of(trace: Trace, rules: ServiceRules) -> list[tuple[str, str | None]]:
    asked = trace.asked(classes=rules.slos.classes)
    return [(one.tenant, one.slo_class) for one in asked]


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
    assert [one.tenant for one in run.outcomes] == ["acme", "default"]
    assert [one.good for one in run.outcomes] == [True, False]
    assert run.outcomes[1].slo_class == "fast"
