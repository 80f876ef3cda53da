"""End every process of one cluster, also after its owner was killed.

Run as a program (`python -I reaper.py RUN_DIR STATE_FILE`) it is the guardian: it waits for the end
of its standard input, which comes when its parent ends, and then cleans up.

Theory of operation: the owner puts `BATON_RUN_DIR=<run dir>` into the environment of its children,
and all descendants inherit it. Some processes rename themselves, which overwrites their visible
environment. Of these, the guardian ends those with an open file below the run dir, where their logs
are. A user's `tail` or editor there has an intact environment, and lives on.

The guardian has a session of its own, so that Ctrl-C does not reach it. It imports only the
standard library: it must start in milliseconds and stay small.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

RUN_DIR_VARIABLE = "BATON_RUN_DIR"
_POLL_S = 0.05
_KILL_S = 5.0


def marked_processes(run_dir: str) -> frozenset[int]:
    """Ids of the live processes of the cluster in `run_dir`.

    Empty without /proc, where Ray's own fate-sharing must do.
    """
    proc = Path("/proc")
    entries = [entry for entry in proc.iterdir() if entry.name.isdigit()] if proc.is_dir() else []
    return frozenset(
        int(entry.name)
        for entry in entries
        if int(entry.name) != os.getpid() and _belongs_to_cluster(entry, run_dir)
    )


def _belongs_to_cluster(entry: Path, run_dir: str) -> bool:
    try:
        environ = (entry / "environ").read_bytes()
        if f"{RUN_DIR_VARIABLE}={run_dir}".encode() in environ.split(b"\0"):
            return True
        # An intact environment has no empty entry; a zombie has none at all, and no files either.
        overwritten = environ.startswith(b"\0") or b"\0\0" in environ
        return overwritten and _holds_file_below(entry, run_dir + "/")
    except OSError:
        return False


def _holds_file_below(entry: Path, prefix: str) -> bool:
    for link in (entry / "fd").iterdir():
        try:
            if str(link.readlink()).startswith(prefix):
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def reap(run_dir: str, *, grace_s: float) -> frozenset[int]:
    """Send the marked processes SIGTERM, then SIGKILL; returns the ids of survivors."""
    _signal_until_gone(run_dir, signal.SIGTERM, timeout_s=grace_s)
    return _signal_until_gone(run_dir, signal.SIGKILL, timeout_s=_KILL_S)


def _signal_until_gone(run_dir: str, number: signal.Signals, *, timeout_s: float) -> frozenset[int]:
    # Signal only new processes again: a dying process may start another one.
    deadline_at_s = time.monotonic() + timeout_s
    signalled: set[int] = set()
    while remaining := marked_processes(run_dir):
        for pid in remaining - signalled:
            _send_signal(pid, number)
        signalled |= remaining
        if time.monotonic() >= deadline_at_s:
            return remaining
        time.sleep(_POLL_S)
    return frozenset()


def _send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def start_guardian(run_dir: str, state_file: str) -> subprocess.Popen[bytes]:
    """Start the process that cleans up when this one ends without having done so."""
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-I", __file__, run_dir, state_file],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(run_dir: str, state_file: str) -> int:
    """Wait for the parent's end, then end its cluster."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 4096):
        pass
    survivors = reap(run_dir, grace_s=1.0)
    Path(state_file).unlink(missing_ok=True)
    if not survivors:
        shutil.rmtree(run_dir, ignore_errors=True)
    return len(survivors)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
