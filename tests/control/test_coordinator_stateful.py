"""The coordinator under any order of events: nothing lost, nothing twice, nothing leaked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton.control.request.lifecycle import FAILED_FINISHES, REJECTED_FINISHES
from baton.control.state.service_rules import ServiceRules
from baton.domain.events import QuotasAllocated
from baton.domain.fleet import Load, LossReason, Role
from baton.domain.handoff import LegFailure
from baton.domain.request import FinishReason, LocalOnlyReason, Phase
from baton.domain.slo import Slo
from baton.domain.tenant import QuotaShare, RateLimit, Tenant
from baton.domain.value import evolve
from baton.policy.admission.decision import AdmissionOptions, AdmissionPolicy
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.control.world import LIMITS, World, request
from tests.fakes.timings import LinearTiming

REPLICAS = {
    "p0": Role.PREFILL,
    "p1": Role.PREFILL,
    "d0": Role.DECODE,
    "d1": Role.DECODE,
    "m0": Role.MIXED,
}
SOFT_FAILURES = [
    LegFailure.ENGINE_ERROR,
    LegFailure.KV_LOAD_FAILED,
    LegFailure.OVERLOADED,
    LegFailure.UNREACHABLE,
    LegFailure.DRAINING,
]


class CoordinatorMachine(RuleBasedStateMachine):
    """Requests come and go while replicas join, drain, fail, fall silent and come back."""

    limits = LIMITS
    immortal: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.limits)
        self.count = 0

    @initialize()
    def one_of_each(self) -> None:
        self.world.join_prefill_decode()

    def pick(self, data: st.DataObject, items: list[str]) -> str:
        return data.draw(st.sampled_from(sorted(items)))

    def mortals(self) -> list[str]:
        return list(self.world.alive.keys() - self.immortal)

    @rule(
        max_tokens=st.integers(1, 5),
        local_only=st.sampled_from([None, None, LocalOnlyReason.FAN_OUT]),
        resumable=st.sampled_from([True, True, False]),
    )
    def arrive(
        self, max_tokens: int, local_only: LocalOnlyReason | None, *, resumable: bool
    ) -> None:
        self.count += 1
        self.world.arrive(
            request(
                f"r{self.count}",
                max_tokens=max_tokens,
                local_only=local_only,
                resumable=resumable,
            )
        )

    @precondition(lambda self: self.world.legs)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.world.step(self.pick(data, list(self.world.legs)))

    @precondition(lambda self: self.world.legs)
    @rule(data=st.data(), finish=st.sampled_from(sorted(FAILED_FINISHES | REJECTED_FINISHES)))
    def break_leg(self, data: st.DataObject, finish: FinishReason) -> None:
        self.world.step(self.pick(data, list(self.world.legs)), finish=finish)

    @precondition(lambda self: self.world.legs)
    @rule(data=st.data(), failure=st.sampled_from(SOFT_FAILURES))
    def fail_leg(self, data: st.DataObject, failure: LegFailure) -> None:
        self.world.fail_leg(self.pick(data, list(self.world.legs)), failure)

    @precondition(lambda self: self.world.coordinator.phases())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(self.pick(data, list(self.world.coordinator.phases())))

    @rule()
    def confirm_aborts(self) -> None:
        self.world.confirm_aborts()

    @rule(replica_id=st.sampled_from(sorted(REPLICAS)))
    def join(self, replica_id: str) -> None:
        if replica_id not in self.world.alive:
            self.world.join(replica_id, REPLICAS[replica_id])

    @precondition(lambda self: self.mortals())
    @rule(data=st.data(), reason=st.sampled_from(LossReason))
    def lose(self, data: st.DataObject, reason: LossReason) -> None:
        self.world.disconnect(self.pick(data, self.mortals()), reason)

    @precondition(lambda self: self.mortals())
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.world.drain(self.pick(data, self.mortals()))

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), role=st.sampled_from(Role))
    def flip(self, data: st.DataObject, role: Role) -> None:
        self.world.change_role(data.draw(st.sampled_from(sorted(self.world.alive))), role)

    @precondition(lambda self: self.mortals())
    @rule(data=st.data(), queued=st.integers(0, 3))
    def report(self, data: st.DataObject, queued: int) -> None:
        self.world.load(self.pick(data, self.mortals()), Load(queued_requests=queued))

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 11.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @invariant()
    def every_request_is_in_flight_or_has_ended_once(self) -> None:
        in_flight, ended = self.world.coordinator.phases().keys(), self.world.records.keys()
        assert not in_flight & ended
        assert in_flight | ended == self.world.requests.keys()

    @invariant()
    def tokens_are_in_order_without_gap_or_repeat(self) -> None:
        for request_id, tokens in self.world.tokens.items():
            assert tokens == list(range(len(tokens))), request_id

    @invariant()
    def a_finished_request_has_all_its_tokens(self) -> None:
        for request_id, record in self.world.records.items():
            if record.outcome is Phase.FINISHED:
                wanted = self.world.requests[request_id].max_tokens
                assert len(self.world.tokens[request_id]) == wanted, request_id

    @invariant()
    def an_error_is_sent_exactly_when_a_request_fails(self) -> None:
        told = {Phase.FAILED, Phase.SHED, Phase.EVICTED}
        failed = {r for r, record in self.world.records.items() if record.outcome in told}
        assert failed == self.world.errors.keys()

    @invariant()
    def something_is_always_due_while_requests_are_in_flight(self) -> None:
        if self.world.coordinator.phases():
            assert self.world.coordinator.next_deadline_at_s() is not None

    def teardown(self) -> None:
        # A healthy fleet and a little time end every request and free every block.
        for replica_id, role in REPLICAS.items():
            if replica_id in self.world.alive:
                self.world.disconnect(replica_id)
            self.world.join(replica_id, role)
        for _ in range(3):
            self.world.advance(LIMITS.retry_s)
            self.world.run_to_end()
        self.every_request_is_in_flight_or_has_ended_once()
        self.a_finished_request_has_all_its_tokens()
        assert self.world.coordinator.phases() == {}
        assert self.world.coordinator.unconfirmed_aborts() == 0
        assert self.world.leased == {}, "blocks are pinned for nobody"
        for view in self.world.coordinator.fleet(0).replicas.values():
            assert (view.inflight_legs, view.inflight_tokens) == (0, 0)


class PredictedMachine(CoordinatorMachine):
    """As above, under the placement that fetches prefixes and learns from reports."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.limits, policy=PredictedPlacer(PredictedOptions(shortlist=1)))
        self.updates: Counter[str] = Counter()

    @precondition(lambda self: bool(self.world.alive) and bool(self.world.requests))
    @rule(data=st.data(), lost=st.booleans())
    def report_a_cache(self, data: st.DataObject, *, lost: bool) -> None:
        replica_id = data.draw(st.sampled_from(sorted(self.world.alive)))
        item = self.world.requests[data.draw(st.sampled_from(sorted(self.world.requests)))]
        self.updates[replica_id] += 1 + lost
        self.world.report_cached(replica_id, item, sequence=self.updates[replica_id])

    @precondition(lambda self: bool(self.world.alive))
    @rule(data=st.data(), running=st.integers(0, 64), received=st.integers(0, 9))
    def report_a_load(self, data: st.DataObject, running: int, received: int) -> None:
        replica_id = data.draw(st.sampled_from(sorted(self.world.alive)))
        load = Load(running_requests=running, cache_sequence=self.updates[replica_id])
        self.world.load(replica_id, load, received_legs=received)


class NoLeakMachine(CoordinatorMachine):
    """As above, but d1 never goes away: then a lease must end as soon as nobody needs it."""

    immortal = frozenset({"d1"})

    @initialize()
    def one_of_each(self) -> None:
        self.world.join_prefill_decode(decode=2)

    @invariant()
    def blocks_are_pinned_only_for_a_transfer_or_an_unconfirmed_abort(self) -> None:
        transfers = sum(p is Phase.TRANSFER for p in self.world.coordinator.phases().values())
        unconfirmed = self.world.coordinator.unconfirmed_aborts()
        assert len(self.world.leased) <= transfers + unconfirmed


_EARLY = replace(LIMITS, early_first_token=True)


class EarlyMachine(PredictedMachine):
    """As above, with first tokens from those that prefill."""

    limits = _EARLY


class EarlyNoLeakMachine(NoLeakMachine):
    """As above: a lease ends as soon as nobody needs it, also where the first token is the last."""

    limits = _EARLY


_TENANTS = {
    "gold": Tenant(name="gold", priority=1, weight=3.0, classes=("default", "rush", "batch")),
    "slow": Tenant(name="slow", rate=RateLimit(requests_per_s=1.0, tokens_per_s=200.0)),
    "narrow": Tenant(name="narrow", weight=2.0, max_in_flight=2),
}
_CLASSES = {
    "default": Slo(ttft_s=1.0, tpot_s=0.05),
    "rush": Slo(name="rush", ttft_s=0.3, priority=1),
    "batch": Slo(name="batch", priority=-1),
}
_RULES = ServiceRules(slos=SloClasses(classes=_CLASSES), tenants=_TENANTS)
_OTHER_RULES = (
    ServiceRules(),
    ServiceRules(slos=_RULES.slos, tenants={"slow": Tenant(name="slow", max_in_flight=1)}),
    ServiceRules(slos=_RULES.slos, admission=AdmissionOptions(policy=AdmissionPolicy.BOUNDED)),
)
_SLOW = LinearTiming(per_step_s=0.01, per_token_s=0.004, per_stream_s=0.001)
"""A prompt of 40 tokens takes 0.17 s: a few of them make a queue."""


class ServiceMachine(CoordinatorMachine):
    """As above, with classes, tenants and rules that change: requests are held, shed, limited."""

    def __init__(self) -> None:
        super().__init__()
        options = PredictedOptions(ttft_slo_s=1.0, tpot_slo_s=0.05)
        priors = {str(role): _SLOW for role in Role}
        self.world = World(
            replace(self.limits, max_queued_requests=4),
            policy=PredictedPlacer(options),
            rules=_RULES,
            priors=priors,
        )

    @rule(
        tenant=st.sampled_from([*_TENANTS, "stranger"]),
        slo_class=st.sampled_from([None, None, "rush", "batch", "nonsense"]),
        tokens=st.integers(1, 120),
    )
    def ask(self, tenant: str, slo_class: str | None, tokens: int) -> None:
        self.count += 1
        item = request(
            f"r{self.count}",
            prompt_tokens=tokens,
            tenant=tenant,
            slo_class=slo_class,
            arrived_at_s=self.world.now_s,
        )
        own = tuple(range(1000 * self.count, 1000 * self.count + tokens))
        self.world.arrive(evolve(item, prompt_token_ids=own))

    @rule(rules=st.sampled_from([_RULES, *_OTHER_RULES]))
    def go_by_other_rules(self, rules: ServiceRules) -> None:
        self.world.coordinator.reconfigure(rules=rules)
        self.world.advance(0.0)

    @rule(places=st.integers(0, 3))
    def deal_out(self, places: int) -> None:
        share = QuotaShare(requests_per_s=0.5, tokens_per_s=100.0, max_in_flight=places)
        self.world.handle(QuotasAllocated(shares={"narrow": share, "slow": share}))

    @rule(seconds=st.sampled_from([0.005, 0.02, 0.1]))
    def wait_a_little(self, seconds: float) -> None:
        self.world.advance(seconds)

    @invariant()
    def a_rejected_request_was_never_dispatched(self) -> None:
        for request_id, record in self.world.records.items():
            if record.outcome is Phase.SHED:
                assert record.routes == (), request_id
            if record.outcome in {Phase.SHED, Phase.EVICTED}:
                assert self.world.tokens[request_id] == [], request_id

    @invariant()
    def no_more_wait_than_may(self) -> None:
        # Streams that lost their replica wait whatever the bound is.
        waiting = sum(
            phase is Phase.QUEUED and not self.world.tokens[request_id]
            for request_id, phase in self.world.coordinator.phases().items()
        )
        assert waiting <= self.world.limits.max_queued_requests

    def teardown(self) -> None:
        for replica_id, role in REPLICAS.items():
            if replica_id not in self.world.alive:
                self.world.join(replica_id, role)
        for _ in range(400):
            if not self.world.coordinator.phases():
                break
            self.world.advance(0.1)
            self.world.run_to_end()
        super().teardown()


class EarlyServiceMachine(ServiceMachine):
    """As above, with first tokens from those that prefill."""

    limits = _EARLY


_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = _SETTINGS
TestPredictedMachine = PredictedMachine.TestCase
TestPredictedMachine.settings = _SETTINGS
TestServiceMachine = ServiceMachine.TestCase
TestServiceMachine.settings = settings(_SETTINGS, max_examples=60)
TestNoLeakMachine = NoLeakMachine.TestCase
TestNoLeakMachine.settings = _SETTINGS
TestEarlyMachine = EarlyMachine.TestCase
TestEarlyMachine.settings = _SETTINGS
TestEarlyServiceMachine = EarlyServiceMachine.TestCase
TestEarlyServiceMachine.settings = settings(_SETTINGS, max_examples=60)
TestEarlyNoLeakMachine = EarlyNoLeakMachine.TestCase
TestEarlyNoLeakMachine.settings = _SETTINGS
