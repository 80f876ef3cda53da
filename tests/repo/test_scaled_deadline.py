"""Deadlines of tests count by what a machine gets done, and are not without an end."""

from __future__ import annotations

from tests.fakes.scaled_deadline import _ITERATIONS_S, ScaledDeadline, loop_s, slowdown


class Machine:
    """Time, and how long the loop takes on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.loop_s = _ITERATIONS_S

    def deadline(self, limit_s: float) -> ScaledDeadline:
        return ScaledDeadline(limit_s, clock=lambda: self.now_s, loop=lambda: self.loop_s)


def test_alone_on_a_machine_it_is_a_plain_limit() -> None:
    machine = Machine()
    deadline = machine.deadline(10)
    machine.now_s = 9.9
    assert not deadline.is_expired()
    machine.now_s = 10.1
    assert deadline.is_expired()


def test_a_faster_machine_has_no_less_time() -> None:
    assert slowdown(lambda: _ITERATIONS_S / 10) == 1


def test_while_a_machine_is_busy_its_time_counts_less_and_ends_all_the_same() -> None:
    machine = Machine()
    deadline = machine.deadline(10)
    machine.now_s, machine.loop_s = 20, 4 * _ITERATIONS_S
    assert not deadline.is_expired(), "a quarter of 20 s"
    machine.loop_s, machine.now_s = _ITERATIONS_S, 24
    assert not deadline.is_expired()
    machine.now_s = 26
    assert deadline.is_expired()


def test_the_loop_takes_time() -> None:
    assert loop_s() > 0
    assert slowdown() >= 1
