"""A program that this process starts and watches, and that never outlives it.

Theory of operation: the event loop's thread must start the program, since the kernel takes the end
of the starting thread for that of the parent (`tied`). A descriptor of the process (pidfd) signals
its end, without a thread or a signal handler. Its output goes to a log of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.runtime.process import pdeathsig_exec as tied
from baton.runtime.process.log_events import log_event

_LOGGER = logging.getLogger(__name__)
_TAIL_BYTES = 2000
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program to run."""

    name: str
    """Its name in logs."""
    argv: Sequence[str]
    """The first is the path of the program."""
    log: Path
    """The log of its output, truncated at its start; its folder exists."""
    pass_fds: Sequence[int] = ()
    """Descriptors that it inherits under the same numbers."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beyond those of this process."""


class OwnedProcess:
    """One run of a program."""

    def __init__(self, program: Program, *, on_exit: Callable[[int], None]) -> None:
        """`on_exit` gets the exit code, once, unless `stop` ended it."""
        self._program = program
        self._exit_callback = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._exit_code: asyncio.Future[int] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """None before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self._exit_code is not None and not self._exit_code.done()

    def start(self) -> None:
        """Start it; the event loop's thread must call this.

        Raises:
            OSError: there is no such program, or no place for its log.
        """
        program = self._program
        argv = [sys.executable, "-I", tied.__file__, str(os.getpid()), *program.argv]
        handle = os.open(program.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - what the caller says
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(program.pass_fds),
                env={**os.environ, **program.environment},
            )
        loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_exit)
        fields = {"program": program.name, "pid": self._process.pid}
        log_event(_LOGGER, logging.INFO, "program_started", fields)

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Idempotent."""
        self._stopping = True
        if self._process is None or self._exit_code is None:
            return
        if not self._exit_code.done():
            self._process.terminate()
            await asyncio.wait([self._exit_code], timeout=grace_s)
        if not self._exit_code.done():
            self._process.send_signal(signal.SIGKILL)
            await asyncio.wait([self._exit_code], timeout=_KILL_TIMEOUT_S)

    def tail(self) -> str:
        """The end of its log; blocks on the disk."""
        try:
            with self._program.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _on_exit(self) -> None:
        assert self._process is not None
        assert self._exit_code is not None
        assert self._pidfd is not None
        code = self._process.wait()  # it has ended: this only buries it
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        self._exit_code.set_result(code)
        if not self._stopping:
            fields = {"program": self._program.name, "code": code, "log": str(self._program.log)}
            level, event = (
                (logging.ERROR, "program_died") if code else (logging.INFO, "program_ended")
            )
            log_event(_LOGGER, level, event, fields)
            self._exit_callback(code)


def exit_text(code: int) -> str:
    """How a process ended: `signal SIGKILL` for -9, `exit code 1` for 1."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
