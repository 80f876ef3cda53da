"""What requests took and needed, as the request machine's own events show it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.control.autoscaling.observer import Observer
from baton.control.fleet.pool_views import PoolState
from baton.control.state.service_rules import ServiceRules
from baton.domain.demand import CoordinatorReport
from baton.domain.events import StepCompleted
from baton.domain.fleet import Load, Role, StepTotals
from baton.domain.handoff import LegFailure, LegOutput
from baton.domain.request import FinishReason, LocalOnlyReason, Phase
from baton.domain.slo import Slo
from baton.domain.tenant import RateLimit, Tenant
from baton.domain.value import evolve
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.device_seconds import decode_device_s, prefill_device_s
from tests.control.test_coordinator_stateful import CoordinatorMachine
from tests.control.world import LIMITS, World, request


def report(world: World) -> CoordinatorReport:
    return world.coordinator.report("c", world.now_s)


def timing_of(world: World, replica_id: str):  # type: ignore[no-untyped-def]  # noqa: ANN201
    view = world.coordinator.fleet(world.now_s).replicas[replica_id]
    return world.coordinator.fleet_model.timings.of(view)


# ------------------------------------------------------------------------------ device-seconds


def test_a_local_request_takes_its_prompt_and_its_part_of_the_steps() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.arrive(request("r", prompt_tokens=40, max_tokens=4))
    world.run_to_end()
    timing = timing_of(world, "d0")
    wanted_s = prefill_device_s(timing, 40) + decode_device_s(timing, 4, running=1)
    assert world.records["r"].gpu_s == pytest.approx(wanted_s)


def test_gpu_time_is_charged_to_the_pools_where_it_was_spent() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r", prompt_tokens=40, max_tokens=4))
    world.run_to_end()
    timing = timing_of(world, "p0")
    spent = {row.pool: row.gpu_s for row in report(world).gpu_usage}
    assert spent["prefill"] == pytest.approx(prefill_device_s(timing, 40))
    assert spent["decode"] > decode_device_s(timing, 4, running=1) - 1e-9
    assert world.records["r"].gpu_s == pytest.approx(sum(spent.values()))
    (row,) = report(world).tallies
    assert (row.pool, row.model, row.gpu_s) == ("decode", "tiny", world.records["r"].gpu_s)


def test_a_record_names_the_model_and_the_pool_that_its_tally_does() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    world.run_to_end()
    (row,) = report(world).tallies
    record = world.records["r"]
    assert (record.model, record.pool) == (row.model, row.pool) == ("tiny", "decode")


def test_a_record_of_an_unplaced_request_names_no_replica() -> None:
    world = World(replace(LIMITS, queue_timeout_s=1.0))
    world.arrive(request("r"))
    world.advance(2.0)
    record = world.records["r"]
    assert (record.outcome, record.model, record.pool) == (Phase.EVICTED, "", "")


def test_a_stream_among_many_pays_for_its_part_only() -> None:
    alone, crowded = World(), World()
    for world, streams in ((alone, 1), (crowded, 8)):
        world.join("d0", Role.DECODE)
        world.arrive(request("r", max_tokens=100))
        steps = StepTotals(steps=50, decode_steps=50, decode_tokens=50 * streams)
        world.load("d0", Load(running_requests=streams, steps=steps))
        world.run_to_end()
    assert crowded.records["r"].gpu_s < alone.records["r"].gpu_s / 4


def test_cached_tokens_cost_nothing() -> None:
    fresh, cached = World(), World()
    for world, tokens in ((fresh, 0), (cached, 32)):
        world.join("d0", Role.DECODE)
        world.arrive(request("r", prompt_tokens=40, max_tokens=2))
        (leg_id,) = world.legs
        first = LegOutput(leg_id, (0,), cached_tokens=tokens)
        world.handle(StepCompleted(replica_id="d0", outputs=(first,)))
        world.handle(
            StepCompleted(replica_id="d0", outputs=(LegOutput(leg_id, (1,), FinishReason.LENGTH),))
        )
    timing = timing_of(fresh, "d0")
    saved_s = prefill_device_s(timing, 40) - prefill_device_s(timing, 8)
    gpu_s = [world.records["r"].gpu_s for world in (fresh, cached)]
    assert saved_s > 0
    assert gpu_s[0] - gpu_s[1] == pytest.approx(saved_s)
    assert [report(world).demand.uncached_tokens for world in (fresh, cached)] == [40.0, 8.0]


def test_prompts_are_expected_to_be_cached_like_those_before_them() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.arrive(request("r", prompt_tokens=40, max_tokens=1))
    (leg_id,) = world.legs
    last = LegOutput(leg_id, (0,), FinishReason.LENGTH, cached_tokens=30)
    world.handle(StepCompleted(replica_id="d0", outputs=(last,)))
    world.arrive(request("next", prompt_tokens=80, max_tokens=1))
    assert report(world).demand.uncached_tokens == pytest.approx(10.0 + 80 * 0.25)


def test_a_leg_that_brought_nothing_cost_nothing() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.join("d1", Role.DECODE)
    world.arrive(request("r", max_tokens=1))
    (leg_id,) = world.legs
    world.fail_leg(leg_id, LegFailure.UNREACHABLE)
    world.run_to_end()
    timing = timing_of(world, "d0")
    wanted_s = prefill_device_s(timing, 40) + decode_device_s(timing, 1, running=1)
    assert world.records["r"].gpu_s == pytest.approx(wanted_s)


def test_work_that_is_done_again_is_paid_again() -> None:
    once, twice = World(), World()
    for world in (once, twice):
        world.join("d0", Role.DECODE)
        world.join("d1", Role.DECODE)
        world.arrive(request("r", max_tokens=6))
        (leg_id,) = world.legs
        world.step(leg_id)
        if world is twice:
            world.fail_leg(leg_id, LegFailure.ENGINE_ERROR)
        world.run_to_end()
    assert twice.records["r"].resumes == 1
    timing = timing_of(twice, "d1")
    streamed_s = decode_device_s(timing, 6, running=1)
    again_s = prefill_device_s(timing, 40) + prefill_device_s(timing, 41)
    assert twice.records["r"].gpu_s == pytest.approx(again_s + streamed_s)
    assert once.records["r"].gpu_s == pytest.approx(prefill_device_s(timing, 40) + streamed_s)


def test_a_client_that_leaves_has_used_what_was_computed_for_it() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.arrive(request("r", max_tokens=50))
    (leg_id,) = world.legs
    world.step(leg_id)
    world.cancel("r")
    assert world.records["r"].gpu_s > 0
    assert report(world).gpu_usage[0].gpu_s == world.records["r"].gpu_s


def test_an_engine_that_breaks_a_prefill_hands_out_nothing_and_charges_nothing() -> None:
    world = World()
    world.join_prefill_decode()
    world.arrive(request("r"))
    (leg_id,) = world.legs
    world.step(leg_id, finish=FinishReason.ERROR)
    world.run_to_end()
    assert {row.pool for row in report(world).gpu_usage} == {"decode"}


# ------------------------------------------------------------------------------ judgement


def rules(slo: Slo, tenant: Tenant | None = None) -> ServiceRules:
    tenants = {} if tenant is None else {tenant.name: tenant}
    return ServiceRules(slos=SloClasses(classes={"default": slo}), tenants=tenants)


def test_a_record_carries_its_judgement() -> None:
    world = World()
    world.coordinator.reconfigure(rules=rules(Slo(ttft_s=1.0)))
    world.join("d0", Role.DECODE)
    world.arrive(request("r"))
    world.advance(1.5)
    world.run_to_end()
    judgement = world.records["r"].slo_result
    assert (judgement.was_served, judgement.ttft_met, judgement.is_good) == (True, False, False)


def test_requests_beyond_a_tenants_limit_are_no_demand_and_no_miss() -> None:
    world = World()
    limited = Tenant(name="default", rate=RateLimit(requests_per_s=0.1, burst_s=10.0))
    world.coordinator.reconfigure(rules=rules(Slo(), limited))
    world.join("d0", Role.DECODE)
    for number in range(3):
        world.arrive(request(f"r{number}"))
    world.run_to_end()
    outcomes = [record.outcome for record in world.records.values()]
    assert outcomes.count(Phase.SHED) == 2
    told = report(world)
    assert sum(row.client_errors for row in told.tallies) == 2
    assert sum(row.evaluated for row in told.tallies) == 1
    assert told.demand.requests == 1


# ------------------------------------------------------------------------------ demand


def answered(world: World, count: int, *, tokens: int, max_tokens: int = 8) -> None:
    """So many requests ended by themselves after so many tokens, of those that they might have."""
    for number in range(count):
        world.arrive(request(f"past{number}", max_tokens=max_tokens))
        for at in range(tokens):
            (leg_id,) = world.legs
            finish = FinishReason.STOP if at == tokens - 1 else None
            world.step(leg_id, finish=finish)


def test_demand_counts_what_arrives_before_any_of_it_is_done() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    answered(world, 30, tokens=3)
    before = report(world).demand
    world.arrive(request("r", prompt_tokens=40, max_tokens=8))
    likely = world.coordinator.fleet_model.timings.expected_output_tokens(8)
    now = report(world).demand
    assert (now.requests, now.prompt_tokens) == (31, before.prompt_tokens + 40)
    assert now.uncached_tokens == before.uncached_tokens + 40
    assert now.output_tokens == pytest.approx(before.output_tokens + likely)
    assert likely == pytest.approx(3.0, abs=0.2)


def test_before_any_answer_has_ended_none_is_expected() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.arrive(request("r", prompt_tokens=40, max_tokens=1000))
    assert report(world).demand == (1, 40, 40.0, 0.0)


def test_first_answers_predict_lengths_better_than_max_tokens() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    answered(world, 1, tokens=3, max_tokens=1000)
    world.arrive(request("r", max_tokens=1000))
    assert report(world).demand.output_tokens == 6.0
    world.arrive(request("short", max_tokens=2))
    assert report(world).demand.output_tokens == 8.0


def test_expectations_become_facts() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.arrive(request("r", prompt_tokens=40, max_tokens=8))
    world.run_to_end()
    assert report(world).demand == (1, 40, 40.0, 8.0)


def test_a_request_rejected_for_lack_of_a_replica_is_demand() -> None:
    world = World(replace(LIMITS, max_queued_requests=1))
    world.join("d0", Role.DECODE)
    answered(world, 1, tokens=5)
    world.disconnect("d0")
    for number in range(3):
        world.arrive(request(f"r{number}", max_tokens=8))
    assert len(world.records) == 3
    demand = report(world).demand
    assert (demand.requests, demand.prompt_tokens, demand.output_tokens) == (4, 160, 20.0)


def test_an_answer_that_is_cut_off_was_as_long_as_it_got() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    world.arrive(request("r", max_tokens=50))
    (leg_id,) = world.legs
    world.step(leg_id)
    world.cancel("r")
    assert report(world).demand.output_tokens == 1.0


def test_answers_that_end_on_stop_strings_say_what_to_expect_like_those_that_end_alone() -> None:
    alone, stopped = World(), World()
    for world in (alone, stopped):
        world.join("d0", Role.DECODE)
    answered(alone, 30, tokens=3, max_tokens=1000)
    for number in range(30):
        stopped.arrive(request(f"past{number}", max_tokens=1000))
        (leg_id,) = stopped.legs
        for _ in range(3):
            stopped.step(leg_id)
        stopped.cancel(f"past{number}")
        stopped.confirm_aborts()
    for world in (alone, stopped):
        world.arrive(request("r", max_tokens=1000))
    timings = stopped.coordinator.fleet_model.timings
    assert timings.has_output_estimate(1000)
    assert report(stopped).demand == report(alone).demand


def test_a_client_that_leaves_before_its_first_token_says_nothing_of_answers() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    answered(world, 1, tokens=3, max_tokens=1000)
    world.arrive(request("gone", max_tokens=1000))
    world.cancel("gone")
    world.arrive(request("r", max_tokens=1000))
    assert report(world).demand.output_tokens == 3.0 + 0.0 + 3.0


def test_an_answer_that_goes_on_beyond_what_was_expected_counts_as_it_is() -> None:
    world = World()
    world.join("d0", Role.DECODE)
    answered(world, 1, tokens=2, max_tokens=50)
    world.arrive(request("r", max_tokens=50, local_only=LocalOnlyReason.FAN_OUT))
    (leg_id,) = world.legs
    for _ in range(7):
        world.step(leg_id)
    assert report(world).demand.output_tokens == 2 + 7


# --------------------------------------------------------------------------- any order of events
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
    def every_request_is_evaluated_once(self) -> None:
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
    def work_is_charged_to_existing_pools(self) -> None:
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
