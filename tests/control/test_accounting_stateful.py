"""Accounts under any order of events: everyone judged once, everything added up, no total back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.control.autoscaling.observer import Observer
from baton.control.fleet.pool_views import PoolState
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Load, Role, StepTotals
from baton.domain.slo import Slo
from baton.domain.tenant import RateLimit, Tenant
from baton.domain.value import evolve
from baton.policy.admission.slo_classes import SloClasses
from tests.control.test_coordinator_stateful import CoordinatorMachine
from tests.control.world import LIMITS, World, request

POOLS = {str(role): PoolState(role=role) for role in Role}
RULES = ServiceRules(
    slos=SloClasses(
        classes={
            "default": Slo(ttft_s=0.5, tpot_s=0.2),
            "batch": Slo(name="batch", ttft_s=5.0, itl_p99_s=1.0, priority=-1),
        }
    ),
    tenants={
        "free": Tenant(name="free", rate=RateLimit(requests_per_s=0.2, burst_s=10.0)),
        "paid": Tenant(name="paid", weight=2.0),
    },
)


class AccountsMachine(CoordinatorMachine):
    """Requests of two tenants and two classes, whatever happens to the fleet."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(replace(LIMITS, drain_timeout_s=1.0))
        self.world.coordinator.reconfigure(rules=RULES)
        self.observer = Observer(slos=RULES.slos.classes)
        self.steps: dict[str, StepTotals] = {}
        self.busy_s: dict[str, float] = {}

    @rule(
        tenant=st.sampled_from(["free", "paid"]),
        slo_class=st.sampled_from([None, "batch", "nonsense"]),
        max_tokens=st.integers(1, 5),
    )
    def ask(self, tenant: str, slo_class: str | None, max_tokens: int) -> None:
        self.count += 1
        item = request(f"r{self.count}", max_tokens=max_tokens)
        now_s = self.world.now_s
        self.world.arrive(evolve(item, tenant=tenant, slo_class=slo_class, arrived_at_s=now_s))

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), steps=st.integers(1, 50), again=st.booleans())
    def work(self, data: st.DataObject, steps: int, *, again: bool) -> None:
        """A replica has computed for somebody, or its engine was restarted."""
        replica_id = self.pick(data, list(self.world.alive))
        had = StepTotals() if again else self.steps.get(replica_id, StepTotals())
        done = StepTotals(
            steps=had.steps + steps,
            busy_s=had.busy_s + 0.02 * steps,
            decode_steps=had.decode_steps + steps,
            decode_tokens=had.decode_tokens + 3 * steps,
        )
        self.steps[replica_id] = done
        self.world.load(replica_id, Load(steps=done))

    @rule()
    def observe(self) -> None:
        told = self.world.coordinator.report("c", self.world.now_s)
        seen = self.observer.observe([told], POOLS, self.world.now_s)
        assert seen.service.attainment is None or 0.0 <= seen.service.attainment <= 1.0

    @invariant()
    def everyone_is_judged_once(self) -> None:
        told = self.world.coordinator.report("c", self.world.now_s)
        ended = sum(row.evaluated + row.excluded + row.client_errors for row in told.tallies)
        assert ended == len(self.world.records)
        assert told.in_flight == len(self.world.requests) - ended

    @invariant()
    def goodput_is_at_most_throughput_and_that_at_most_what_was_offered(self) -> None:
        told = self.world.coordinator.report("c", self.world.now_s)
        good = sum(row.good for row in told.tallies)
        served = sum(row.evaluated - row.shed - row.evicted - row.failed for row in told.tallies)
        barred = sum(row.client_errors for row in told.tallies)
        assert good <= served <= told.demand.requests
        assert told.demand.requests == len(self.world.requests) - barred
        records = self.world.records.values()
        assert good <= sum(record.slo_result.is_good for record in records)

    @invariant()
    def what_was_spent_is_that_of_the_requests(self) -> None:
        told = self.world.coordinator.report("c", self.world.now_s)
        of_ended = sum(record.gpu_s for record in self.world.records.values())
        assert of_ended == pytest.approx(sum(row.gpu_s for row in told.tallies))
        assert sum(row.gpu_s for row in told.gpu_usage) >= of_ended - 1e-9
        if not self.world.coordinator.phases():
            assert sum(row.gpu_s for row in told.gpu_usage) == pytest.approx(of_ended)

    @invariant()
    def time_in_steps_never_goes_back(self) -> None:
        told = self.world.coordinator.report("c", self.world.now_s)
        for pool in told.pools:
            assert pool.busy_s >= self.busy_s.get(pool.pool, 0.0) - 1e-9
            self.busy_s[pool.pool] = pool.busy_s

    @invariant()
    def work_is_booked_on_pools_that_there_are(self) -> None:
        told = self.world.coordinator.report("c", self.world.now_s)
        assert {row.pool for row in told.gpu_usage} <= {str(role) for role in Role}
        assert min((row.gpu_s for row in told.gpu_usage), default=0.0) >= 0.0


TestAccountsMachine = AccountsMachine.TestCase
TestAccountsMachine.settings = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
