"""A program that runs apart has a deadline, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.chaos.isolated import ProcessExit, run_isolated

ORPHAN = """
import subprocess, sys
# Of a session of its own, and without a parent as soon as this program ends.
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(child.pid, flush=True)
"""
STUCK = """
import signal, sys, time
# What a shell starts in the background is born deaf to interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    time.sleep(300)
except KeyboardInterrupt:
    print("cleaned up", flush=True)
    sys.exit(3)
"""
ORPHANED_ZOMBIE = """
import subprocess, sys, time
# A grandchild that loses its parent, then ends: somebody has to lay it to rest.
pid = int(subprocess.run(
    [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '0.2'],"
     " stdout=subprocess.DEVNULL).pid)"],
    capture_output=True, check=True).stdout)
import os
deadline = time.monotonic() + 10
while os.path.exists(f"/proc/{pid}"):
    assert time.monotonic() < deadline, "a zombie stays for ever"
    time.sleep(0.02)
"""


def ran(program: str, log: Path, *, deadline_s: float = 20.0, grace_s: float = 5.0) -> ProcessExit:
    return run_isolated(
        [sys.executable, "-c", program],
        log=log,
        deadline_s=deadline_s,
        environment=os.environ,
        grace_s=grace_s,
    )


def test_a_program_that_ends_by_itself_leaves_nothing(tmp_path: Path) -> None:
    ended = ran("print('done'); raise SystemExit(7)", tmp_path / "log")
    assert (ended.status, ended.is_timed_out, ended.leftovers) == (7, False, ())
    assert (tmp_path / "log").read_text() == "done\n"


def test_what_a_program_leaves_running_is_named_and_ended(tmp_path: Path) -> None:
    ended = ran(ORPHAN, tmp_path / "log", grace_s=0.2)
    pid = int((tmp_path / "log").read_text())
    assert ended.leftovers == (f"{pid} sleep 300",)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_program_that_takes_too_long_may_clean_up(tmp_path: Path) -> None:
    ended = ran(STUCK, tmp_path / "log", deadline_s=0.7)
    assert (ended.status, ended.is_timed_out) == (3, True)
    assert (tmp_path / "log").read_text() == "cleaned up\n"


def test_an_orphan_that_ends_is_laid_to_rest_meanwhile(tmp_path: Path) -> None:
    ended = ran(ORPHANED_ZOMBIE, tmp_path / "log")
    assert (ended.status, ended.leftovers) == (0, ()), (tmp_path / "log").read_text()


def test_a_child_of_before_that_nobody_has_waited_for_keeps_no_orphan_from_its_rest(
    tmp_path: Path,
) -> None:
    before = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, before.pid, os.WEXITED | os.WNOWAIT)
    try:
        ended = ran(ORPHANED_ZOMBIE, tmp_path / "log")
    finally:
        assert before.wait() == 0, "its owner still gets its status"
    assert (ended.status, ended.leftovers) == (0, ()), (tmp_path / "log").read_text()
