"""How rivals are started, which processes they are, and how they are ended."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Protocol

import httpx
import psutil

from benchmarks._systems import (
    NotStartedError,
    System,
    log_tail,
    pick_free_port,
    spawn,
    terminate,
    wait_until_healthy,
)
from benchmarks.rivals.load import MODEL

_ANSWER_TIMEOUT_S = 120.0
_POLL_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process of a rival, and which group its CPU time counts for."""

    group: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class MakePrograms(Protocol):
    """Says what to start."""

    def __call__(self, *, folder: Path, port: int) -> Sequence[Program]:
        """The programs of a rival that is to listen at a port, with a folder to itself."""
        ...


class ProgramStack:
    """Programs that together are one rival. Satisfies `System`."""

    def __init__(
        self,
        name: str,
        make: MakePrograms,
        *,
        health_route: str = "/health",
        on_started: Callable[[str], None] | None = None,
    ) -> None:
        """`health_route` is a route that answers once it is up; `on_started` is called then."""
        self.name = name
        self._health_route = health_route
        self._on_started = on_started
        self.url = ""
        self._make_programs = make
        self._folder: Path | None = None
        self._running: list[tuple[Program, Path, Popen[bytes]]] = []

    def start(self) -> None:
        """Start all, and wait until the rival is healthy."""
        self._folder = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))
        port = pick_free_port()
        self.url = f"http://127.0.0.1:{port}"
        for number, program in enumerate(self._make_programs(folder=self._folder, port=port)):
            log = self._folder / f"{number}.log"
            process = spawn(program.command, log, environment=program.environment)
            self._running.append((program, log, process))
        wait_until_healthy(self.url, self._failure_reason, route=self._health_route)
        if self._on_started is not None:
            self._on_started(self.url)

    def process_groups(self) -> dict[str, list[psutil.Process]]:
        """Its processes, with any children."""
        groups: dict[str, list[psutil.Process]] = {}
        for program, _, process in self._running:
            root = psutil.Process(process.pid)
            groups.setdefault(program.group, []).extend((root, *root.children(recursive=True)))
        return groups

    def stop(self) -> list[int]:
        """End all, the last one first."""
        running, self._running = self._running, []
        children = [child for _, _, process in running for child in _descendants(process.pid)]
        killed = [process.pid for _, _, process in reversed(running) if not terminate(process)]
        for child in children:
            if child.is_running():
                child.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return killed

    def _failure_reason(self) -> str | None:
        for program, log, process in self._running:
            if process.poll() is not None:
                return f"{' '.join(program.command[:3])} ended: {log_tail(log)}"
        return None


class RouterStack:
    """A rival that stands before another system: both their processes, as one. A `System`."""

    def __init__(self, name: str, backend: System, make: Callable[[str], MakePrograms]) -> None:
        """`make` is given the URL of what is behind."""
        self.name = name
        self._backend = backend
        self._make_programs = make
        self._router: ProgramStack | None = None

    @property
    def url(self) -> str:
        """Where the one before answers."""
        return "" if self._router is None else self._router.url

    def start(self) -> None:
        """Start the one behind, then the one before."""
        self._backend.start()
        self._router = ProgramStack(self.name, self._make_programs(self._backend.url))
        self._router.start()

    def process_groups(self) -> dict[str, list[psutil.Process]]:
        """The processes of both."""
        groups = {
            group: list(processes) for group, processes in self._backend.process_groups().items()
        }
        if self._router is not None:
            for group, processes in self._router.process_groups().items():
                groups.setdefault(group, []).extend(processes)
        return groups

    def stop(self) -> list[int]:
        """End both."""
        front, self._router = self._router, None
        leftover_pids = [] if front is None else front.stop()
        return leftover_pids + self._backend.stop()


def wait_until_answering(url: str) -> None:
    """Wait until a completion is answered: some are healthy before they know of an engine.

    Raises:
        NotStartedError: none was in time.
    """
    deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
    last_error = ""
    while time.monotonic() < deadline_s:
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=10.0)
            if answer.is_success:
                return
            last_error = f"{answer.status_code}: {answer.text[:300]}"
        except httpx.TransportError as error:
            last_error = repr(error)
        time.sleep(_POLL_INTERVAL_S)
    raise NotStartedError(f"no completion after {_ANSWER_TIMEOUT_S:.0f} s: {last_error}")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
