"""Ports that two replicas of a node never share."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.domain.errors import EngineStartFailed
from baton.runtime.sockets import bound_socket
from baton.serving.ports import PortReservation
from tests.fakes.machine import need_ipv6

HOST = "127.0.0.1"
BASE = 41_000


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
    need_ipv6()
    with bound_socket("::1", 0) as listener:
        listener.listen()
        taken = listener.getsockname()[1]
        assert PortReservation(tmp_path).reserve("::1", taken, 1) != taken


def test_released_ports_can_be_had_again(tmp_path: Path) -> None:
    one = PortReservation(tmp_path)
    first = one.reserve(HOST, BASE, 2)
    one.release()
    assert PortReservation(tmp_path).reserve(HOST, BASE, 2) == first


def test_a_killed_process_keeps_no_port(tmp_path: Path) -> None:
    program = (
        "import os, pathlib; from baton.serving.ports import PortReservation;"
        f"print(PortReservation(pathlib.Path({str(tmp_path)!r})).reserve({HOST!r}, {BASE}, 1),"
        "flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=False
    )
    assert PortReservation(tmp_path).reserve(HOST, BASE, 1) == int(done.stdout)


def test_no_port_left_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="port_base"):
        PortReservation(tmp_path).reserve(HOST, 65_530, 100)
