"""Programs that tests start: each writes to a file, and nothing of it is left running."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from tests.fakes.scaled_deadline import ScaledDeadline

REPOSITORY = Path(__file__).parents[2]
_POLL_S = 0.2


def start_process(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program whose output goes to a file; None: in this process' environment, folder."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def wait_until_holds(
    predicate: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, timeout_s: float
) -> None:
    """Wait for something that a program brings about; fails with what it said when it ends."""
    deadline = ScaledDeadline(timeout_s)
    while not predicate():
        output = log.read_text(errors="replace")
        assert process.poll() is None, f"it ended:\n{output}"
        assert not deadline.is_expired(), f"not within {timeout_s:.0f} s:\n{output}"
        time.sleep(_POLL_S)


def wait_output(
    pattern: str, process: subprocess.Popen[bytes], log: Path, *, timeout_s: float
) -> re.Match[str]:
    """Wait until a line of what a program says has a match of a regular expression."""
    matches: list[re.Match[str]] = []

    def is_said() -> bool:
        matches.extend(re.finditer(pattern, log.read_text(errors="replace"), re.MULTILINE))
        return bool(matches)

    wait_until_holds(is_said, process, log, timeout_s=timeout_s)
    return matches[0]


def stop_process(
    process: subprocess.Popen[bytes], *, within_s: float = 90.0
) -> list[psutil.Process]:
    """End a process of ours and all that it has started; returns those that had to be killed."""
    processes = descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
    survivors = find_alive(processes)
    for survivor in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    process.kill()
    process.wait()
    return survivors


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below this one, now."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def find_alive(processes: list[psutil.Process], timeout_s: float = 5.0) -> list[psutil.Process]:
    """Those that still run after a moment; a zombie is not running."""
    _, survivors = psutil.wait_procs(processes, timeout=timeout_s)
    return [
        survivor
        for survivor in survivors
        if survivor.is_running() and survivor.status() != psutil.STATUS_ZOMBIE
    ]
