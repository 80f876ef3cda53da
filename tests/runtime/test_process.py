"""Programs that a process runs for itself, and that do not outlive it."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from baton.runtime.process.owned_process import OwnedProcess, Program
from baton.runtime.process.scratch import RUN_DIR_VARIABLE, scratch_folder
from baton.serving.cluster import reaper

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


async def test_an_exit_is_reported_once_with_the_last_output(tmp_path: Path) -> None:
    ended: asyncio.Queue[int] = asyncio.Queue()
    source = "import sys; print('no room'); sys.exit(3)"
    process = OwnedProcess(run(tmp_path, source), on_exit=ended.put_nowait)
    process.start()
    assert await asyncio.wait_for(ended.get(), 20) == 3
    assert not process.is_running
    assert process.tail() == "no room"
    await process.stop(grace_s=1)
    assert ended.empty()


async def test_a_stopped_process_gets_a_signal_and_its_exit_is_not_reported(tmp_path: Path) -> None:
    told: list[int] = []
    process = OwnedProcess(run(tmp_path, _FOREVER), on_exit=told.append)
    process.start()
    await asyncio.to_thread(until, lambda: is_up(tmp_path / "log"))
    await process.stop(grace_s=10)
    await process.stop(grace_s=10)
    assert not process.is_running
    assert told == []


async def test_a_process_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
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


# ---------- folders that nothing outlives
@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)


def test_it_goes_with_the_run_directory_of_the_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(run_dir))
    one, other = scratch_folder("a-"), scratch_folder("a-", short=True)
    assert one.parent == other.parent == run_dir
    assert one != other
    assert one.stat().st_mode & 0o077 == 0, "nobody else may listen there"


@pytest.mark.parametrize("run_dir", ["", "/nowhere/at/all"])
def test_without_a_run_directory_it_is_where_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, run_dir)
    assert scratch_folder("a-").parent == tmp_path


def test_the_place_of_temporary_files_may_be_too_long_for_sockets() -> None:
    made = scratch_folder("baton-test-", short=True)
    made.rmdir()
    assert len(str(made)) < 32


def test_the_run_directory_is_the_one_that_is_removed_with_the_deployment() -> None:
    assert RUN_DIR_VARIABLE == reaper.RUN_DIR_VARIABLE


# ---------- garbage collection in a process that serves
_SCRIPT = """
import gc
from baton.runtime.process.gc_tuning import freeze_startup_heap

old = [[number] for number in range(200_000)]
freeze_startup_heap()
sizes = []

def note(when, info):
    if when == "start" and info["generation"] == 2:
        sizes.append(len(gc.get_objects(2)))

gc.callbacks.append(note)
new = [[number] for number in range(200_000)]
gc.callbacks.remove(note)
assert sizes, "what is old is never looked through"
assert sizes[0] < 100_000, sizes
print("ok")
"""


def test_startup_objects_are_not_collected_and_cycles_go_soon() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ok\n", done.stderr


def test_garbage_from_before_is_let_go_first() -> None:
    class Thing:
        pass

    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]  # a cycle
    gone = weakref.ref(thing)
    del thing
    from baton.runtime.process.gc_tuning import freeze_startup_heap

    before = gc.get_threshold()
    try:
        freeze_startup_heap()
        assert gone() is None
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


_HELD = """
import gc
from baton.runtime.process.gc_tuning import freeze_startup_heap

def collections():
    before = [generation["collections"] for generation in gc.get_stats()]
    held = [[number] for number in range(210_000)]
    return [one["collections"] - was for one, was in zip(gc.get_stats(), before)]

usual = collections()
freeze_startup_heap()
ours = collections()
assert 8 * sum(ours) < sum(usual), (ours, usual)
assert ours[2] >= usual[2] >= 1, (ours, usual)
print("ok")
"""


def test_young_generations_are_collected_a_tenth_as_often_and_old_ones_no_less() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HELD], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ok\n", done.stderr


def test_tidying_lets_go_of_tuples_that_are_only_kept_to_be_used_again() -> None:
    from baton.runtime.process.gc_tuning import trim_memory

    trim_memory()
    before = sys.getallocatedblocks()
    kept = [tuple(number for number in range(13)) for _ in range(1500)]
    del kept
    for_later = sys.getallocatedblocks() - before
    trim_memory()
    assert for_later > 1000, "this Python keeps none: then there is nothing to tidy"
    assert sys.getallocatedblocks() - before < 300


_SCATTERED = """
from pathlib import Path
from baton.runtime.process.gc_tuning import trim_memory

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

pieces = [bytes(2000) for _ in range(40_000)]
pins = pieces[::100]
del pieces
before = resident_mb()
trim_memory()
print(before - resident_mb())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps no pages")
def test_tidying_gives_back_pages_that_lie_between_pieces_in_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCATTERED], capture_output=True, text=True, timeout=60, check=True
    )
    assert float(done.stdout) > 30, "of the 80 MB hardly any went back"
