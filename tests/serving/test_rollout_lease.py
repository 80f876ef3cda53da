"""One rollout at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.domain.errors import ApplyRejected
from baton.serving.rollout.live_deployment import RolloutLease
from tests.fakes.head_store import HeadStore


class Wall:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def test_of_two_who_roll_out_one_hears_of_the_other() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    assert first.acquire() == ""
    assert second.acquire() == "a:1"
    second.release()
    assert second.acquire() == "a:1", "who does not hold it cannot drop it"
    first.release()
    assert second.acquire() == ""


def test_who_lives_keeps_it_and_who_was_killed_loses_it() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    first.acquire()
    for _ in range(40):
        wall.now_s += 10
        first.renew()
    assert second.acquire() == "a:1"
    wall.now_s += 61
    assert second.acquire() == ""
    assert first.acquire() == "b:2"


def test_it_is_renewed_now_and_then_only() -> None:
    shelf, wall = HeadStore(), Wall()
    lease = RolloutLease("a:1", shelf, now_s=wall)
    lease.renew()
    assert shelf.values == {}, "what is not held is not renewed"
    lease.acquire()
    (kept,) = shelf.values.values()
    wall.now_s += 4
    lease.renew()
    assert list(shelf.values.values()) == [kept]


def test_who_slept_past_its_lease_neither_renews_nor_drops_another_s() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second, third = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2", "c:3"))
    first.acquire()
    wall.now_s += 61
    assert second.acquire() == ""
    for _ in range(2):
        with pytest.raises(ApplyRejected, match="not heard of for 61 s, and b:2 has begun"):
            first.renew()
    first.release()
    assert third.acquire() == "b:2"


def test_who_slept_while_another_came_and_went_has_lost_it_too() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    first.acquire()
    wall.now_s += 61
    second.acquire()
    second.release()
    with pytest.raises(ApplyRejected, match="another command has begun"):
        first.renew()
    assert shelf.values == {}


def test_two_of_one_name_are_told_apart() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease("pod, process 1", shelf, now_s=wall) for _ in range(2))
    first.acquire()
    wall.now_s += 61
    assert second.acquire() == ""
    with pytest.raises(ApplyRejected):
        first.renew()


def test_who_slept_and_was_missed_by_nobody_goes_on() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    first.acquire()
    wall.now_s += 61
    first.renew()
    assert second.acquire() == "a:1"


class Crowded(HeadStore):
    """Somebody else does something as soon as the next key was written."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], object] = lambda: None

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        written = super().put(key, value, overwrite=overwrite)
        if written:
            then, self.then = self.then, lambda: None
            then()
        return written


def test_of_two_who_find_the_same_old_lease_one_hears_of_it() -> None:
    shelf, wall = Crowded(), Wall()
    gone, first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("z:0", "a:1", "b:2"))
    gone.acquire()
    wall.now_s += 61

    def deleted_for_the_old_one() -> None:
        shelf.delete("lease/rollout")
        assert second.acquire() == ""

    shelf.then = deleted_for_the_old_one
    assert first.acquire() == "somebody who was quicker"
    first.release()
    wall.now_s += 6
    second.renew()
