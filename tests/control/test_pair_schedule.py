"""Who is paired with whom in a fleet that has more pairs than are watched."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from baton.control.probing.schedule import PairSchedule, ReplicaSampler
from baton.domain.fleet import ReplicaFacts, Role
from tests.fakes.facts import replica_facts

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
def test_those_who_stay_keep_partners_while_there_are_any(
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


def test_nobody_is_paired_with_a_replica_that_left_or_has_another_layout() -> None:
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
def test_candidates_are_those_who_joined_and_did_not_leave(
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
