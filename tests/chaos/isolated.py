"""Run a program in a session of its own, for so long at most, and leave nothing of it behind.

While it runs, this process adopts what it orphans (Linux): so all that it started, even those that
left it since, can be found and ended when it is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_SHUTDOWN_GRACE_S = 45.0
"""How long a program has to clean up after an interrupt."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How a program ended."""

    status: int
    """Its exit status; negative: the signal that ended it."""
    took_s: float
    is_timed_out: bool
    """It was interrupted for taking too long."""
    leftovers: tuple[str, ...]
    """What it had left running: killed by now."""


def run_isolated(
    command: Sequence[str],
    *,
    log: Path,
    deadline_s: float,
    environment: Mapping[str, str],
    grace_s: float = 10.0,
) -> ProcessExit:
    """Run a program; its output goes to `log`. Returns when nothing of it is left.

    What it started has `grace_s` to end after it.
    """
    started_s = time.monotonic()
    descendants = _Descendants()
    is_timed_out = False
    with _subreaper(), log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            is_timed_out = not descendants.wait(process, timeout_s=deadline_s)
        finally:
            # Also when this process is interrupted.
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                if not descendants.wait(process, timeout_s=_SHUTDOWN_GRACE_S):
                    process.kill()
            status, took_s = process.wait(), time.monotonic() - started_s
            leftovers = descendants.kill_all(grace_s)
    return ProcessExit(status=status, took_s=took_s, is_timed_out=is_timed_out, leftovers=leftovers)


class _Descendants:
    """All processes below this one, but those that were there before."""

    def __init__(self) -> None:
        self._earlier_pids = {child.pid for child in psutil.Process().children(recursive=True)}

    def wait(self, process: subprocess.Popen[bytes], *, timeout_s: float) -> bool:
        """Wait for its end; adopted processes that ended meanwhile are reaped."""
        until_s = time.monotonic() + timeout_s
        while process.poll() is None:
            if time.monotonic() >= until_s:
                return False
            self._reap(except_pid=process.pid)
            time.sleep(_POLL_S)
        return True

    def _reap(self, *, except_pid: int) -> None:
        """Reap adopted children that have ended, as init would; costs little while none has.

        Each by its pid: a child of before that its owner has not yet waited for stays ended, and
        would be all that a wait for anybody ever finds.
        """
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
        except ChildProcessError:
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if (
                    child.pid != except_pid
                    and child.pid not in self._earlier_pids
                    and _is_zombie(child)
                ):
                    os.waitpid(child.pid, os.WNOHANG)

    def kill_all(self, grace_s: float) -> tuple[str, ...]:
        """Wait for the end of all of them, then kill the rest; says who that was."""
        until_s = time.monotonic() + grace_s
        while (survivors := self._alive()) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        descriptions = []
        for survivor in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                descriptions.append(
                    f"{survivor.pid} {' '.join(survivor.cmdline())[:100] or survivor.name()}"
                )
                survivor.kill()
        psutil.wait_procs(survivors, timeout=grace_s)
        return tuple(descriptions)

    def _alive(self) -> list[psutil.Process]:
        self._reap(except_pid=0)
        processes = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.pid not in self._earlier_pids and not _is_zombie(child):
                    processes.append(child)
        return processes


def _is_zombie(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_ZOMBIE)


@contextmanager
def _subreaper() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
