"""Programs that a process runs for itself, and that do not outlive it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from baton.runtime.process.owned_process import OwnedProcess, Program

_FOREVER = "import time; print('up', flush=True); time.sleep(600)"
_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + _FOREVER
_OWNER = """
import asyncio, sys
from pathlib import Path
from baton.runtime.process.owned_process import OwnedProcess, Program

async def main():
    program = Program(name="p", argv=[sys.executable, "-c", sys.argv[2]], log=Path(sys.argv[1]))
    process = OwnedProcess(program, on_exit=lambda code: None)
    process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def run(tmp_path: Path, source: str, *arguments: str, fds: tuple[int, ...] = ()) -> Program:
    argv = [sys.executable, "-c", source, *arguments]
    return Program(name="test", argv=argv, log=tmp_path / "log", pass_fds=fds)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_up(log: Path) -> bool:
    return log.exists() and "up" in log.read_text()


def is_dead(process: psutil.Process) -> bool:
    try:
        # Where nobody reaps orphans a dead one stays as a zombie.
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_how_it_ended_is_told_once_with_what_it_wrote_last(tmp_path: Path) -> None:
    ended: asyncio.Queue[int] = asyncio.Queue()
    source = "import sys; print('no room'); sys.exit(3)"
    process = OwnedProcess(run(tmp_path, source), on_exit=ended.put_nowait)
    process.start()
    assert await asyncio.wait_for(ended.get(), 20) == 3
    assert not process.is_running
    assert process.tail() == "no room"
    await process.stop(grace_s=1)
    assert ended.empty()


async def test_who_is_stopped_is_asked_first_and_nobody_is_told(tmp_path: Path) -> None:
    told: list[int] = []
    process = OwnedProcess(run(tmp_path, _FOREVER), on_exit=told.append)
    process.start()
    await asyncio.to_thread(until, lambda: is_up(tmp_path / "log"))
    await process.stop(grace_s=10)
    await process.stop(grace_s=10)
    assert not process.is_running
    assert told == []


async def test_who_does_not_listen_is_killed(tmp_path: Path) -> None:
    process = OwnedProcess(run(tmp_path, _DEAF), on_exit=print)
    process.start()
    await asyncio.to_thread(until, lambda: is_up(tmp_path / "log"))
    await process.stop(grace_s=0.05)
    assert process.pid is not None
    assert not psutil.pid_exists(process.pid)


async def test_it_inherits_a_socket_under_its_number(tmp_path: Path) -> None:
    ended: asyncio.Queue[int] = asyncio.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = listener.fileno()
        source = "import socket, sys; print(socket.socket(fileno=int(sys.argv[1])).getsockname())"
        process = OwnedProcess(run(tmp_path, source, str(fd), fds=(fd,)), on_exit=ended.put_nowait)
        process.start()
        assert await asyncio.wait_for(ended.get(), 20) == 0
        assert str(listener.getsockname()[1]) in process.tail()


async def test_a_program_that_is_not_there_ends_at_once(tmp_path: Path) -> None:
    ended: asyncio.Queue[int] = asyncio.Queue()
    program = Program(name="none", argv=[str(tmp_path / "none")], log=tmp_path / "log")
    process = OwnedProcess(program, on_exit=ended.put_nowait)
    process.start()
    assert await asyncio.wait_for(ended.get(), 20) != 0
    assert "FileNotFoundError" in process.tail()


def test_it_is_killed_with_its_owner(tmp_path: Path) -> None:
    log = tmp_path / "log"
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(log), _FOREVER],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    with owner.stdout:
        child = psutil.Process(int(owner.stdout.readline()))
    until(lambda: is_up(log))
    owner.kill()
    owner.wait(10)
    until(lambda: is_dead(child))
