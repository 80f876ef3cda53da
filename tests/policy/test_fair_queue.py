"""Start-time fair queueing against a slow fluid twin, and what it owes to whom."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.policy.admission.fair_queue import FairQueue, QueuedRequest

_IDS = count()


def one(
    flow: str = "a", work: float = 1.0, *, weight: float = 1.0, by_s: float = 0.0, name: str = ""
) -> QueuedRequest:
    return QueuedRequest(name or f"r{next(_IDS)}", flow, weight, work, by_s)


def served(queue: FairQueue, count_: int = 10_000) -> list[QueuedRequest]:
    """Serve so many, or all."""
    found: list[QueuedRequest] = []
    while len(found) < count_ and (head := queue.head()) is not None:
        queue.serve(head.request_id)
        queue.check_integrity()
        found.append(head)
    return found


def queue_of(*waiting: QueuedRequest) -> FairQueue:
    queue = FairQueue()
    for each in waiting:
        queue.push(each)
        queue.check_integrity()
    return queue


WORKS = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=30)
WEIGHTS = st.floats(0.1, 10.0)


@given(st.lists(st.tuples(WEIGHTS, WORKS), min_size=2, max_size=4))
def test_flows_that_wait_all_the_time_get_work_by_weight_to_within_one_request_each(
    flows: list[tuple[float, list[float]]],
) -> None:
    queue = queue_of(
        *[
            one(str(number), work, weight=weight)
            for number, (weight, works) in enumerate(flows)
            for work in works
        ]
    )
    done = dict.fromkeys((str(number) for number in range(len(flows))), 0.0)
    waits = {str(number): len(works) for number, (_, works) in enumerate(flows)}
    largest = {str(n): max(works) / weight for n, (weight, works) in enumerate(flows)}
    while all(waits.values()):
        (each,) = served(queue, 1)
        waits[each.flow] -= 1
        done[each.flow] += each.work_s / each.weight
        for first in done:
            for second in done:
                if waits[first] and waits[second]:
                    gap = abs(done[first] - done[second])
                    assert gap <= largest[first] + largest[second] + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 3.0)), max_size=40))
def test_every_queued_request_is_served_exactly_once(asked: list[tuple[str, float]]) -> None:
    waiting = [one(flow, work) for flow, work in asked]
    found = served(queue_of(*waiting))
    assert sorted(each.request_id for each in found) == sorted(w.request_id for w in waiting)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.05, 1.0)), min_size=1, max_size=40),
    st.floats(0.05, 1.0),
)
def test_work_ahead_is_the_work_served_before_a_request_to_within_one_per_flow(
    asked: list[tuple[str, float]], own: float
) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    queue = queue_of(*[one(flow, work, weight=weights[flow]) for flow, work in asked])
    served(queue, len(asked) // 3)  # lines are not all at their beginnings
    newcomer = one("b", own, weight=2.0, by_s=1.0)
    predicted = queue.work_ahead_s("b", weight=2.0, begin_by_s=1.0)
    queue.push(newcomer)
    before = 0.0
    while (head := queue.head()) is not None and head.request_id != newcomer.request_id:
        before += head.work_s
        queue.serve(head.request_id)
    # The fluid twin serves shares of requests; of each other flow one may be under way.
    assert abs(before - predicted) <= 3 * 1.0 + 1e-9


def test_an_idle_flow_waits_only_for_its_share_of_the_others() -> None:
    queue = queue_of(*[one("a", 1.0) for _ in range(10)])
    assert queue.work_ahead_s("b", weight=1.0, begin_by_s=0.0) == 0.0
    assert queue.work_ahead_s("a", weight=1.0, begin_by_s=0.0) == 10.0
    queue.push(one("b", 4.0))
    assert queue.work_ahead_s("b", weight=1.0, begin_by_s=0.0) == 4.0 + 4.0


@pytest.mark.parametrize(
    ("before", "served_before"),
    [(["a"] * 20, 10), (["b", *["a"] * 30], 21)],
    ids=["from the beginning", "for a while"],
)
def test_one_that_was_idle_has_saved_up_nothing(before: list[str], served_before: int) -> None:
    queue = queue_of(*map(one, before))
    served(queue, served_before)
    for _ in range(10):
        queue.push(one("b"))
    first_ten = [each.flow for each in served(queue, 10)]
    assert abs(first_ten.count("a") - first_ten.count("b")) <= 1


def test_one_that_was_served_at_once_is_charged_for_it() -> None:
    queue = queue_of(one("a"))
    served(queue)
    for _ in range(5):
        queue.serve_immediately(one("a", 1.0))
    for _ in range(3):
        queue.push(one("a"))
        queue.push(one("b"))
    # a's line begins where its last one ended, and that is at most one request behind b's.
    assert [each.flow for each in served(queue, 3)] == ["b", "a", "b"]


def test_a_flow_alone_has_everything() -> None:
    queue = queue_of(*[one("a", weight=0.1) for _ in range(5)])
    assert len(served(queue)) == 5


def test_inside_a_flow_the_earliest_deadline_comes_first() -> None:
    queue = queue_of(one(by_s=3.0, name="late"), one(by_s=1.0, name="soon"), one(by_s=2.0))
    assert [each.start_deadline_s for each in served(queue)] == [1.0, 2.0, 3.0]


def test_among_equals_the_one_that_came_first_comes_first() -> None:
    names = [f"n{number}" for number in range(12)]
    assert [w.request_id for w in served(queue_of(*[one(name=n) for n in names]))] == names


def test_an_urgent_request_goes_first_while_it_makes_no_other_late() -> None:
    queue = queue_of(one(work=1.0, by_s=10.0), one(work=1.0, by_s=11.0))
    hurried = one(work=1.0, by_s=0.5)
    assert queue.assign_position(hurried, now_s=0.0, rate=1.0) == hurried
    # At a tenth of the rate the first of them would begin at 10 s, and the second at 20 s.
    assert queue.assign_position(hurried, now_s=0.0, rate=0.1).start_deadline_s == 11.0


def test_a_flow_has_only_its_share_of_the_rate_in_the_check_for_lateness() -> None:
    queue = queue_of(one("a", 1.0, by_s=1.5), one("b", 1.0, weight=3.0, by_s=9.0))
    hurried = one("a", 1.0, by_s=0.5)
    assert queue.assign_position(hurried, now_s=0.0, rate=1.0).start_deadline_s == 1.5
    # All of it has a quarter of eight seconds a second: half a second, and twice that is in time.
    assert queue.assign_position(hurried, now_s=0.0, rate=8.0) == hurried
    assert queue.assign_position(hurried, now_s=0.0, rate=4.0).start_deadline_s == 1.5


def test_one_that_leaves_takes_its_work_along() -> None:
    queue = queue_of(one(work=2.0, name="x"), one(work=3.0, name="y"))
    gone = queue.remove("x")
    assert gone is not None
    assert gone.work_s == 2.0
    assert queue.remove("x") is None
    assert queue.queued_work_s == 3.0
    assert [each.request_id for each in served(queue)] == ["y"]
    assert queue.queued_work_s == 0.0


def test_the_newest_is_the_last_arrival_in_the_queue() -> None:
    queue = queue_of(one(name="x"), one(name="y", by_s=-1.0), one(name="z"))
    assert queue.newest_id() == "z"
    queue.remove("z")
    assert queue.newest_id() == "y"
    assert FairQueue().newest_id() is None


def test_idle_flows_are_forgotten_and_flows_in_debt_are_not() -> None:
    queue = FairQueue()
    for number in range(3000):
        queue.serve_immediately(one(f"flow {number}", 1e-9))
        queue.serve_immediately(one("busy", 1.0))
    assert len(queue._flows) < 2100
    queue.push(one("busy"))
    queue.push(one("new"))
    assert [each.flow for each in served(queue)] == ["new", "busy"]
