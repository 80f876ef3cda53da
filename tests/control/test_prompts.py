"""When the prompts that are out will be computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.fleet.fleet_model import PendingPrefills
from tests.fakes.timings import LinearTiming

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


def test_when_one_is_done_the_rest_takes_no_longer_than_what_is_out() -> None:
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


def test_a_single_token_keeps_nobody_waiting_and_unknown_legs_are_ignored() -> None:
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
