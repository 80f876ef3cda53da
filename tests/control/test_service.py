"""A coordinator that serves classes and tenants: admission, turns, limits, and other rules live."""

from __future__ import annotations

from dataclasses import replace

from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.queue.admission_controller import AdmissionController
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import RequestState
from baton.control.state.service_rules import ServiceRules
from baton.domain.errors import Evicted, NotAllowed, QueueFull, RateLimited, SloUnattainable
from baton.domain.events import QuotasAllocated
from baton.domain.fleet import Load, LossReason, Role
from baton.domain.handoff import HandoffMode, HitSource, LegFailure, LegKind, RouteOption
from baton.domain.request import Phase, Request
from baton.domain.slo import Slo
from baton.domain.tenant import QuotaShare, RateLimit, Tenant
from baton.domain.value import evolve
from baton.policy.admission.decision import AdmissionForecast, AdmissionOptions, AdmissionPolicy
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.prefix_cache.index import PrefixIndex
from tests.control.world import World, request
from tests.fakes.placers import placer
from tests.fakes.timings import LinearTiming

TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.001, per_stream_s=0.0001)
"""A prompt of 400 tokens takes 0.41 s."""
CHAT = Slo(name="default", ttft_s=1.0)
RUSH = Slo(name="rush", ttft_s=1.0, priority=5)
BATCH = Slo(name="batch")
BOOK = SloClasses(classes={"default": CHAT, "rush": RUSH, "batch": BATCH})
GOLD = Tenant(name="gold", priority=1, classes=("default", "rush"))
RULES = ServiceRules(slos=BOOK, tenants={"gold": GOLD, "free": Tenant(name="free")})
LIMITS = CoordinatorLimits(max_requests=64, max_queued_requests=16)


def world(rules: ServiceRules = RULES, limits: CoordinatorLimits = LIMITS) -> World:
    """One replica that does everything, with engines as `TIMING` says."""
    options = PredictedOptions(disaggregate=Disaggregate.NEVER)
    made = World(limits, policy=PredictedPlacer(options), rules=rules, priors={"mixed": TIMING})
    made.join("m0", Role.MIXED)
    return made


def ask(
    at: World, name: str, *, tenant: str = "free", tokens: int = 400, slo: str | None = None
) -> Request:
    item = request(
        name,
        prompt_tokens=tokens,
        max_tokens=2,
        tenant=tenant,
        slo_class=slo,
        arrived_at_s=at.now_s,
    )
    # Prompts that have nothing in common: what is cached costs nothing.
    own = 10_000 * (len(at.requests) + 1)
    item = evolve(item, prompt_token_ids=tuple(range(own, own + tokens)))
    at.arrive(item)
    return item


def runs(at: World) -> list[str]:
    """The requests whose legs run, in order."""
    return [leg.request_id for _, leg in at.legs.values()]


def run_one(at: World, request_id: str) -> None:
    """Have one leg run to its end."""
    for _ in range(2):
        (leg_id,) = (leg_id for leg_id, (_, leg) in at.legs.items() if leg.request_id == request_id)
        at.step(leg_id)
    at.advance(0.005)  # the pause between two tries


def ask_adapted(at: World, name: str, adapter: str) -> None:
    """Ask for the one replica with an adapter over its model."""
    item = request(name, prompt_tokens=100, max_tokens=2, arrived_at_s=at.now_s)
    at.arrive(evolve(item, adapter=adapter))


def test_to_load_an_adapter_on_an_idle_replica_is_no_reason_to_hold() -> None:
    at = world()
    ask_adapted(at, "r0", "ada")
    assert runs(at) == ["r0"]


def test_an_adapter_that_cannot_be_loaded_delays_no_later_request() -> None:
    at = world()
    ask_adapted(at, "r0", "ada")
    ask(at, "r1", tokens=100)
    assert runs(at) == ["r0"], "the replica is loading"
    (leg_id,) = at.legs
    at.fail_leg(leg_id, LegFailure.REJECTED)
    assert at.records["r0"].outcome is Phase.FAILED
    at.advance(0.05)
    assert runs(at) == ["r1"]
    ask_adapted(at, "r2", "ada")
    view = at.coordinator.fleet(at.now_s).replicas["m0"]
    assert not view.has_adapter("ada")
    at.coordinator.check_integrity()


def test_a_request_that_can_wait_is_queued_and_one_that_would_be_late_is_rejected_at_once() -> None:
    at = world()
    for number in range(4):
        ask(at, f"r{number}")
    assert runs(at) == ["r0"]
    assert at.coordinator.phases() == {"r0": Phase.PREFILL, "r1": Phase.QUEUED}
    error = at.errors["r3"]
    assert isinstance(error, SloUnattainable)
    assert error.http_status == 429
    assert error.retry_after_s >= 1.0
    record = at.records["r3"]
    assert record.outcome is Phase.SHED
    assert record.routes == ()
    assert record.slo == CHAT
    assert record.tenant == "free"
    assert "1.0" not in record.reason or "predicted" in record.reason


def shed(at: World) -> list[tuple[str, str, bool]]:
    return [
        (shedding_class.tenant, shedding_class.slo_class, shedding_class.is_default)
        for shedding_class in at.coordinator.shedding_classes(at.now_s)
    ]


def test_a_gate_is_told_of_which_tenants_and_classes_one_more_would_be_refused() -> None:
    at = world()
    ask(at, "r0")
    assert shed(at) == [], "one more would be held"
    for number in range(1, 4):
        ask(at, f"r{number}")
    assert isinstance(at.errors["r3"], SloUnattainable)
    (found,) = at.coordinator.shedding_classes(at.now_s)
    assert (found.tenant, found.slo_class, found.is_default) == ("free", "default", True)
    assert 0.0 < found.retry_after_s < 1.0


def test_shedding_of_one_class_says_nothing_about_a_higher_one() -> None:
    at = world()
    ask(at, "rush", tenant="gold", slo="rush")
    for number in range(4):
        ask(at, f"r{number}")
    ask(at, "batch", slo="batch")
    assert shed(at) == [("free", "default", True)]


def test_a_gate_that_rejected_all_for_a_second_admits_some_to_try() -> None:
    at = world()
    for number in range(4):
        ask(at, f"r{number}")
    assert shed(at)
    at.advance(1.01)
    assert shed(at) == []


def test_evaluating_a_request_that_would_be_rejected_changes_nothing() -> None:
    at, other = world(), world()
    for number in range(3):
        ask(at, f"r{number}")
        ask(other, f"r{number}")
        for _ in range(3):
            shed(at)
    at.advance(0.2)
    other.advance(0.2)
    assert at.coordinator.phases() == other.coordinator.phases()
    assert str(at.errors) == str(other.errors)


def test_a_queued_request_is_admitted_when_the_engine_is_done_with_those_before_it() -> None:
    at = world()
    ask(at, "first")
    ask(at, "second")
    at.advance(0.41)
    run_one(at, "first")
    assert runs(at) == ["second"]
    run_one(at, "second")
    assert at.records["second"].queue_wait_s == 0.41
    assert {record.outcome for record in at.records.values()} == {Phase.FINISHED}


def test_a_queued_request_is_admitted_when_the_engines_queue_is_predicted_to_be_short() -> None:
    at = world()
    ask(at, "first")
    ask(at, "second")
    for _ in range(50):
        due_s = at.coordinator.next_deadline_at_s()
        assert due_s is not None
        at.advance(max(0.0, due_s - at.now_s))
        if "second" in runs(at):
            break
    # The prompt takes 0.41 s, and 0.05 s of it may be left.
    assert 0.35 <= at.now_s <= 0.42


def test_one_whose_turn_does_not_come_in_time_is_evicted_at_that_moment() -> None:
    at = world()
    ask(at, "first")
    ask(at, "second")
    at.advance(0.3)
    ask(at, "rush", tenant="gold", slo="rush")  # comes first
    at.advance(0.2)
    error = at.errors["second"]
    assert isinstance(error, Evicted)
    assert error.http_status == 503
    assert at.records["second"].outcome is Phase.EVICTED
    assert at.records["second"].routes == ()


def test_an_emptied_queue_sets_no_timer() -> None:
    at = world()
    for number in range(2):
        ask(at, f"r{number}")
    assert at.coordinator.phases()["r1"] is Phase.QUEUED
    at.cancel("r1")
    at.advance(1.0)
    due_at_s = at.coordinator.next_deadline_at_s()
    assert due_at_s is not None
    assert due_at_s > at.now_s


def test_a_queued_request_that_would_now_be_late_is_evicted_when_its_engine_falls_behind() -> None:
    at = world()
    ask(at, "first")
    ask(at, "second")
    at.advance(0.01)
    at.load("m0", Load(queued_requests=3, queued_tokens=2000))
    assert isinstance(at.errors["second"], Evicted)
    assert at.records["second"].outcome is Phase.EVICTED


def test_a_queued_request_is_admitted_as_soon_as_a_leg_ends_sooner_than_predicted() -> None:
    at = world()
    ask(at, "first")
    ask(at, "second")
    at.advance(0.05)
    at.advance(0.052)
    run_one(at, "first")
    assert runs(at) == ["second"]
    assert at.now_s < 0.11


def test_a_stream_stays_where_it_is_prefilled_when_those_on_their_way_will_fill_decode() -> None:
    paced = Slo(name="default", ttft_s=1.0, tpot_s=0.0125)
    quick, slow = (
        LinearTiming(per_step_s=0.01, per_token_s=token, per_stream_s=0.001)
        for token in (1e-3, 1e-2)
    )
    at = World(
        LIMITS,
        policy=PredictedPlacer(PredictedOptions(tpot_slo_s=0.0125)),
        rules=ServiceRules(slos=SloClasses(classes={"default": paced})),
        priors={"prefill": quick, "decode": slow},
    )
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("p2", Role.PREFILL)):
        at.join(name, role)
    at.join("d0", Role.DECODE)
    for number in range(3):
        ask(at, f"r{number}")
    kinds = [leg.kind for _, leg in at.legs.values()]
    assert kinds == [LegKind.PREFILL, LegKind.PREFILL, LegKind.LOCAL]


def test_streams_of_lower_priority_may_be_broken_and_others_may_not() -> None:
    fleet = FleetTable()
    door = AdmissionController(
        fleet=fleet, fleet_model=FleetModel(fleet, PrefixIndex(None)), first_token_timeout_s=1.0
    )
    gold, free = (
        RequestState(request=request(name), tenant=Tenant(name=name, priority=priority), slo=CHAT)
        for name, priority in (("gold", 1), ("free", 0))
    )
    for entry in (free, free, free, gold):
        door.admit(entry, 0.0)
    option = RouteOption(
        HandoffMode.LOCAL, None, "m0", 0, HitSource.NONE, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 2.0
    )
    seen = AdmissionForecast(waited_s=0.0, unqueued_ttft_s=0.1, engine_queue_s=0.0)
    assert door._caused_misses(free, option, seen) == 2.0
    assert door._caused_misses(gold, option, seen) == 0.5
    late = seen._replace(waited_s=1.0)
    assert door._caused_misses(free, option, late) == 1.0, (
        "its own first token is not a broken stream"
    )


def test_a_higher_priority_comes_first_also_when_it_arrives_later() -> None:
    at = world()
    ask(at, "first")
    ask(at, "second", tokens=100)
    ask(at, "gold", tenant="gold", tokens=100)
    at.advance(0.4)
    run_one(at, "first")
    assert runs(at)[0] == "gold"


def test_a_full_queue_admits_a_higher_band_and_evicts_the_newest_of_the_lowest() -> None:
    at = world(limits=CoordinatorLimits(max_requests=64, max_queued_requests=2))
    for name in ("runs", "old", "new"):
        ask(at, name, tokens=150)
    assert at.coordinator.rejection() is None, "somebody could come for whom others make room"
    ask(at, "gold", tenant="gold", tokens=150)
    assert isinstance(at.errors["new"], Evicted)
    assert at.coordinator.phases()["gold"] is Phase.QUEUED
    ask(at, "more", tokens=20)
    assert isinstance(at.errors["more"], QueueFull)


def test_a_resumed_stream_goes_before_all_queued_requests_and_is_not_rejected() -> None:
    at = world()
    at.join("m1", Role.MIXED)
    ask(at, "a", tokens=700)
    ask(at, "b", tokens=700)
    (leg,) = (leg_id for leg_id, (_, leg) in at.legs.items() if leg.request_id == "a")
    at.step(leg)  # a has a token
    ask(at, "held", tokens=100)
    assert at.coordinator.phases()["held"] in {Phase.QUEUED, Phase.PREFILL}
    where = at.legs[leg][0]
    at.disconnect(where)
    assert at.coordinator.phases()["a"] is Phase.PREFILL
    assert "a" in runs(at)


def test_one_that_was_let_in_once_is_not_refused_when_its_replica_is_lost() -> None:
    at = world()
    ask(at, "a", tokens=700)
    at.advance(0.9)
    at.disconnect("m0", LossReason.DISCONNECTED)
    assert at.coordinator.phases() == {"a": Phase.QUEUED}
    at.join("m0", Role.MIXED)
    assert runs(at) == ["a"], "late as it is"


def test_a_prompt_too_long_for_its_objective_is_served_when_there_is_room() -> None:
    at = world()
    ask(at, "short", tokens=300)
    ask(at, "long", tokens=2000)
    ask(at, "other", tokens=300)
    assert at.coordinator.phases()["long"] is Phase.QUEUED
    at.advance(0.31)
    run_one(at, "short")
    assert runs(at) == ["other"], "whoever can be in time comes first"
    at.advance(0.31)
    run_one(at, "other")
    assert runs(at) == ["long"]


def test_a_request_without_objectives_waits_rather_than_fill_the_engines_queue() -> None:
    at = world()
    for number in range(5):
        ask(at, f"b{number}", slo="batch")
    # Nobody of `free` may ask for a class of its own, and all have the same priority.
    assert runs(at) == ["b0"]
    assert sum(phase is Phase.QUEUED for phase in at.coordinator.phases().values()) == 4
    ask(at, "rush", tenant="gold", slo="rush", tokens=100)
    at.advance(0.41)
    run_one(at, "b0")
    assert runs(at)[0] == "rush"


def test_without_objectives_every_request_goes_straight_to_the_engines() -> None:
    at = world(ServiceRules())
    for number in range(8):
        ask(at, f"r{number}")
    assert len(runs(at)) == 8


def test_without_objectives_a_request_that_would_time_out_in_the_queue_is_rejected() -> None:
    """Given up after two seconds, each would go to the end of the same queue again."""
    at = world(ServiceRules(), replace(LIMITS, first_token_timeout_s=2.0))
    for number in range(8):
        ask(at, f"r{number}")
    assert runs(at) == ["r0", "r1", "r2", "r3"]
    error = at.errors["r7"]
    assert isinstance(error, SloUnattainable)
    assert error.retry_after_s >= 1.0
    for number in range(4):
        at.advance(0.41)
        run_one(at, f"r{number}")
    ask(at, "later")
    assert runs(at) == ["later"]


def test_without_objectives_a_gate_is_told_of_a_queue_that_is_too_long() -> None:
    at = world(ServiceRules(), replace(LIMITS, first_token_timeout_s=2.0))
    ask(at, "long", tokens=4000)
    assert shed(at) == []
    at.advance(1.1)  # it goes by the lightest of the last second
    ask(at, "r1")
    assert isinstance(at.errors["r1"], SloUnattainable)
    assert [tenant for tenant, _, _ in shed(at)] == ["default"], "nobody has a name of its own here"


def test_without_objectives_a_prompt_that_takes_longer_than_that_alone_is_admitted() -> None:
    at = world(ServiceRules(), replace(LIMITS, first_token_timeout_s=2.0))
    ask(at, "long", tokens=4000)
    assert runs(at) == ["long"]


def test_with_the_bounded_rule_a_long_queue_rejects_no_request() -> None:
    rules = ServiceRules(admission=AdmissionOptions(policy=AdmissionPolicy.BOUNDED))
    at = world(rules, replace(LIMITS, first_token_timeout_s=2.0))
    for number in range(8):
        ask(at, f"r{number}")
    assert len(runs(at)) == 8


def test_with_the_bounded_rule_nothing_is_predicted() -> None:
    bounded = ServiceRules(slos=BOOK, admission=AdmissionOptions(policy=AdmissionPolicy.BOUNDED))
    at = world(bounded)
    for number in range(8):
        ask(at, f"r{number}")
    assert len(runs(at)) == 8


def test_a_placer_that_predicts_nothing_rejects_no_request() -> None:
    at = World(LIMITS, policy=placer(Disaggregate.NEVER), rules=RULES)
    at.join("m0", Role.MIXED)
    for number in range(8):
        ask(at, f"r{number}")
    assert len(runs(at)) == 8


def test_a_class_that_one_may_not_ask_for_is_an_error_that_says_so() -> None:
    at = world()
    ask(at, "a", slo="rush")
    ask(at, "b", slo="no such class")
    for name in ("a", "b"):
        assert isinstance(at.errors[name], NotAllowed)
        assert at.records[name].outcome is Phase.FAILED
    assert "expected one of batch, default, rush" in str(at.errors["b"])


def test_a_tenant_over_its_rate_is_refused_and_others_are_not() -> None:
    slow = Tenant(name="slow", rate=RateLimit(requests_per_s=0.5, burst_s=2.0))
    at = world(ServiceRules(tenants={"slow": slow}))
    ask(at, "a", tenant="slow")
    assert at.coordinator.rejection(tenant="slow", now_s=0.0) is not None
    assert at.coordinator.rejection(tenant="free", now_s=0.0) is None
    ask(at, "b", tenant="slow")
    ask(at, "c", tenant="free")
    error = at.errors["b"]
    assert isinstance(error, RateLimited)
    assert error.retry_after_s == 2.0
    assert set(runs(at)) == {"a", "c"}
    at.advance(2.0)
    ask(at, "d", tenant="slow")
    assert "d" in runs(at)


def test_a_share_that_was_dealt_out_counts_at_once() -> None:
    narrow = Tenant(name="narrow", max_in_flight=8)
    at = world(ServiceRules(tenants={"narrow": narrow}))
    at.handle(QuotasAllocated(shares={"narrow": QuotaShare(max_in_flight=1)}))
    ask(at, "a", tenant="narrow")
    ask(at, "b", tenant="narrow")
    assert isinstance(at.errors["b"], RateLimited)
    run_one(at, "a")
    ask(at, "c", tenant="narrow")
    assert "c" in runs(at)


def test_unknown_names_share_the_limits_of_default() -> None:
    default = Tenant(rate=RateLimit(requests_per_s=1.0, burst_s=3.0))
    at = world(ServiceRules(tenants={"default": default}))
    for number in range(5):
        ask(at, f"r{number}", tenant=f"stranger {number}")
    assert len(at.errors) == 2
    assert {record.tenant for record in at.records.values()} == {"default"}


def test_new_rules_hold_from_now_on_and_earlier_objectives_stay() -> None:
    at = world()
    for number in range(2):
        ask(at, f"r{number}")
    assert at.coordinator.phases()["r1"] is Phase.QUEUED
    at.coordinator.reconfigure(rules=ServiceRules())
    at.advance(0.01)
    assert set(runs(at)) == {"r0", "r1"}
    run_one(at, "r1")
    assert at.records["r1"].slo == CHAT
    ask(at, "r2")
    run_one(at, "r2")
    assert at.records["r2"].slo == Slo()


def test_other_limits_and_another_placer_hold_from_now_on() -> None:
    at = world()
    at.coordinator.reconfigure(
        limits=CoordinatorLimits(max_requests=1), placer=placer(Disaggregate.NEVER)
    )
    ask(at, "a")
    ask(at, "b")
    assert isinstance(at.errors["b"], QueueFull)
    run_one(at, "a")
    assert at.records["a"].decisions[0].policy == "least-loaded"


def test_gaps_are_kept_as_far_as_they_matter() -> None:
    paced = Slo(ttft_s=1.0, itl_p99_s=0.1)
    at = world(ServiceRules(slos=SloClasses(classes={"default": paced})))
    at.arrive(request("r", max_tokens=6))
    (leg,) = at.legs
    for gap_s in (0.3, 0.05, 0.2, 0.05, 0.11, 0.02):  # the first one is no gap
        at.advance(gap_s)
        at.step(leg)
    record = at.records["r"]
    assert round(record.max_itl_s, 6) == 0.2
    assert record.itl_violations == 2


def test_how_long_one_is_told_to_stay_away_grows_with_the_queue() -> None:
    rules = ServiceRules(slos=SloClasses(classes={"default": BATCH, "rush": RUSH}))
    at = world(rules, CoordinatorLimits(max_requests=64, max_queued_requests=12))
    waits = []
    for number in range(20):
        ask(at, f"r{number}", tokens=800)
        if f"r{number}" in at.errors:
            error = at.errors[f"r{number}"]
            assert isinstance(error, QueueFull)
            waits.append(error.retry_after_s)
    assert len(waits) == 20 - 13
    assert all(9.0 <= wait_s <= 14.0 for wait_s in waits), waits
