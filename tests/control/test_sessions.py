"""The last replica of each session, within a bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.control.fleet.fleet_model import Sessions

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
