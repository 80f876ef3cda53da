"""The pair prober under any order of events: bounded, nothing leaked, quarantines end."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.control.probing.prober import ProbeOptions
from baton.control.probing.schedule import PairSchedule, ReplicaSampler
from baton.domain.fleet import Load, ReplicaFacts, Role
from baton.domain.handoff import LegFailure
from baton.domain.request import FinishReason
from baton.policy.links.estimates import LinkState
from tests.control.pair_world import PairWorld
from tests.fakes.facts import replica_facts

REPLICAS = {
    "p0": Role.PREFILL,
    "p1": Role.PREFILL,
    "d0": Role.DECODE,
    "d1": Role.DECODE,
    "m0": Role.MIXED,
}
RUNNING = 3


class PairMachine(RuleBasedStateMachine):
    """Replicas come and go, answers come late, wrongly or never, and handoffs fail meanwhile."""

    partners = 32

    def __init__(self) -> None:
        super().__init__()
        self.world = PairWorld(
            ProbeOptions(max_running=RUNNING, max_per_s=5.0, max_partners=self.partners)
        )
        self.alive: set[str] = set()

    def pick(self, data: st.DataObject, items: list[str]) -> str:
        return data.draw(st.sampled_from(sorted(items)))

    @rule(replica_id=st.sampled_from(sorted(REPLICAS)))
    def join(self, replica_id: str) -> None:
        if replica_id in self.alive:
            self.world.disconnect(replica_id)
        self.alive.add(replica_id)
        self.world.join(replica_id, REPLICAS[replica_id])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        replica_id = self.pick(data, list(self.alive))
        self.alive.remove(replica_id)
        self.world.disconnect(replica_id)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.world.drain(self.pick(data, list(self.alive)))

    @precondition(lambda self: self.world.checks)
    @rule(data=st.data(), ok=st.booleans())
    def answer(self, data: st.DataObject, *, ok: bool) -> None:
        self.world.answer_check(ok=ok, pair=data.draw(st.sampled_from(self.world.checks)))

    @precondition(lambda self: self.world.running)
    @rule(
        data=st.data(),
        finish=st.sampled_from([FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR]),
        ticket=st.sampled_from([True, True, False]),
        cached_tokens=st.sampled_from([16, 16, None, 0]),
    )
    def finish(
        self,
        data: st.DataObject,
        finish: FinishReason,
        cached_tokens: int | None,
        *,
        ticket: bool,
    ) -> None:
        leg_id = self.pick(data, list(self.world.running))
        self.world.finish(leg_id, finish=finish, ticket=ticket, cached_tokens=cached_tokens)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), failure=st.sampled_from(LegFailure))
    def fail(self, data: st.DataObject, failure: LegFailure) -> None:
        self.world.fail(failure, self.pick(data, list(self.world.running)))

    @rule()
    def confirm_aborts(self) -> None:
        self.world.confirm_aborts()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), queued=st.integers(0, 1))
    def report(self, data: st.DataObject, queued: int) -> None:
        load = Load(queued_requests=queued)
        self.world.report_load(self.pick(data, list(self.alive)), load)

    @rule(source_id=st.sampled_from(sorted(REPLICAS)), target_id=st.sampled_from(sorted(REPLICAS)))
    def break_a_handoff(self, source_id: str, target_id: str) -> None:
        world = self.world
        world.links.record_failure(source_id, target_id, world.now_s)
        world.execute(world.prober.suspect(source_id, target_id, world.now_s))

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 2.5, 6.0, 11.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @invariant()
    def probes_and_their_rate_are_bounded(self) -> None:
        assert self.world.prober.running_count() <= RUNNING
        times = [at_s for at_s, _ in self.world.started_checks]
        for number in range(len(times) - RUNNING):
            # One more than the burst takes at least one spacing.
            assert times[number + RUNNING] - times[number] >= 0.2 - 1e-6

    @invariant()
    def a_quarantined_pair_is_never_usable(self) -> None:
        links = self.world.links
        for row in links.rows(self.world.now_s):
            usable = links.transfer_s(row.source_id, row.target_id, 1) is not None
            assert usable == (row.state is not LinkState.QUARANTINED)

    @invariant()
    def blocks_are_held_only_for_legs_under_way(self) -> None:
        waited_for = {
            command.leg.kv_handle.params.decode()
            for command in self.world.running.values()
            if command.leg.kv_handle is not None
        }
        assert self.world.leased.keys() <= waited_for

    @invariant()
    def something_is_always_due_while_there_are_pairs(self) -> None:
        roles = [REPLICAS[r] for r in self.world.fleet.view(0.0).replicas if not self.drains(r)]
        sources = sum(role is not Role.DECODE for role in roles)
        targets = sum(role is not Role.PREFILL for role in roles)
        mixed = sum(role is Role.MIXED for role in roles)
        if sources * targets > mixed:
            assert self.world.prober.next_deadline_at_s() is not None

    def drains(self, replica_id: str) -> bool:
        view = self.world.fleet.get(replica_id)
        return view is not None and view.draining

    def teardown(self) -> None:
        # A healthy fleet that answers everything has every pair well within a minute or two.
        world = self.world
        for replica_id in sorted(self.alive):
            if self.drains(replica_id):
                world.disconnect(replica_id)
                world.join(replica_id, REPLICAS[replica_id])
            world.report_load(replica_id, Load())
        for _ in range(120):
            world.confirm_aborts()
            for leg_id in [i for i in world.running if not world.prober.owns(i)]:
                world.running.pop(leg_id)
            while world.running:
                world.finish()
            while world.checks:
                world.complete_probe()
            world.advance(1.0)
        for row in world.links.rows(world.now_s):
            pair = (REPLICAS[row.source_id], REPLICAS[row.target_id])
            if (
                row.source_id != row.target_id
                and pair[0] != Role.DECODE
                and pair[1] != Role.PREFILL
            ):
                assert row.state is LinkState.OK, row


class FewPartnersMachine(PairMachine):
    """The same in a fleet so large, for its partners, that most pairs are watched only in doubt."""

    partners = 1


_SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPairs = PairMachine.TestCase
TestPairs.settings = _SETTINGS
TestFewPartners = FewPartnersMachine.TestCase
TestFewPartners.settings = _SETTINGS


# ---------- who is paired with whom in a fleet that has more pairs than are watched
PARTNERS = 4


def facts(number: int, *, role: Role = Role.MIXED, layout: str = "same") -> ReplicaFacts:
    return replica_facts(f"m{number}", role, layout=layout, side_channel=f"m{number}:5600")


def fleet(size: int, *, seed: int = 1) -> PairSchedule:
    schedule = PairSchedule(per_s=20.0, burst=8, partners=PARTNERS, rng=Random(seed))
    for number in range(size):
        schedule.add_replica(facts(number))
    return schedule


def targets(schedule: PairSchedule, source_id: str) -> set[str]:
    return {pair.target.replica_id for pair in schedule.pairs_from(source_id)}


@given(leaving=st.permutations(range(24)), count=st.integers(1, 23), seed=st.integers(0, 99))
def test_remaining_replicas_keep_partners_while_there_are_any(
    leaving: list[int], count: int, seed: int
) -> None:
    schedule = fleet(24, seed=seed)
    for number in leaving[:count]:
        schedule.remove_replica(f"m{number}")
        schedule.check_integrity(())
    wanted = min(PARTNERS, 24 - count - 1)
    for number in leaving[count:]:
        assert len(targets(schedule, f"m{number}") - {f"m{number}"}) >= wanted


def test_pairs_become_fewer_as_a_fleet_does() -> None:
    schedule = fleet(60)
    at_first = len(schedule)
    for number in range(30):
        schedule.remove_replica(f"m{number}")
    assert len(schedule) < 0.7 * at_first


def test_no_replica_is_paired_with_a_removed_one_or_another_layout() -> None:
    schedule = fleet(12)
    schedule.add_replica(facts(50, layout="other"))
    schedule.add_replica(facts(51, role=Role.DECODE))
    assert not targets(schedule, "m50"), "nobody has its layout"
    assert not targets(schedule, "m51"), "it only decodes"
    schedule.remove_replica("m3")
    for number in range(60, 70):
        schedule.add_replica(facts(number))
    ids = [f"m{number}" for number in (*range(12), *range(60, 70))]
    everyone = {target for source_id in ids for target in targets(schedule, source_id)}
    assert "m3" not in everyone
    assert "m50" not in everyone
    assert "m51" in everyone


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
    most=st.integers(1, 12),
    seed=st.integers(0, 9),
)
def test_candidates_are_the_added_replicas_that_were_not_removed(
    steps: list[tuple[bool, int]], most: int, seed: int
) -> None:
    candidates, there = ReplicaSampler(), dict[str, set[str]]()
    for joins, number in steps:
        one = facts(number, layout=f"layout {number % 2}")
        alike = there.setdefault(one.layout, set())
        if joins and one.replica_id not in alike:
            candidates.add(one)
            alike.add(one.replica_id)
        elif not joins:
            candidates.remove(one)
            alike.discard(one.replica_id)
    rng = Random(seed)
    for layout, alike in there.items():
        for drawn in (
            candidates.sample(layout, most, rng),
            list(candidates.from_random_start(layout, most, rng)),
        ):
            names = {other.replica_id for other in drawn}
            assert len(names) == len(drawn) == min(most, len(alike))
            assert names <= alike
