"""The processes of a deployment, by what they are: to be killed one at a time, and counted.

Ray's processes name themselves (`ray::ServeReplica:baton:ingress`), so they are found by name below
this process, which has started all of them: the deployment, and nodes that joined it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton.config import load_config, sim_settings
from baton.engine.sim import SimSettings, expected_tokens
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.shared.names import APP
from tests.chaos import faults
from tests.chaos.history import Exchange
from tests.chaos.node_process import running_node
from tests.e2e.deployments import CONFIGS, Deployment, running_deployment

CONFIG = "sim.yaml"
_SCRAPE_S = 5.0
_GAUGE = re.compile(r"^(?P<name>\w+)(?:\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Have what is started inside see these variables."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentProcesses:
    """A deployment and its processes."""

    deployment: Deployment

    # ---------------------------------------------------------------- who is there

    def replicas(self, name: str) -> list[int]:
        """The processes of a deployment of Serve's: `ingress`, `controller`, or a pool."""
        return _find_processes(rf"ray::ServeReplica:{APP}:{name}\b")

    def replica_pids(self, names: Iterable[str]) -> dict[str, list[int]]:
        """The processes of several deployments, by name."""
        return {name: self.replicas(name) for name in names}

    def serve_controller(self) -> int:
        """Ray Serve's own."""
        return _only(_find_processes(r"ray::ServeController\b"))

    def gcs(self) -> int:
        """Ray's control store."""
        return _only(_find_processes(r"\S*/gcs_server\b"))

    def raylets(self) -> list[int]:
        """One for each node; the head's is the oldest."""
        return _find_processes(r"\S*/raylet/raylet\b")

    @property
    def state(self) -> ClusterState:
        """How the deployment is found."""
        pid = self.deployment.process.pid
        return next(cluster for cluster in running_clusters(state_folder()) if cluster.pid == pid)

    # ---------------------------------------------------------------- what they say

    def status(self, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """What `baton status` says, as soon as it says anything."""
        return self.deployment.wait_for(lambda _: True, timeout_s)

    def wait_status(
        self, predicate: Callable[[dict[str, Any]], bool], *, timeout_s: float
    ) -> float:
        """Wait until the status is as wanted; returns how long that took, in seconds."""
        started_s = time.monotonic()
        self.deployment.wait_for(predicate, timeout_s)
        return time.monotonic() - started_s

    def wait_complete(
        self, pools: Mapping[str, int], *, ingresses: int = 1, timeout_s: float
    ) -> float:
        """Wait until every ingress sees this many replicas of each pool; returns how long."""

        def holds(status: dict[str, Any]) -> bool:
            rows = [_counts(ingress["replicas"]) for ingress in status["ingresses"]]
            return len(rows) == ingresses and all(row == dict(pools) for row in rows)

        return self.wait_status(holds, timeout_s=timeout_s)

    def gauges(self, *names: str) -> float:
        """The sum of some gauges over all replicas, from their own metrics."""
        url = self.deployment.status()["observability"]["url"]
        targets = self._targets(url)
        return sum(_sum_target_gauges(target, names) for target in targets)

    def targets(self) -> list[str]:
        """Where every replica's metrics are."""
        return self._targets(self.deployment.status()["observability"]["url"])

    def _targets(self, url: str) -> list[str]:
        groups = httpx.get(f"{url}/sd", timeout=_SCRAPE_S).json()
        return [
            group["targets"][0] for group in groups if group["labels"]["component"] == "replica"
        ]

    # ---------------------------------------------------------------- tokens

    @staticmethod
    def expected_tokens(exchange: Exchange) -> Sequence[int]:
        """The tokens that one undisturbed engine gives."""
        model, settings = _engine()
        return expected_tokens(exchange.prompt, exchange.max_tokens, model=model, settings=settings)


@cache
def _engine() -> tuple[str, SimSettings]:
    """Of which model the simulated engines are, and what they are like."""
    config = load_config([CONFIGS / CONFIG], env={}).config
    pool = config.pools["decode"]
    settings = sim_settings(pool.engine, config.models[pool.model], config.transfer)
    return pool.model, settings


@contextmanager
def running_processes(folder: Path, **settings: object) -> Iterator[DeploymentProcesses]:
    """Simulated engines by `baton up`, hidden from other commands; ended in good order.

    Ray has its workers be nice to everybody else on a machine, which on a busy one starves them.
    """
    variables = environment(XDG_RUNTIME_DIR=str(folder), RAY_worker_niceness="0")
    with variables, running_deployment(CONFIG, folder, **settings) as deployment:
        yield DeploymentProcesses(deployment=deployment)


def ended_processes(before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> str:
    """Whose processes were there before and are no more: `decode 4711`, or `none`."""
    missing = [f"{name} {pid}" for name in before for pid in before[name] if pid not in after[name]]
    return ", ".join(missing) or "none"


def sum_gauges(targets: Sequence[str], *names: str) -> float:
    """The sum of some gauges over processes; those that are gone count nothing."""
    return sum(_sum_target_gauges(target, names) for target in targets)


def _sum_target_gauges(target: str, names: Sequence[str]) -> float:
    try:
        text = httpx.get(f"http://{target}/metrics", timeout=_SCRAPE_S).text
    except httpx.TransportError:
        return 0.0
    return sum(float(match["value"]) for match in _GAUGE.finditer(text) if match["name"] in names)


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        if not row["draining"]:
            counts[row["pool"]] = counts.get(row["pool"], 0) + 1
    return counts


def _find_processes(pattern: str) -> list[int]:
    """Living processes below this one whose command line begins so, oldest first."""
    matching = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if re.match(pattern, " ".join(process.cmdline())):
                matching.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(matching)]


def find_alive(pids: Iterable[int]) -> list[int]:
    """Those that have not ended; a zombie has."""
    alive = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive


def _only(pids: Sequence[int]) -> int:
    assert len(pids) == 1, f"expected one process, found {list(pids)}"
    return pids[0]


# -------------------------------------------------------------------- processes that come back


@dataclass(frozen=True, slots=True)
class KilledProcess:
    """A process that was killed, and what it takes to start it again as it was."""

    command: list[str]
    environ: dict[str, str]

    def with_option(self, name: str, value: str) -> KilledProcess:
        """Likewise, but with another value of an option, as where any free port was asked for."""
        command = [other for other in self.command if not other.startswith(f"--{name}=")]
        return KilledProcess([*command, f"--{name}={value}"], self.environ)

    def restart(self) -> subprocess.Popen[bytes]:
        """Start it again, below this process."""
        return subprocess.Popen(
            self.command,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def kill_to_restart(pid: int) -> KilledProcess:
    """Kill a process, and remember what it was."""
    process = psutil.Process(pid)
    wait_until(
        lambda: bool(process.cmdline()), 5.0
    )  # one that has just begun says nothing of itself
    killed = KilledProcess(process.cmdline(), process.environ())
    faults.kill(pid)
    return killed


@contextmanager
def added_node(processes: DeploymentProcesses, *, cpus: int, log: Path) -> Iterator[int]:
    """One more node of a deployment's cluster, on this machine; gives its raylet's id.

    It has the environment of the head's raylet: that is how Serve's settings reach its workers.
    """
    head = psutil.Process(processes.raylets()[0])
    options = (processes.state.address, str(cpus))
    with running_node(*options, log=log, environment=head.environ()) as raylet:
        yield raylet


def wait_until(predicate: Callable[[], bool], timeout_s: float) -> float:
    """How long it takes until something holds, or as long as was waited."""
    started_s = time.monotonic()
    while not predicate() and time.monotonic() < started_s + timeout_s:
        time.sleep(0.1)
    return round(time.monotonic() - started_s, 2)
