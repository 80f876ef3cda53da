"""A baton over several Ray nodes on this machine: one that `baton up` starts, others that join it.

Every node has a network namespace, a raylet, a folder for temporary files and a label
(`baton/node: NAME`) of its own. Nodes that join have the environment that `baton join` tells, which
is how Serve's settings and the cluster's token reach their workers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from tests.cluster.network import NetworkNode, network
from tests.e2e.deployments import CONFIGS, Deployment, alive, descendants
from tests.fakes.scaled_deadline import ScaledDeadline

LABEL = "baton/node"
_PORT = 8000
_START_S = 60.0
_SERVING_S = 400.0
_POLL_S = 0.2
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that has joined."""

    network: NetworkNode
    raylet: int
    """Its raylet's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A deployment and the nodes it runs on."""

    deployment: Deployment
    head: NetworkNode
    nodes: dict[str, Node]
    """By name, without the head."""


@contextmanager
def cluster(config: str, folder: Path, *, joining: tuple[str, ...]) -> Iterator[Cluster]:
    """`baton up` on a node `head`, with further nodes that join it; ended in good order."""
    with network("head", *joining) as at, ExitStack() as ends:
        head, log = at["head"], folder / "up.log"
        options = ["-c", str(CONFIGS / config)]
        addresses = {
            "cluster.node_address": head.address,
            "server.host": head.address,
            "server.port": _PORT,
            "transfer.side_channel.bind": head.subnet,
            "observability.metrics.port": 0,
        }
        for name, value in addresses.items():
            options += ["--set", f"{name}={value}"]
        baton = (*head.inside, sys.executable, "-m", "baton.cli.main")
        process = _started((*baton, "up", *options), log, dict(os.environ) | {"NO_COLOR": "1"})
        ends.callback(_end, process)
        state = _state_of(process, log)
        nodes = {}
        for name in joining:
            told = _told(baton, name)
            nodes[name] = ends.enter_context(_joined(at[name], state, told, folder))
        _await(lambda: "Ctrl-C ends it" in _text(log), process, log, within_s=_SERVING_S)
        deployment = Deployment(
            url=f"http://{head.address}:{_PORT}",
            process=process,
            log=log,
            options=tuple(options),
            inside=head.inside,
        )
        yield Cluster(deployment=deployment, head=head, nodes=nodes)


@contextmanager
def _joined(
    at: NetworkNode, state: ClusterState, environment: dict[str, str], folder: Path
) -> Iterator[Node]:
    log = folder / f"{at.name}.log"
    # Its sockets lie below, and a socket's path holds 107 bytes.
    temp_dir = tempfile.mkdtemp(prefix=f"bt-{at.name[:4]}-", dir="/tmp")
    program = [sys.executable, "-m", "tests.chaos.node_process", state.address, "4"]
    program += ["--ip", at.address, "--label", f"{LABEL}={at.name}", "--temp-dir", temp_dir]
    process = _started((*at.inside, *program), log, environment)
    try:
        _await(lambda: _up(log) is not None, process, log, within_s=_START_S)
        raylet = _up(log)
        assert raylet is not None
        yield Node(network=at, raylet=raylet)
    finally:
        _end(process)
        shutil.rmtree(temp_dir, ignore_errors=True)


def _started(
    command: tuple[str, ...], log: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def _up(log: Path) -> int | None:
    found = re.search(r"^UP (\d+)$", _text(log), re.MULTILINE)
    return None if found is None else int(found[1])


def _await(
    holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, within_s: float
) -> None:
    deadline = ScaledDeadline(within_s)
    while not holds():
        assert process.poll() is None, f"it ended:\n{_text(log)}"
        assert not deadline.passed(), f"not within {within_s:.0f} s:\n{_text(log)}"
        time.sleep(_POLL_S)


def _state_of(process: subprocess.Popen[bytes], log: Path) -> ClusterState:
    """How the deployment of this process is found, once its Ray is up."""
    found: list[ClusterState] = []

    def told() -> bool:
        found[:] = [one for one in running_clusters(state_folder()) if one.pid == process.pid]
        return bool(found)

    _await(told, process, log, within_s=_START_S)
    return found[0]


def _told(baton: tuple[str, ...], name: str) -> dict[str, str]:
    """The environment of a machine that has none of the first one's, with what it is told."""
    command = (*baton, "join", "--label", f"{LABEL}={name}", "-o", "json")
    done = subprocess.run(command, check=True, capture_output=True, timeout=_START_S, cwd=_ROOT)
    told: dict[str, str] = json.loads(done.stdout)["environment"]
    return {name: value for name, value in os.environ.items() if "RAY" not in name} | told


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours and all that it has started."""
    family = descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(90)
    left = alive(family)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
