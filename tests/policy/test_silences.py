"""Silence: who says nothing is suspected, then given up; and whoever looks late blames itself."""

from __future__ import annotations

from itertools import count
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.policy.resilience.liveness import IDLE_GRACE_S, LivenessTracker

SILENCE_S = 1.5


class Watched:
    """Two replicas, one of which is heard of four times a second."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self.silences = LivenessTracker(silence_s)
        self.silences.on_replica_joined("frozen", 0.0)
        self.silences.on_replica_joined("talks", 0.0)
        self.silences.start_checks(0.0)
        self.now_s = 0.0

    def until(self, at_s: float, *, runs: bool = True) -> None:
        """Let time pass as it does where looks come when they are due."""
        for number in count(round(self.now_s / 0.05) + 1):
            now_s = number * 0.05
            if now_s > at_s:
                return
            self.now_s = now_s
            if number % 5 == 0:
                self.silences.heartbeat("talks", now_s)
            self.silences.check(now_s, has_work=runs)

    def silent(self, now_s: float) -> list[str]:
        return list(self.silences.unresponsive(now_s))


def test_who_says_nothing_is_suspect_at_half_of_the_time_and_silent_after_all_of_it() -> None:
    watched = Watched()
    watched.until(0.7)
    assert not watched.silences.is_suspect("frozen")
    watched.until(1.0)
    assert watched.silences.is_suspect("frozen")
    assert watched.silent(1.0) == []
    watched.until(1.6)
    assert watched.silent(1.6) == ["frozen"]
    assert not watched.silences.is_suspect("talks")


def test_a_word_ends_a_silence() -> None:
    watched = Watched()
    watched.until(1.6)
    watched.silences.heartbeat("frozen", 1.6)
    assert watched.silent(1.7) == []
    assert not watched.silences.is_suspect("frozen")


def test_who_has_nothing_to_do_may_be_silent_for_longer() -> None:
    watched = Watched()
    watched.silences.set_idle("frozen", 0.0)
    watched.until(0.7 + IDLE_GRACE_S)
    watched.silences.heartbeat("talks", watched.now_s)
    assert not watched.silences.is_suspect("frozen")
    watched.until(1.1 + IDLE_GRACE_S)
    assert watched.silences.is_suspect("frozen")
    assert watched.silent(1.1 + IDLE_GRACE_S) == []
    watched.until(1.6 + IDLE_GRACE_S)
    assert watched.silent(1.6 + IDLE_GRACE_S) == ["frozen"]


def test_a_rest_is_not_cut_short_by_another_word_but_by_work() -> None:
    watched = Watched()
    watched.silences.set_idle("frozen", 0.0)
    watched.silences.heartbeat("frozen", 0.1)
    watched.until(0.7 + IDLE_GRACE_S)
    assert not watched.silences.is_suspect("frozen")
    watched = Watched()
    watched.silences.set_idle("frozen", 0.0)
    watched.silences.set_busy("frozen", 0.1)
    assert watched.silences.unresponsive_s("frozen", 0.2) == pytest.approx(0.1)
    watched.until(1.1)
    assert watched.silences.is_suspect("frozen")


def test_who_rests_has_not_been_silent() -> None:
    silences = LivenessTracker(SILENCE_S)
    silences.on_replica_joined("rests", 0.0)
    silences.set_idle("rests", 1.0)
    assert silences.unresponsive_s("rests", 1.2) == 0.0


def test_strangers_and_those_that_left_are_never_silent() -> None:
    watched = Watched()
    watched.silences.on_replica_left("frozen")
    watched.silences.heartbeat("frozen", 1.0)
    watched.silences.set_idle("frozen", 1.0)
    watched.silences.set_busy("frozen", 1.0)
    watched.until(3.0)
    assert watched.silent(3.0) == []
    assert watched.silences.unresponsive_s("stranger", 9.0) == 0.0


def test_a_look_that_comes_late_blames_nobody_for_that_time() -> None:
    """The process of whoever looks was stopped for a minute, and everybody's words wait unread."""
    watched = Watched()
    assert watched.silences.check(60.0, has_work=True)
    assert watched.silent(60.0) == []


def test_looks_go_on_while_anything_runs_and_no_longer() -> None:
    silences = LivenessTracker(SILENCE_S)
    silences.start_checks(0.0)
    at_s = silences.next_check_at_s()
    assert at_s == SILENCE_S / 6
    assert not silences.check(at_s - 0.01, has_work=True)
    assert silences.check(at_s, has_work=True)
    assert silences.next_check_at_s() == at_s + SILENCE_S / 6
    assert silences.check(2 * at_s, has_work=False)
    assert silences.next_check_at_s() is None


def test_without_a_bound_nobody_looks() -> None:
    watched = Watched(inf)
    assert watched.silences.next_check_at_s() is None
    assert not watched.silences.is_suspect("frozen")


@given(st.lists(st.floats(0.0, 0.4), min_size=1, max_size=80))
def test_whoever_talks_more_often_than_that_is_never_silent(gaps_s: list[float]) -> None:
    silences, now_s = LivenessTracker(SILENCE_S), 0.0
    silences.on_replica_joined("talks", now_s)
    silences.start_checks(now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        silences.check(now_s, has_work=True)
        assert list(silences.unresponsive(now_s)) == []
        silences.heartbeat("talks", now_s)
