"""Run a program in a session of its own, for so long at most, and leave nothing of it behind.

While it runs, this process adopts what it orphans (Linux): so whatever it started, and whoever has
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
_ORDERLY_S = 45.0
"""How long a program has to clean up after an interrupt."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended."""

    status: int
    """Its exit status; negative: the signal that ended it."""
    took_s: float
    late: bool
    """It was interrupted for taking too long."""
    left: tuple[str, ...]
    """What it had left running: killed by now."""


def run_apart(
    command: Sequence[str],
    *,
    log: Path,
    deadline_s: float,
    environment: Mapping[str, str],
    grace_s: float = 10.0,
) -> Ended:
    """Run a program; its output goes to `log`. Returns when nothing of it is left.

    What it started has `grace_s` to end after it.
    """
    began_s = time.monotonic()
    family = _Family()
    late = False
    with _adopting(), log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            late = not family.wait(process, within_s=deadline_s)
        finally:
            # Also when this process is interrupted.
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                if not family.wait(process, within_s=_ORDERLY_S):
                    process.kill()
            status, took_s = process.wait(), time.monotonic() - began_s
            left = family.end(grace_s)
    return Ended(status=status, took_s=took_s, late=late, left=left)


class _Family:
    """All processes below this one, but those that were there before."""

    def __init__(self) -> None:
        self._others = {one.pid for one in psutil.Process().children(recursive=True)}

    def wait(self, process: subprocess.Popen[bytes], *, within_s: float) -> bool:
        """Wait for its end; whoever was adopted and ended meanwhile is laid to rest."""
        until_s = time.monotonic() + within_s
        while process.poll() is None:
            if time.monotonic() >= until_s:
                return False
            self._bury(but=process.pid)
            time.sleep(_POLL_S)
        return True

    def _bury(self, *, but: int) -> None:
        """Reap adopted children that have ended, as init would; costs little while none has.

        Each by its pid: a child of before that its owner has not yet waited for stays ended, and
        would be all that a wait for anybody ever finds.
        """
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
        except ChildProcessError:
            return
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.pid != but and one.pid not in self._others and _is_zombie(one):
                    os.waitpid(one.pid, os.WNOHANG)

    def end(self, grace_s: float) -> tuple[str, ...]:
        """Wait for the end of all of them, then kill the rest; says who that was."""
        until_s = time.monotonic() + grace_s
        while (left := self._living()) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        named = []
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                named.append(f"{one.pid} {' '.join(one.cmdline())[:100] or one.name()}")
                one.kill()
        psutil.wait_procs(left, timeout=grace_s)
        return tuple(named)

    def _living(self) -> list[psutil.Process]:
        self._bury(but=0)
        found = []
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.pid not in self._others and not _is_zombie(one):
                    found.append(one)
        return found


def _is_zombie(one: psutil.Process) -> bool:
    return bool(one.status() == psutil.STATUS_ZOMBIE)


@contextmanager
def _adopting() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
