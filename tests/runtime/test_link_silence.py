"""When a peer that says nothing is given up."""

from __future__ import annotations

import pytest

from baton.runtime.link.liveness import Silence

LIVENESS_S = 2.0
BEAT_S = 0.25
REST_S = 1.75


def given_up_after_s(stall_s: float) -> float:
    """How long a dead peer lives on where each look is late by as much."""
    silence, now_s = Silence(LIVENESS_S, 0.0, rest_s=REST_S), 0.0
    while True:
        now_s += BEAT_S + stall_s
        if silence.too_long(now_s, stalled=stall_s > 0):
            return now_s


def test_a_silent_peer_is_given_up_after_its_liveness() -> None:
    assert LIVENESS_S < given_up_after_s(0.0) <= LIVENESS_S + BEAT_S


def test_whoever_says_something_is_not_given_up() -> None:
    silence = Silence(LIVENESS_S, 0.0, rest_s=REST_S)
    for look in range(100):
        silence.broken(look * 1.9)
        assert not silence.too_long((look + 1) * 1.9, stalled=False)


@pytest.mark.parametrize("stall_s", [0.3, 0.5, 1.0])
def test_a_dead_peer_is_given_up_where_every_look_is_late_too(stall_s: float) -> None:
    assert LIVENESS_S < given_up_after_s(stall_s) <= 1.5 * LIVENESS_S + BEAT_S + stall_s


def test_a_process_that_did_not_run_gives_its_peers_time_to_be_heard() -> None:
    silence = Silence(LIVENESS_S, 0.0, rest_s=REST_S)
    assert not silence.too_long(60.0, stalled=True)
    assert not silence.too_long(60.9, stalled=False)
    silence.broken(60.95)
    assert not silence.too_long(120.0, stalled=True), "anew, since it was heard"
    assert silence.too_long(121.1, stalled=False)


def test_who_rests_may_be_silent_for_longer() -> None:
    silence = Silence(LIVENESS_S, 0.0, rest_s=REST_S)
    silence.rests()
    assert not silence.too_long(LIVENESS_S + REST_S, stalled=False)
    assert silence.too_long(LIVENESS_S + REST_S + 0.1, stalled=False)


def test_another_word_does_not_end_a_rest_but_work_does() -> None:
    silence = Silence(LIVENESS_S, 0.0, rest_s=REST_S)
    silence.rests()
    silence.broken(1.0)
    assert not silence.too_long(1.0 + LIVENESS_S + REST_S, stalled=False)
    silence.works(2.0)
    silence.works(3.0)  # more work is no word of its
    assert not silence.too_long(2.0 + LIVENESS_S, stalled=False)
    assert silence.too_long(2.1 + LIVENESS_S, stalled=False)


def test_what_was_not_said_at_rest_is_no_silence() -> None:
    silence = Silence(LIVENESS_S, 0.0, rest_s=REST_S)
    silence.rests()
    silence.works(3.5)  # half of its liveness is left
    assert not silence.too_long(REST_S + LIVENESS_S, stalled=False)
    assert silence.too_long(REST_S + LIVENESS_S + 0.1, stalled=False)


def test_who_rests_gets_its_time_to_be_heard_too() -> None:
    silence = Silence(LIVENESS_S, 0.0, rest_s=REST_S)
    silence.rests()
    assert not silence.too_long(60.0, stalled=True)
    assert not silence.too_long(60.9, stalled=True)
    assert silence.too_long(61.1, stalled=True), "once in a silence"
