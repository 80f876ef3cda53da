"""Several programs in one session: started together, ended together.

    python -m benchmarks._real_session PROGRAMS_JSON

Linux shares a core between sessions first and between processes then (`sched_autogroup_enabled`),
and the processes of vLLM's engines wait for each other by yielding theirs, which fails where
the core is shared with another session. On two cores, two servers in sessions of their own stream
many times as slowly as the same two in one. All that Ray starts is in one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks._systems import set_parent_death_signal
from benchmarks.rivals.stacks import Program

_STOP_TIMEOUT_S = 15.0
"""For each program; together they take less than the caller's timeout."""
_POLL_INTERVAL_S = 0.2


def in_one_session(programs: Sequence[Program]) -> Program:
    """The program that starts these, and is counted with the last."""
    program_specs = [
        {"command": list(program.command), "environment": dict(program.environment)}
        for program in programs
    ]
    command = (sys.executable, "-m", "benchmarks._real_session", json.dumps(program_specs))
    return Program(group=programs[-1].group, command=command)


def main(programs: str) -> int:
    """Be the holder; ends on SIGTERM, or when one of the programs has ended."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for load in json.loads(programs):
            running += [_start(load["command"], load["environment"])]
        while True:
            for process in running:
                if process.poll() is not None:
                    print(f"{process.args!r} ended with {process.returncode}", flush=True)
                    return 1
            time.sleep(_POLL_INTERVAL_S)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The one before goes first: behind it nothing is then asked any more.
        for process in reversed(running):
            _stop(process)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the benchmark's own
        command,
        env={**os.environ, **environment},
        preexec_fn=set_parent_death_signal,  # noqa: PLW1509 - this process has one thread here
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _on_sigterm(_number: int, _frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
