"""Ending what belongs to a cluster, and nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.serving.cluster import reaper

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found by /proc")
SLEEP = "print('up', flush=True); import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Starts a Python program and waits until it is up; marked as of the run dir if wanted."""
    with contextlib.ExitStack() as stack:

        def start(program: str, *, marked: bool) -> subprocess.Popen[str]:
            mark = {reaper.RUN_DIR_VARIABLE: str(tmp_path)} if marked else {}
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=os.environ | mark,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            return process

        yield start


def test_marked_processes_end_and_others_go_on(tmp_path: Path, spawn: Spawn) -> None:
    ours, theirs = spawn(SLEEP, marked=True), spawn(SLEEP, marked=False)
    assert reaper.marked_processes(str(tmp_path)) == {ours.pid}
    assert reaper.reap(str(tmp_path), grace_s=5.0) == frozenset()
    assert ours.wait(5) == -15
    assert theirs.poll() is None


def test_a_process_that_ignores_the_request_is_killed(tmp_path: Path, spawn: Spawn) -> None:
    stubborn = spawn(STUBBORN, marked=True)
    assert reaper.reap(str(tmp_path), grace_s=0.1) == frozenset()
    assert stubborn.wait(5) == -9


def test_a_reader_of_a_file_of_the_cluster_is_not_ended(tmp_path: Path, spawn: Spawn) -> None:
    log = tmp_path / "log"
    log.touch()
    spawn(f"f = open({str(log)!r}); {SLEEP}", marked=False)
    assert reaper.marked_processes(str(tmp_path)) == frozenset()


def test_a_process_that_overwrote_its_environment_is_known_by_its_files(
    tmp_path: Path, spawn: Spawn
) -> None:
    setproctitle = pytest.importorskip("setproctitle")
    assert setproctitle
    log = tmp_path / "log"
    log.touch()
    retitled = spawn(
        f"f = open({str(log)!r}); import setproctitle; "
        f"setproctitle.setproctitle('t' * 2000); {SLEEP}",
        marked=True,
    )
    assert reaper.marked_processes(str(tmp_path)) == {retitled.pid}


def test_a_run_dir_whose_name_begins_alike_is_another(tmp_path: Path, spawn: Spawn) -> None:
    spawn(SLEEP, marked=True)
    assert reaper.marked_processes(str(tmp_path)[:-1]) == frozenset()


def test_the_guardian_cleans_up_when_its_parent_is_gone(tmp_path: Path, spawn: Spawn) -> None:
    ours = spawn(SLEEP, marked=True)
    state_file = tmp_path.parent / f"{tmp_path.name}-state.json"
    state_file.touch()
    guardian = reaper.start_guardian(str(tmp_path), str(state_file))
    assert guardian.stdin is not None
    assert ours.poll() is None
    guardian.stdin.close()  # what the parent's death does
    assert guardian.wait(20) == 0
    assert ours.wait(5) == -15
    assert not tmp_path.exists()
    assert not state_file.exists()
