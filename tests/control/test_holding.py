"""Bands, turns and how long they take."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.queue.admission_controller import WaitQueue
from baton.control.state.admission_terms import PriorityBand
from baton.policy.admission.fair_queue import QueuedRequest

HIGH, LOW = PriorityBand(1, is_attainable=True), PriorityBand(0, is_attainable=True)
_IDS = count()


def one(work: float = 1.0, *, flow: str = "a", name: str = "", by_s: float = 1e9) -> QueuedRequest:
    return QueuedRequest(name or f"r{next(_IDS)}", flow, 1.0, work, by_s)


def let_in(here: WaitQueue, request_id: str, band: PriorityBand, work: float, now_s: float) -> None:
    here.admit(band, QueuedRequest(request_id, "a", 1.0, work, 1e9), replicas=1, now_s=now_s)


def test_a_higher_band_always_comes_first() -> None:
    here = WaitQueue()
    here.add(LOW, one(name="low"), 0.0)
    here.add(PriorityBand(0, is_attainable=False), one(name="hopeless"), 0.0)
    here.add(HIGH, one(name="high"), 0.0)
    order = []
    while (head := here.head()) is not None:
        order.append(head)
        here.remove(head, 0.0)
        here.check_integrity()
    assert order == ["high", "low", "hopeless"]


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=20))
def test_who_is_first_is_of_the_highest_band(bands: list[tuple[int, bool]]) -> None:
    here, known = WaitQueue(), {}
    for band in (PriorityBand(priority, is_attainable=met) for priority, met in bands):
        waiting = one()
        here.add(band, waiting, 0.0)
        known[waiting.request_id] = band
    while (head := here.head()) is not None:
        assert known[head] == max(known.values())
        here.admit(known.pop(head), one(name=head), replicas=1, now_s=0.0)
        here.check_integrity()
    assert not known
    assert not here


def test_the_newest_of_the_lowest_band_makes_room_and_only_for_a_higher_one() -> None:
    here = WaitQueue()
    for name in ("low 1", "low 2"):
        here.add(LOW, one(name=name), 0.0)
    here.add(HIGH, one(name="high"), 0.0)
    assert here.victim(HIGH) == "low 2"
    assert here.victim(LOW) is None
    assert here.count_below(HIGH) == 2
    here.remove("low 2", 0.0)
    here.remove("low 1", 0.0)
    assert here.victim(HIGH) is None
    assert here.victim(PriorityBand(2, is_attainable=True)) == "high"
    assert WaitQueue().victim(HIGH) is None


def test_a_request_that_finds_an_empty_queue_is_first() -> None:
    here = WaitQueue()
    assert here.position(LOW, one(), replicas=1, now_s=0.0) is None
    here.add(LOW, one(), 0.0)
    assert here.position(HIGH, one(), replicas=1, now_s=0.0) is None
    assert here.position(LOW, one(), replicas=1, now_s=0.0) is not None


def test_before_anything_was_measured_each_replica_does_a_second_a_second() -> None:
    here = WaitQueue()
    for _ in range(6):
        here.add(LOW, one(0.5), 0.0)
    turn = here.position(LOW, one(), replicas=3, now_s=0.0)
    assert turn is not None
    assert turn.wait_s == pytest.approx(1.0)
    assert here.drain_s(replicas=3) == pytest.approx(1.0)


def test_turns_are_predicted_by_what_has_left_while_somebody_waited() -> None:
    here = WaitQueue()
    for number in range(400):
        here.add(LOW, one(0.1, name=f"n{number}"), 0.0)
    for number in range(200):  # a tenth of a second of work each 50 ms: two seconds a second
        let_in(here, f"n{number}", LOW, 0.1, 0.05 * (number + 1))
    turn = here.position(LOW, one(), replicas=1, now_s=10.0)
    assert turn is not None
    assert turn.wait_s == pytest.approx(20.0 / 2.0, rel=0.1)


def test_what_goes_straight_to_the_fleet_says_nothing_of_how_fast_turns_come() -> None:
    here = WaitQueue()
    for number in range(500):
        here.admit(LOW, one(1.0), replicas=1, now_s=number / 100)
    here.add(LOW, one(3.0), 5.0)
    assert here.drain_s(replicas=1) == pytest.approx(3.0)


def test_time_in_which_nobody_waits_says_nothing_of_how_fast_turns_come() -> None:
    here = WaitQueue()
    for number in range(100):
        here.add(LOW, one(0.2, name=f"n{number}"), 0.0)
    for number in range(100):
        let_in(here, f"n{number}", LOW, 0.2, 0.1 * (number + 1))
    here.add(LOW, one(1.0), 1000.0)
    turn = here.position(LOW, one(), replicas=1, now_s=1000.0)
    assert turn is not None
    assert turn.wait_s == pytest.approx(1.0 / 2.0, rel=0.1)


def test_twice_the_replicas_are_taken_to_be_twice_as_fast() -> None:
    here = WaitQueue()
    here.add(LOW, one(6.0), 0.0)
    turns = [here.position(LOW, one(), replicas=n, now_s=0.0) for n in (1, 2)]
    assert [turn.wait_s for turn in turns if turn] == pytest.approx([6.0, 3.0])


def test_what_higher_bands_bring_meanwhile_is_taken_off() -> None:
    alone, beside = WaitQueue(), WaitQueue()
    for here in (alone, beside):
        for number in range(200):
            here.add(LOW, one(0.05, name=f"n{number}"), 0.0)
    for number in range(100):
        at_s = 0.1 * (number + 1)
        let_in(alone, f"n{number}", LOW, 0.1, at_s)
        let_in(beside, f"n{number}", LOW, 0.05, at_s)
        beside.admit(HIGH, one(0.05), replicas=1, now_s=at_s)
    turns = [here.position(LOW, one(), replicas=1, now_s=10.0) for here in (alone, beside)]
    assert [turn.wait_s for turn in turns if turn] == pytest.approx([5.0, 10.0], rel=0.15)


def test_all_of_a_higher_band_is_ahead_and_nothing_of_a_lower_one() -> None:
    here = WaitQueue()
    here.add(HIGH, one(2.0), 0.0)
    here.add(LOW, one(4.0), 0.0)
    own = PriorityBand(0, is_attainable=False)
    here.add(own, one(8.0), 0.0)
    middle = here.position(LOW, one(flow="b"), replicas=1, now_s=0.0)
    last = here.position(own, one(), replicas=1, now_s=0.0)
    assert middle is not None
    assert last is not None
    # A newcomer of another flow of its band shares with who waits there: nothing is before it.
    assert middle.wait_s * here._service_rate(LOW, replicas=1, now_s=0.0) == pytest.approx(2.0)
    assert last.wait_s * here._service_rate(own, replicas=1, now_s=0.0) == pytest.approx(14.0)


def test_those_who_are_not_here_can_be_withdrawn_without_harm() -> None:
    here = WaitQueue()
    here.remove("nobody", 1.0)
    here.check_integrity()
    assert len(here) == 0
    assert "nobody" not in here
    assert list(here) == []


def test_turns_are_taken_to_last_longer_once_some_waited_in_vain_for_streams_to_end() -> None:
    here = WaitQueue()
    for name in ("first", "second"):
        here.add(LOW, one(name=name), 0.0)

    def after_s(band: PriorityBand) -> float:
        turn = here.position(band, one(), replicas=1, now_s=0.0)
        assert turn is not None
        return turn.wait_s

    before_s = after_s(LOW)
    here.record_timeout("second")
    assert after_s(LOW) == before_s, "it was prompts that they waited for"
    here.head_blocked_on_decode = True
    here.record_timeout("second")
    here.record_timeout("nobody")
    stretched_s = after_s(LOW)
    assert stretched_s == pytest.approx(1.1 * before_s)
    for _ in range(100):
        here.record_timeout("second")
    assert after_s(LOW) == pytest.approx(2.5 * before_s)


def test_a_queue_timeout_raises_the_misprediction_rate_of_its_band_and_turns_lower_it() -> None:
    here = WaitQueue()
    assert here.misprediction_rate(LOW) == 0.0
    here.add(LOW, one(name="first"), 0.0)
    here.record_timeout("nobody")
    assert here.misprediction_rate(LOW) == 0.0
    here.record_timeout("first")
    assert here.misprediction_rate(LOW) == 1.0
    assert here.misprediction_rate(HIGH) == 0.0
    let_in(here, "first", LOW, 1.0, 0.0)
    assert here.misprediction_rate(LOW) == pytest.approx(0.998)
    for number in range(600):
        here.add(LOW, one(name=f"r{number}"), 0.0)
        let_in(here, f"r{number}", LOW, 1.0, 0.0)
    assert here.misprediction_rate(LOW) == 0.0


def test_each_one_that_had_its_turn_makes_predictions_shorter_again() -> None:
    after_s = []
    for disappointed in (0, 1):
        here = WaitQueue()
        here.head_blocked_on_decode = True
        for name in ("first", "second"):
            here.add(LOW, one(name=name), 0.0)
        for _ in range(disappointed):
            here.record_timeout("first")
        let_in(here, "first", LOW, 1.0, 0.0)
        turn = here.position(LOW, one(), replicas=1, now_s=0.0)
        assert turn is not None
        after_s.append(turn.wait_s)
    assert after_s[1] == pytest.approx(1.1 * 0.9998 * after_s[0], rel=1e-6)
