"""One rollout at a time."""

from __future__ import annotations

from baton.serving.rollout_lease import RolloutLease
from tests.fakes.head_store import HeadStore


class Wall:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def test_of_two_who_roll_out_one_hears_of_the_other() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    assert first.take() == ""
    assert second.take() == "a:1"
    second.drop()
    assert second.take() == "a:1", "who does not hold it cannot drop it"
    first.drop()
    assert second.take() == ""


def test_who_lives_keeps_it_and_who_was_killed_loses_it() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    first.take()
    for _ in range(40):
        wall.now_s += 10
        first.renew()
    assert second.take() == "a:1"
    wall.now_s += 61
    assert second.take() == ""
    assert first.take() == "b:2"


def test_it_is_renewed_now_and_then_only() -> None:
    shelf, wall = HeadStore(), Wall()
    lease = RolloutLease("a:1", shelf, now_s=wall)
    lease.renew()
    assert shelf.kept == {}, "what is not held is not renewed"
    lease.take()
    (kept,) = shelf.kept.values()
    wall.now_s += 4
    lease.renew()
    assert list(shelf.kept.values()) == [kept]
