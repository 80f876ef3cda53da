"""What requests of each kind needed of late."""

from __future__ import annotations

import pytest

from baton.control.queue.admission_controller import Estimate, RecentEstimates


def needed(
    at_s: float = 0.0, *, alone_s: float = 0.2, queue_s: float = 0.0, work: float = 1.0
) -> Estimate:
    return Estimate(at_s, alone_s, queue_s, work)


def test_the_lightest_stands_for_its_kind() -> None:
    here = RecentEstimates()
    for alone_s in (0.4, 0.1, 0.3):
        here.note("acme", "chat", needed(alone_s=alone_s))
    here.note("acme", "batch", needed(alone_s=0.01))
    found = here.lightest("acme", "chat", 0.0)
    assert found is not None
    assert found.unqueued_ttft_s == 0.1


def test_a_queue_moves_on_and_is_the_last_one_seen() -> None:
    here = RecentEstimates()
    here.note("acme", "chat", needed(0.0, alone_s=0.1, queue_s=9.0))
    here.note("acme", "chat", needed(0.1, alone_s=0.5, queue_s=0.3))
    found = here.lightest("acme", "chat", 0.2)
    assert found is not None
    assert found.unqueued_ttft_s == 0.1
    assert found.engine_queue_s == pytest.approx(0.2)
    gone = here.lightest("acme", "chat", 0.6)
    assert gone is not None
    assert gone.engine_queue_s == 0.0


def test_what_was_a_second_ago_is_forgotten() -> None:
    here = RecentEstimates()
    here.note("acme", "chat", needed(0.0, alone_s=0.1))
    here.note("acme", "chat", needed(0.5, alone_s=0.4))
    found = here.lightest("acme", "chat", 1.1)
    assert found is not None
    assert found.unqueued_ttft_s == 0.4
    assert here.recent_classes(1.1) == [("acme", "chat")]
    assert here.lightest("acme", "chat", 1.6) is None
    assert here.recent_classes(1.6) == []


def test_nobody_who_came_is_known_by_a_name_that_did_not() -> None:
    assert RecentEstimates().lightest("acme", "chat", 0.0) is None


def test_kinds_and_what_is_kept_of_each_are_bounded() -> None:
    here = RecentEstimates()
    for number in range(3000):
        here.note(f"t{number}", "chat", needed(float(number)))
        here.note("t0", "batch", needed(float(number)))
    assert len(here._by_class) <= 1024
    assert all(len(kind) <= 16 for kind in here._by_class.values())
