"""Faults happen, and are undone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos import faults
from tests.chaos.faults import NotPossibleError

_SLEEP = "import time; print('up', flush=True); time.sleep(60)"
_FREEZER = """
import sys
from tests.chaos.faults import stopped_processes
with stopped_processes(int(sys.argv[1])):
    print("frozen", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process that does nothing."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SLEEP], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate(timeout=10)


def until(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, f"not so within {within_s} s"


def test_a_frozen_process_stands_still_and_goes_on(sleeper: subprocess.Popen[str]) -> None:
    with faults.stopped_processes(sleeper.pid):
        until(lambda: faults.is_stopped(sleeper.pid))
    until(lambda: not faults.is_stopped(sleeper.pid))


def test_an_error_while_a_process_is_frozen_lets_it_go_on(sleeper: subprocess.Popen[str]) -> None:
    with pytest.raises(ZeroDivisionError), faults.stopped_processes(sleeper.pid):
        raise ZeroDivisionError
    until(lambda: not faults.is_stopped(sleeper.pid))


def test_a_frozen_process_continues_when_its_freezer_is_killed(
    sleeper: subprocess.Popen[str],
) -> None:
    root = str(Path(__file__).parents[2])
    freezer = subprocess.Popen(
        [sys.executable, "-c", _FREEZER, str(sleeper.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert freezer.stdout is not None
    assert freezer.stdout.readline() == "frozen\n"
    until(lambda: faults.is_stopped(sleeper.pid))
    freezer.kill()
    freezer.communicate(timeout=10)
    until(lambda: not faults.is_stopped(sleeper.pid))


def test_one_that_is_killed_while_it_is_frozen_ends(sleeper: subprocess.Popen[str]) -> None:
    with faults.stopped_processes(sleeper.pid):
        faults.kill(sleeper.pid)
        assert sleeper.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize(
    "pid", [0, 1, os.getpid(), os.getppid()], ids=["all", "init", "itself", "its parent"]
)
def test_the_process_of_the_test_is_neither_killed_nor_frozen(pid: int) -> None:
    with pytest.raises(ValueError, match="no part of what is tested"):
        faults.kill(pid)
    with (
        pytest.raises(ValueError, match="no part of what is tested"),
        faults.stopped_processes(pid),
    ):
        pass


def test_a_family_is_a_process_and_all_below_it(sleeper: subprocess.Popen[str]) -> None:
    assert faults.process_tree(sleeper.pid) == [sleeper.pid]
    assert sleeper.pid in faults.process_tree(os.getpid())


def test_a_tiny_disk_fills_up_and_is_gone_afterwards(tmp_path: Path) -> None:
    try:
        with faults.tiny_disk(tmp_path / "disk", 65_536) as disk:
            assert not faults.is_full(disk)
            assert 0 < faults.fill(disk) <= 65_536
            assert faults.is_full(disk)
    except NotPossibleError as reason:
        pytest.skip(str(reason))
    assert not list((tmp_path / "disk").iterdir())


def test_a_tool_that_is_missing_or_fails_is_named() -> None:
    with pytest.raises(NotPossibleError, match="no 'no-such-tool'"):
        faults._run("no-such-tool")
    with pytest.raises(NotPossibleError, match=r"ls /no/such/folder: .*No such file"):
        faults._run("ls", "/no/such/folder")


def test_a_lossy_network_loses_packets_and_leaves_nothing_behind() -> None:
    before = set(psutil.net_if_addrs())
    try:
        with faults.lossy_network(0.5) as network:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                for _ in range(100):
                    sender.sendto(b"anybody?", (network.inner_address, 9))
            assert 10 < network.heal() < 90
    except NotPossibleError as reason:
        pytest.skip(str(reason))
    assert set(psutil.net_if_addrs()) == before
