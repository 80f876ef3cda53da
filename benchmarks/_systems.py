"""The systems that are compared: how each is started, which processes it is, how it is ended."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil

from baton.config import DeploymentConfig, load_config, sim_settings
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.cluster.reaper import marked_processes, reap
from baton.serving.replica.engines import model_path
from baton.simulator.engine.settings import SimSettings

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = ROOT / "benchmarks" / "scenarios"
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_COMMAND_S = 180.0
_POLL_INTERVAL_S = 0.1
_PR_SET_PDEATHSIG = 1

API, HAPROXY, ENGINE, OTHER = "api", "haproxy", "engine", "other"
"""Groups of processes. `api` is vLLM's API server, in baton the ingress replica around it."""


class NotStartedError(RuntimeError):
    """A system that did not come up; what it wrote last is in the message."""


class System(Protocol):
    """One of the compared systems."""

    @property
    def name(self) -> str:
        """What it is called in the results."""
        ...

    @property
    def url(self) -> str:
        """Where it answers, once started."""
        ...

    def start(self) -> None:
        """Start and wait until healthy."""
        ...

    def process_groups(self) -> dict[str, list[psutil.Process]]:
        """Its processes."""
        ...

    def stop(self) -> list[int]:
        """End it; returns the ids of processes that had to be killed or are left."""
        ...


def load_scenario(name: str, *, overrides: Sequence[str] = ()) -> DeploymentConfig:
    """A scenario's configuration; `overrides` change keys of it, as `--set` does."""
    return load_config([SCENARIOS / f"{name}.yaml"], sets=overrides).config


def engine_settings(config: DeploymentConfig) -> SimSettings:
    """The settings of a scenario's engines.

    Raises:
        ValueError: its pools have not all the same, so that there is nothing to compare.
    """
    settings = {
        sim_settings(pool.engine, config.models[pool.model], config.transfer)
        for pool in config.pools.values()
    }
    if len(settings) != 1:
        raise ValueError(f"{len(settings)} different engines in one scenario, expected 1")
    return settings.pop()


def pick_free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class BareVllm:
    """vLLM's API server with one simulated engine."""

    name = "bare"

    def __init__(self, config: DeploymentConfig) -> None:
        self._settings = json.dumps(asdict(engine_settings(config)))
        self._model = model_path(config.models[config.model_name])
        self._folder: Path | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""

    def start(self) -> None:
        """Start both processes and wait until the API server is healthy."""
        self._folder = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))
        port = pick_free_port()
        self.url = f"http://127.0.0.1:{port}"
        common = (str(self._folder), self._settings)
        self._spawn(ENGINE, "engine", *common)
        self._spawn(API, "api", *common, self._model, str(port))
        wait_until_healthy(self.url, self._failure_reason)

    def process_groups(self) -> dict[str, list[psutil.Process]]:
        """The two processes, with any children."""
        groups = {}
        for group, process in self._processes.items():
            root = psutil.Process(process.pid)
            groups[group] = [root, *root.children(recursive=True)]
        return groups

    def stop(self) -> list[int]:
        """End both."""
        processes, self._processes = list(self._processes.values()), {}
        killed = [process.pid for process in processes if not terminate(process)]
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return killed

    def _spawn(self, group: str, *arguments: str) -> None:
        assert self._folder is not None, "spawned before the folder was made"
        self._processes[group] = spawn(
            [sys.executable, "-m", "benchmarks._bare", *arguments], self._folder / f"{group}.log"
        )

    def _failure_reason(self) -> str | None:
        for group, process in self._processes.items():
            if process.poll() is not None and self._folder is not None:
                return f"{group} ended: {log_tail(self._folder / f'{group}.log')}"
        return None


class BatonDeployment:
    """A complete baton: Ray Serve, HAProxy, ingress, and the replicas of a scenario."""

    def __init__(self, name: str, scenario_name: str, *, sets: Sequence[str] = ()) -> None:
        """`sets` change keys of the scenario, as `--set` does."""
        self.name = name
        self._scenario = scenario_name
        self._overrides = tuple(sets)
        self._up_process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._cluster_state: ClusterState | None = None
        self.url = ""

    def start(self) -> None:
        """`baton up`, and wait until it is healthy."""
        port = pick_free_port()
        descriptor, path = tempfile.mkstemp(prefix="baton-", suffix=".log")
        os.close(descriptor)
        self._log = Path(path)
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "baton.cli.main", "up"]
        command += ["-c", str(SCENARIOS / f"{self._scenario}.yaml")]
        for override in (f"server.port={port}", *self._overrides):
            command += ["--set", override]
        self._up_process = spawn(command, self._log)
        wait_until_healthy(self.url, self._failure_reason)
        self._cluster_state = self._find_state()

    def apply(self, *sets: str) -> dict[str, Any]:
        """`baton apply` of the scenario with these keys changed; returns its report.

        Raises:
            RuntimeError: it was not applied.
        """
        arguments = ["apply", "-o", "json", "-c", str(SCENARIOS / f"{self._scenario}.yaml")]
        for key in (f"server.port={self.url.rpartition(':')[2]}", *self._overrides, *sets):
            arguments += ["--set", key]
        report: dict[str, Any] = json.loads(run_baton(*arguments).splitlines()[-1])
        return report

    def process_groups(self) -> dict[str, list[psutil.Process]]:
        """All processes of its cluster; `other` holds Ray's own, and the one that started it."""
        assert self._cluster_state is not None, "asked before the start"
        groups: dict[str, list[psutil.Process]] = {g: [] for g in (API, HAPROXY, ENGINE, OTHER)}
        for pid in {*marked_processes(self._cluster_state.run_dir), self._cluster_state.pid}:
            try:
                process = psutil.Process(pid)
                groups[group_of(process.name(), process.cmdline())].append(process)
            except psutil.NoSuchProcess:
                continue
        return groups

    def stop(self) -> list[int]:
        """Let it end in good order, and see that nothing is left."""
        up_process, self._up_process = self._up_process, None
        state = self._cluster_state or (
            None if up_process is None else self._find_state_of(up_process.pid)
        )
        self._cluster_state = None
        leftover_pids: list[int] = []
        if up_process is not None and not terminate(up_process):
            leftover_pids.append(up_process.pid)
        if state is not None:
            leftover_pids += sorted(marked_processes(state.run_dir))
            reap(state.run_dir, grace_s=1.0)
        if self._log is not None:
            self._log.unlink(missing_ok=True)
        return leftover_pids

    def _find_state(self) -> ClusterState:
        assert self._up_process is not None, "asked before the start"
        state = self._find_state_of(self._up_process.pid)
        if state is None:
            raise NotStartedError(f"process {self._up_process.pid} published no state")
        return state

    def _find_state_of(self, pid: int) -> ClusterState | None:
        return next((s for s in running_clusters(state_folder()) if s.pid == pid), None)

    def _failure_reason(self) -> str | None:
        if (
            self._up_process is not None
            and self._up_process.poll() is not None
            and self._log is not None
        ):
            return f"baton up ended: {log_tail(self._log)}"
        return None


def run_baton(*arguments: str) -> str:
    """Run a command of `baton`; returns its standard output.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "baton.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=_COMMAND_S,
    )
    if done.returncode:
        raise RuntimeError(f"baton {' '.join(arguments)}: {done.stderr[-500:]}")
    return done.stdout


def group_of(name: str, command: list[str]) -> str:
    """Which group a process of baton's cluster belongs to.

    Ray names the process of a replica `ray::ServeReplica:APP:DEPLOYMENT`, sometimes with a method.
    """
    if name == "haproxy":
        return HAPROXY
    if name == "vllm-rs":
        return API
    title = command[0] if command else name
    if not title.startswith("ray::ServeReplica:baton:"):
        return OTHER
    deployment = title.split(":")[4].split(".")[0].split("#")[0]
    return {"ingress": API, "controller": OTHER}.get(deployment, ENGINE)


class CpuMeter:
    """CPU time of a system's processes, and of everybody else on the machine."""

    def __init__(self, groups: dict[str, list[psutil.Process]]) -> None:
        self._groups = groups
        self._own_process = psutil.Process()
        self._last_cpu_s: dict[int, float] = {}

    def read(self) -> dict[str, float]:
        """CPU seconds so far by group; `client` is this process, `machine` all that was used."""
        seconds = {name: sum(map(self._cpu_s, group)) for name, group in self._groups.items()}
        times = psutil.cpu_times()
        busy_s = times.user + times.system + times.irq + times.softirq + times.nice
        return seconds | {
            "client": self._cpu_s(self._own_process),
            "machine": busy_s,
            "steal": times.steal,
        }

    def _cpu_s(self, process: psutil.Process) -> float:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            # What it used since the last reading is lost; what it used before is not.
            return self._last_cpu_s.get(process.pid, 0.0)
        self._last_cpu_s[process.pid] = times.user + times.system
        return self._last_cpu_s[process.pid]


def spawn(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process; what it says goes to `log`."""
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603 - our own programs
            command,
            cwd=ROOT,
            env={**os.environ, **offline, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C is for the benchmark, which then ends them in order.
            start_new_session=True,
            preexec_fn=set_parent_death_signal,  # noqa: PLW1509 - this process has one thread here
        )


def spawn_piped(command: Sequence[str], log: Path) -> tuple[subprocess.Popen[str], Any]:
    """Start a program that says in a line of JSON when it is ready; errors go to `log`.

    Raises:
        NotStartedError: it ended without a word.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own programs
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=set_parent_death_signal,  # noqa: PLW1509 - this process has one thread here
        )
    assert process.stdout is not None, "its output is a pipe"
    line = process.stdout.readline()
    if not line:
        process.wait()
        raise NotStartedError(f"{command[-3:]} ended: {log_tail(log)}")
    return process, json.loads(line)


def set_parent_death_signal() -> None:
    """For a process that was just forked: end with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def terminate(process: subprocess.Popen[bytes]) -> bool:
    """Ask a process to end; False when it had to be killed."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def wait_until_healthy(
    url: str, failure_reason: Callable[[], str | None], *, route: str = "/health"
) -> None:
    """Wait until a server is healthy.

    Raises:
        NotStartedError: it was not in time, or `failure_reason` says that it never will be.
    """
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if (reason := failure_reason()) is not None:
            raise NotStartedError(reason)
        try:
            if httpx.get(f"{url}{route}", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            pass  # no listener yet
        time.sleep(_POLL_INTERVAL_S)
    raise NotStartedError(f"{url} was not healthy after {_START_TIMEOUT_S:.0f} s")


def log_tail(log: Path) -> str:
    """The last output of a program."""
    return log.read_text(errors="replace")[-1500:]
