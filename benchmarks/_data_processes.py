"""Starts and ends the processes of a data plane without Ray (`_data_plane`)."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks._systems import pick_free_port, spawn_piped, wait_until_healthy

_REPLICAS_PER_PROCESS = 250
"""Replicas in a process: as many as its descriptors allow by far, and a core can run at leisure."""
_DRAIN_TIMEOUT_S = 60.0
_IDLE_WINDOW_S = 5.0
_NO_METRICS = "observability.metrics.enabled=false"


class DataPlane:
    """An ingress and its replicas, from entering to leaving the context."""

    def __init__(
        self,
        scenario: str,
        names: Sequence[str],
        *,
        frontend: str,
        replica_sets: Sequence[str] = (_NO_METRICS,),
        ingress_sets: Sequence[str] = (),
        timed: bool = False,
    ) -> None:
        """`..._sets` change keys of the scenario; `timed` has the ingress measure its metrics."""
        self.port = 0
        """Where the ingress listens, once it was started."""
        self.start_s = 0.0
        """From the ingress' start until it could serve; its replicas were there."""
        self.metrics: list[str] = []
        """Addresses to scrape."""
        self.hook_costs: dict[str, float] = {}
        """What a timed ingress has measured, once the plane has ended."""
        self._scenario = scenario
        self._names = names
        self._frontend = frontend
        self._replica_sets = replica_sets
        self._ingress_sets = ingress_sets
        self._timed = timed
        self._folder = Path(tempfile.mkdtemp(prefix="baton-"))
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            links: dict[str, str] = {}
            for begin in range(0, len(self._names), _REPLICAS_PER_PROCESS):
                names = self._names[begin : begin + _REPLICAS_PER_PROCESS]
                answer = self._spawn("replicas", self._replica_sets, json.dumps(names))
                links |= answer["links"]
                self.metrics += answer["metrics"]
            overrides = [f"server.api_server={self._frontend}", *self._ingress_sets]
            self.port = pick_free_port()  # now that no replica can take it
            began_s = time.monotonic()
            role = "timed-ingress" if self._timed else "ingress"
            self.metrics += self._spawn(role, overrides, str(self.port), json.dumps(links))[
                "metrics"
            ]
            wait_until_healthy(f"http://127.0.0.1:{self.port}", self._failure_reason)
            self.start_s = time.monotonic() - began_s
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def cpu_s(self, *, replicas: bool = False) -> float:
        """CPU seconds so far of the ingress and what it started, and of replicas if asked for."""
        processes = self._ingress_processes()
        if replicas:
            processes += [psutil.Process(process.pid) for process in self._processes[:-1]]
        times = [process.cpu_times() for process in processes]
        return sum(other.user + other.system for other in times)

    def idle_cpu_s_per_s(self) -> float:
        """Cores of the ingress without requests."""
        before, began_s = self.cpu_s(), time.monotonic()
        time.sleep(_IDLE_WINDOW_S)
        return (self.cpu_s() - before) / (time.monotonic() - began_s)

    def rss_bytes(self) -> int:
        """The memory of the ingress and of what it started; shared pages count in each."""
        return sum(process.memory_info().rss for process in self._ingress_processes())

    def _ingress_processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._processes[-1].pid)
        return [root, *root.children(recursive=True)]

    def _spawn(self, role: str, sets: Sequence[str], *arguments: str) -> dict[str, Any]:
        module_arguments = (role, self._scenario, json.dumps(sets), *arguments)
        command = [sys.executable, "-m", "benchmarks._data_plane", *module_arguments]
        log = self._folder / f"{role}-{len(self._processes)}.log"
        process, first_line = spawn_piped(command, log)
        self._processes.append(process)
        facts: dict[str, Any] = first_line
        return facts

    def _failure_reason(self) -> str | None:
        status = self._processes[-1].poll()
        return None if status is None else f"the ingress ended with {status}"

    def _stop(self) -> None:
        processes, self._processes = self._processes, []
        for process in reversed(processes):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
            try:
                output, _ = process.communicate(timeout=_DRAIN_TIMEOUT_S)
                self.hook_costs |= json.loads(output or "{}")
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)
