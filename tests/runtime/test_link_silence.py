"""When a peer that says nothing is given up."""

from __future__ import annotations

import pytest

from baton.runtime.link.liveness import HeartbeatMonitor

LIVENESS_S = 2.0
BEAT_S = 0.25
REST_S = 1.75


def given_up_after_s(stall_s: float) -> float:
    """How long a dead peer lives on where each look is late by as much."""
    silence, now_s = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S), 0.0
    while True:
        now_s += BEAT_S + stall_s
        if silence.expired(now_s, stalled=stall_s > 0):
            return now_s


def test_a_silent_peer_is_given_up_after_its_liveness() -> None:
    assert LIVENESS_S < given_up_after_s(0.0) <= LIVENESS_S + BEAT_S


def test_whoever_says_something_is_not_given_up() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    for look in range(100):
        silence.beat(look * 1.9)
        assert not silence.expired((look + 1) * 1.9, stalled=False)


@pytest.mark.parametrize("stall_s", [0.3, 0.5, 1.0])
def test_a_dead_peer_is_given_up_where_every_look_is_late_too(stall_s: float) -> None:
    assert LIVENESS_S < given_up_after_s(stall_s) <= 1.5 * LIVENESS_S + BEAT_S + stall_s


def test_a_process_that_did_not_run_gives_its_peers_time_to_be_heard() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    assert not silence.expired(60.0, stalled=True)
    assert not silence.expired(60.9, stalled=False)
    silence.beat(60.95)
    assert not silence.expired(120.0, stalled=True), "anew, since it was heard"
    assert silence.expired(121.1, stalled=False)


def test_who_rests_may_be_silent_for_longer() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    silence.set_idle()
    assert not silence.expired(LIVENESS_S + REST_S, stalled=False)
    assert silence.expired(LIVENESS_S + REST_S + 0.1, stalled=False)


def test_another_word_does_not_end_a_rest_but_work_does() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    silence.set_idle()
    silence.beat(1.0)
    assert not silence.expired(1.0 + LIVENESS_S + REST_S, stalled=False)
    silence.set_busy(2.0)
    silence.set_busy(3.0)  # more work is no word of its
    assert not silence.expired(2.0 + LIVENESS_S, stalled=False)
    assert silence.expired(2.1 + LIVENESS_S, stalled=False)


def test_what_was_not_said_at_rest_is_no_silence() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    silence.set_idle()
    silence.set_busy(3.5)  # half of its liveness is left
    assert not silence.expired(REST_S + LIVENESS_S, stalled=False)
    assert silence.expired(REST_S + LIVENESS_S + 0.1, stalled=False)


def test_who_rests_gets_its_time_to_be_heard_too() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    silence.set_idle()
    assert not silence.expired(60.0, stalled=True)
    assert not silence.expired(60.9, stalled=True)
    assert silence.expired(61.1, stalled=True), "once in a silence"
