"""Ports that two replicas of a node never share."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.domain.errors import EngineStartFailed
from baton.runtime.process.sockets import create_bound_socket
from baton.serving.replica.port_reservation import QUARANTINE_S, PortReservation
from tests.fakes.machine import require_ipv6

HOST = "127.0.0.1"
BASE = 27_000
"""Below those of outgoing connections, which come and go."""


def test_two_replicas_get_different_ports_though_nobody_listens_yet(tmp_path: Path) -> None:
    one, two = PortReservation(tmp_path), PortReservation(tmp_path)
    assert one.reserve(HOST, BASE, 1) != two.reserve(HOST, BASE, 1)


def test_ports_in_a_row_do_not_overlap(tmp_path: Path) -> None:
    one, two = PortReservation(tmp_path), PortReservation(tmp_path)
    first, second = one.reserve(HOST, BASE, 4), two.reserve(HOST, BASE, 4)
    assert set(range(first, first + 4)).isdisjoint(range(second, second + 4))


def test_a_port_that_somebody_listens_on_is_passed_over(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert PortReservation(tmp_path).reserve(HOST, taken, 1) != taken


def test_ports_are_found_at_an_address_of_ipv6(tmp_path: Path) -> None:
    require_ipv6()
    with create_bound_socket("::1", 0) as listener:
        listener.listen()
        taken = listener.getsockname()[1]
        assert PortReservation(tmp_path).reserve("::1", taken, 1) != taken


class WallClock:
    """The time of day, set by hand."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def all_of_five(folder: Path, clock: WallClock) -> list[int]:
    """Every port that can be had among the last five that there are; nobody gives them back."""
    found: list[int] = []
    while True:
        try:
            found.append(PortReservation(folder, clock=clock).reserve(HOST, 65_531, 1))
        except EngineStartFailed:
            return sorted(found)


def test_a_restarted_side_channel_takes_a_port_that_its_peers_do_not_remember(
    tmp_path: Path,
) -> None:
    clock = WallClock()
    taken = []
    for _ in range(3):
        life = PortReservation(tmp_path, clock=clock)
        first = life.reserve(HOST, BASE, 2)
        taken += [first, first + 1]
        life.release()
    assert len(set(taken)) == 6


@pytest.mark.parametrize(("after_s", "had"), [(QUARANTINE_S - 1.0, 4), (QUARANTINE_S, 5)])
def test_a_released_port_rests_and_can_then_be_had_again(
    tmp_path: Path, after_s: float, had: int
) -> None:
    clock = WallClock()
    one = PortReservation(tmp_path, clock=clock)
    one.reserve(HOST, 65_531, 1)
    clock.now_s += 10 * QUARANTINE_S
    one.release()
    clock.now_s += after_s
    assert len(all_of_five(tmp_path, clock)) == had


def test_the_port_of_a_killed_process_rests_from_when_it_is_found_free(tmp_path: Path) -> None:
    program = (
        "import os, pathlib; from baton.serving.replica.port_reservation import PortReservation;"
        f"print(PortReservation(pathlib.Path({str(tmp_path)!r})).reserve({HOST!r}, 65_531, 1),"
        "flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=False
    )
    killed = int(done.stdout)
    clock = WallClock()
    others = [PortReservation(tmp_path, clock=clock) for _ in range(4)]
    assert killed not in {other.reserve(HOST, 65_531, 1) for other in others}
    with pytest.raises(EngineStartFailed, match="rests"):
        PortReservation(tmp_path, clock=clock).reserve(HOST, 65_531, 1)
    clock.now_s += QUARANTINE_S
    assert PortReservation(tmp_path, clock=clock).reserve(HOST, 65_531, 1) == killed


def test_a_clock_that_is_set_back_makes_no_port_rest_for_ever(tmp_path: Path) -> None:
    clock = WallClock()
    one = PortReservation(tmp_path, clock=clock)
    port = one.reserve(HOST, 65_531, 1)
    one.release()
    clock.now_s -= 365 * 86_400.0
    assert port not in all_of_five(tmp_path, clock)
    clock.now_s += QUARANTINE_S
    assert all_of_five(tmp_path, clock) == [port]


def test_two_lives_differ_though_the_first_left_no_file(tmp_path: Path) -> None:
    clock = WallClock()
    before = PortReservation(tmp_path / "one-container", clock=clock).reserve(HOST, BASE, 8)
    clock.now_s += 60.0  # so many rows on: whoever else has a port of the first is passed over
    after = PortReservation(tmp_path / "the-next", clock=clock).reserve(HOST, BASE, 8)
    assert before != after


def test_no_port_left_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="port_base"):
        PortReservation(tmp_path).reserve(HOST, 65_530, 100)
