"""The last replica of each session, within a bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.fleet.fleet_model import PendingPrefills, PrefixReuse, Sessions, _MultiFamilyHits
from tests.fakes.timings import KnownHits, LinearTiming

STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 9).map(str), st.sampled_from(["d0", "d1"])),
    max_size=60,
)


def test_a_session_was_last_where_it_was_last_said_to_be() -> None:
    sessions = Sessions()
    sessions.record("acme", "chat", "d0")
    sessions.record("acme", "chat", "d1")
    assert sessions.last_replica("acme", "chat") == "d1"
    assert sessions.last_replica("beta", "chat") is None
    assert sessions.last_replica("acme", None) is None


def test_the_longest_idle_session_is_forgotten_first() -> None:
    sessions = Sessions(max_sessions=2)
    for name in ("one", "two", "one", "three"):
        sessions.record("acme", name, "d0")
    assert [sessions.last_replica("acme", name) for name in ("one", "two", "three")] == [
        "d0",
        None,
        "d0",
    ]


def test_a_tenant_with_many_sessions_forgets_its_own_and_not_those_of_others() -> None:
    sessions = Sessions(max_sessions=100)
    sessions.record("acme", "chat", "d0")
    for number in range(1000):
        sessions.record("flood", str(number), "d1")
    assert sessions.last_replica("acme", "chat") == "d0"
    assert len(sessions) == 100
    sessions.check_integrity()


@given(STEPS, st.integers(1, 12))
def test_there_are_never_more_than_there_is_room_for(
    steps: list[tuple[str, str, str]], most: int
) -> None:
    sessions = Sessions(max_sessions=most)
    for tenant, session, replica in steps:
        sessions.record(tenant, session, replica)
        sessions.check_integrity()
        assert sessions.last_replica(tenant, session) in {replica, None}


# ---------- what is known of replicas that name blocks in different ways
def test_the_longest_hit_comes_first_for_either_block_naming() -> None:
    hits = _MultiFamilyHits(
        {
            ("tiny", 16): KnownHits({"a": 20, "b": 5}),
            ("tiny", 64): KnownHits({"c": 10, "d": 1}),
        }
    )
    assert list(hits.holders(9)) == ["c", "a", "b", "d"], "by tokens: 640, 320, 80, 64"
    assert list(hits.holders(2)) == ["c", "a"]
    assert list(hits.holders(0)) == []
    assert [hits.of(replica_id).blocks for replica_id in "abcde"] == [20, 5, 10, 1, 0]


# ---------- when the prompts that are out will be computed
TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.001)


def sent(
    here: PendingPrefills, leg_id: str, tokens: int, now_s: float, replica_id: str = "p0"
) -> None:
    here.add(leg_id, replica_id, tokens=tokens, timing=TIMING, now_s=now_s)


def test_prompts_are_taken_to_be_computed_one_after_the_other() -> None:
    here = PendingPrefills()
    sent(here, "a", 100, 1.0)
    assert here.due_at_s["p0"] == pytest.approx(1.11)
    sent(here, "b", 201, 1.05)
    assert here.due_at_s["p0"] == pytest.approx(1.31)
    sent(here, "c", 100, 1.0, "p1")
    assert here.due_at_s["p1"] == pytest.approx(1.11)


def test_the_load_of_an_adapter_comes_before_its_prompt() -> None:
    here = PendingPrefills()
    here.add("a", "p0", tokens=100, timing=TIMING, now_s=1.0, load_s=0.5)
    assert here.due_at_s["p0"] == pytest.approx(1.61)
    here.add("b", "p1", tokens=1, timing=TIMING, now_s=1.0, load_s=0.5)
    assert here.due_at_s["p1"] == pytest.approx(1.5)
    here.remove("b", 1.2)
    assert "p1" not in here.due_at_s


def test_the_last_pull_takes_no_longer_than_the_outstanding_ones() -> None:
    here = PendingPrefills()
    sent(here, "a", 1000, 0.0)
    sent(here, "b", 101, 0.0)
    here.remove("a", 0.2)  # far sooner than predicted
    assert here.due_at_s["p0"] == pytest.approx(0.3)
    here.remove("b", 0.3)
    assert "p0" not in here.due_at_s


def test_one_that_comes_late_begins_when_it_is_sent() -> None:
    here = PendingPrefills()
    sent(here, "a", 100, 0.0)
    sent(here, "b", 101, 5.0)
    assert here.due_at_s["p0"] == pytest.approx(5.1)


def test_a_single_token_is_not_delayed_and_unknown_legs_are_ignored() -> None:
    here = PendingPrefills()
    sent(here, "a", 1, 0.0)
    here.remove("a", 0.0)
    here.remove("b", 0.0)
    assert not here.due_at_s
    here.check_integrity(frozenset())


@given(st.lists(st.tuples(st.booleans(), st.integers(2, 500), st.floats(0.0, 0.3)), max_size=40))
def test_nothing_is_out_when_all_came_back_and_no_time_is_in_the_past_when_told(
    story: list[tuple[bool, int, float]],
) -> None:
    here, now_s = PendingPrefills(), 0.0
    out: list[str] = []
    for number, (comes, tokens, gap_s) in enumerate(story):
        now_s += gap_s
        if comes or not out:
            out.append(f"leg{number}")
            sent(here, out[-1], tokens, now_s)
            assert here.due_at_s["p0"] > now_s
        else:
            here.remove(out.pop(0), now_s)
        here.check_integrity(frozenset(out))
    for leg_id in out:
        here.remove(leg_id, now_s)
    assert not here.due_at_s


# ---------- what a cached token is worth
def test_nothing_is_worth_anything_before_the_first_prompt() -> None:
    assert (PrefixReuse().hit_fraction, PrefixReuse().reuses_per_token) == (0.0, 0.0)


def test_two_thirds_cached_is_two_uses_for_each_token_computed() -> None:
    reuse = PrefixReuse()
    for _ in range(10):
        reuse.observe(200, 300)
    assert reuse.hit_fraction == pytest.approx(2 / 3)
    assert reuse.reuses_per_token == pytest.approx(2)


def test_old_measurements_are_forgotten() -> None:
    reuse = PrefixReuse()
    for _ in range(1000):
        reuse.observe(10_000, 10_000)
    for _ in range(1000):
        reuse.observe(0, 10_000)
    assert reuse.hit_fraction < 0.01


def test_impossible_values_are_ignored() -> None:
    reuse = PrefixReuse()
    reuse.observe(1, 2)
    for cached, prompt in ((3, 2), (-1, 2)):
        reuse.observe(cached, prompt)
    assert reuse.hit_fraction == 0.5


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=30))
def test_the_worth_is_always_bounded(prompts: list[tuple[int, int]]) -> None:
    reuse = PrefixReuse()
    for cached, prompt in prompts:
        reuse.observe(cached, prompt)
        assert 0 <= reuse.reuses_per_token <= 4
        assert 0 <= reuse.hit_fraction <= 1
