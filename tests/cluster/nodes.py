"""A baton over several Ray nodes on this machine: one that `baton up` starts, others that join it.

Every node has a network namespace, a raylet, a folder for temporary files and a label
(`baton/node: NAME`) of its own. Nodes that join have the environment that `baton join` tells, which
is how Serve's settings and the cluster's token reach their workers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from tests.chaos.node_process import running_node
from tests.cluster.network import NetworkNode, network
from tests.e2e.deployments import CONFIGS, SERVING, Deployment
from tests.fakes.processes import (
    REPOSITORY,
    start_process,
    stop_process,
    wait_output,
    wait_until_holds,
)

LABEL = "baton/node"
_PORT = 8000
_START_S = 60.0
_SERVING_S = 400.0


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
def running_cluster(config: str, folder: Path, *, joining: tuple[str, ...]) -> Iterator[Cluster]:
    """`baton up` on a node `head`, with further nodes that join it; ended in good order."""
    with network("head", *joining) as network_nodes, ExitStack() as exit_stack:
        head, log = network_nodes["head"], folder / "up.log"
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
        baton = (*head.exec_prefix, sys.executable, "-m", "baton.cli.main")
        process = start_process(
            (*baton, "up", *options), log, os.environ | {"NO_COLOR": "1"}, folder=REPOSITORY
        )
        exit_stack.callback(stop_process, process)
        state = _cluster_state(process, log)
        nodes = {}
        for name in joining:
            environment = _join_environment(baton, name)
            nodes[name] = exit_stack.enter_context(
                _join_node(network_nodes[name], state, environment, folder)
            )
        wait_output(SERVING, process, log, timeout_s=_SERVING_S)
        deployment = Deployment(
            url=f"http://{head.address}:{_PORT}",
            process=process,
            log=log,
            options=tuple(options),
            exec_prefix=head.exec_prefix,
        )
        yield Cluster(deployment=deployment, head=head, nodes=nodes)


@contextmanager
def _join_node(
    network_node: NetworkNode, state: ClusterState, environment: dict[str, str], folder: Path
) -> Iterator[Node]:
    log = folder / f"{network_node.name}.log"
    # Its sockets lie below, and a socket's path holds 107 bytes.
    temp_dir = tempfile.mkdtemp(prefix=f"bt-{network_node.name[:4]}-", dir="/tmp")
    node_options = (
        *("--ip", network_node.address, "--temp-dir", temp_dir),
        *("--label", f"{LABEL}={network_node.name}"),
    )
    try:
        with running_node(
            *(state.address, "4", *node_options),
            log=log,
            environment=environment,
            exec_prefix=network_node.exec_prefix,
        ) as raylet:
            yield Node(network=network_node, raylet=raylet)
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


def _cluster_state(process: subprocess.Popen[bytes], log: Path) -> ClusterState:
    """How the deployment of this process is found, once its Ray is up."""
    states: list[ClusterState] = []

    def is_found() -> bool:
        states[:] = [
            cluster for cluster in running_clusters(state_folder()) if cluster.pid == process.pid
        ]
        return bool(states)

    wait_until_holds(is_found, process, log, timeout_s=_START_S)
    return states[0]


def _join_environment(baton: tuple[str, ...], name: str) -> dict[str, str]:
    """The environment of a machine that has none of the first one's, with what it is told."""
    command = (*baton, "join", "--label", f"{LABEL}={name}", "-o", "json")
    process = subprocess.run(
        command, check=True, capture_output=True, timeout=_START_S, cwd=REPOSITORY
    )
    environment: dict[str, str] = json.loads(process.stdout)["environment"]
    return {name: value for name, value in os.environ.items() if "RAY" not in name} | environment
