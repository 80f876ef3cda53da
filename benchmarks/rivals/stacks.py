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
    await_health,
    end_process,
    free_port,
    spawn,
    tail,
)
from benchmarks.rivals.load import MODEL

_ANSWER_S = 120.0
_POLL_S = 0.2


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


class Stack:
    """Programs that together are one rival. Satisfies `System`."""

    def __init__(
        self,
        name: str,
        make: MakePrograms,
        *,
        answers: str = "/health",
        settle: Callable[[str], None] | None = None,
    ) -> None:
        """`answers` is a route that answers once it is up; `settle` is called then."""
        self.name = name
        self._answers = answers
        self._settle = settle
        self.url = ""
        self._make = make
        self._folder: Path | None = None
        self._running: list[tuple[Program, Path, Popen[bytes]]] = []

    def start(self) -> None:
        """Start all, and wait until the rival is healthy."""
        self._folder = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        for number, program in enumerate(self._make(folder=self._folder, port=port)):
            log = self._folder / f"{number}.log"
            process = spawn(program.command, log, environment=program.environment)
            self._running.append((program, log, process))
        await_health(self.url, self._why_not, route=self._answers)
        if self._settle is not None:
            self._settle(self.url)

    def groups(self) -> dict[str, list[psutil.Process]]:
        """Its processes, with any children."""
        found: dict[str, list[psutil.Process]] = {}
        for program, _, process in self._running:
            root = psutil.Process(process.pid)
            found.setdefault(program.group, []).extend((root, *root.children(recursive=True)))
        return found

    def stop(self) -> list[int]:
        """End all, the last one first."""
        running, self._running = self._running, []
        children = [child for _, _, process in running for child in _below(process.pid)]
        killed = [process.pid for _, _, process in reversed(running) if not end_process(process)]
        for child in children:
            if child.is_running():
                child.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return killed

    def _why_not(self) -> str | None:
        for program, log, process in self._running:
            if process.poll() is not None:
                return f"{' '.join(program.command[:3])} ended: {tail(log)}"
        return None


class Before:
    """A rival that stands before another system: both their processes, as one. A `System`."""

    def __init__(self, name: str, behind: System, make: Callable[[str], MakePrograms]) -> None:
        """`make` is given the URL of what is behind."""
        self.name = name
        self._behind = behind
        self._make = make
        self._front: Stack | None = None

    @property
    def url(self) -> str:
        """Where the one before answers."""
        return "" if self._front is None else self._front.url

    def start(self) -> None:
        """Start the one behind, then the one before."""
        self._behind.start()
        self._front = Stack(self.name, self._make(self._behind.url))
        self._front.start()

    def groups(self) -> dict[str, list[psutil.Process]]:
        """The processes of both."""
        found = {group: list(processes) for group, processes in self._behind.groups().items()}
        if self._front is not None:
            for group, processes in self._front.groups().items():
                found.setdefault(group, []).extend(processes)
        return found

    def stop(self) -> list[int]:
        """End both."""
        front, self._front = self._front, None
        left = [] if front is None else front.stop()
        return left + self._behind.stop()


def await_answer(url: str) -> None:
    """Wait until a completion is answered: some are healthy before they know of an engine.

    Raises:
        NotStartedError: none was in time.
    """
    until_s = time.monotonic() + _ANSWER_S
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
    said = ""
    while time.monotonic() < until_s:
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=10.0)
            if answer.is_success:
                return
            said = f"{answer.status_code}: {answer.text[:300]}"
        except httpx.TransportError as error:
            said = repr(error)
        time.sleep(_POLL_S)
    raise NotStartedError(f"no completion after {_ANSWER_S:.0f} s: {said}")


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
