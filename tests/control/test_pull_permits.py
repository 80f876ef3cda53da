from __future__ import annotations

from baton.control.request.pull_permits import PullPermits


def test_no_more_pulls_begin_than_the_limit_until_one_ends() -> None:
    permits = PullPermits(limit=2, max_pull_s=10.0)
    for leg_id in "ab":
        assert permits.can_begin(0.0)
        permits.begin(leg_id, 0.0)
    assert not permits.can_begin(1.0)
    permits.end("a")
    assert permits.can_begin(1.0)


def test_a_pull_that_never_ends_stops_to_count_after_a_while() -> None:
    permits = PullPermits(limit=1, max_pull_s=10.0)
    permits.begin("a", 5.0)
    assert permits.next_at_s == 15.0
    assert not permits.can_begin(14.9)
    assert permits.can_begin(15.0)
    permits.begin("b", 15.0)
    permits.end("a")  # long forgotten
    assert not permits.can_begin(16.0)


def test_without_a_limit_none_waits_and_nothing_is_remembered() -> None:
    permits = PullPermits(limit=None, max_pull_s=10.0)
    for number in range(100):
        permits.begin(str(number), 0.0)
    assert permits.can_begin(0.0)
    assert permits.next_at_s is None
