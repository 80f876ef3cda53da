"""Gathers facts for the checks before a start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil

from baton.domain.errors import ClusterFailed
from baton.engine.gpus import count_gpus, driver_cuda_version
from baton.serving.front.data_path import port_is_free
from baton.serving.versions import PACKAGES

_Answer = TypeVar("_Answer")
SERVER_PORT = "server.port"
_NODE_TIMEOUT_S = 60.0
"""A node may have to start a worker process first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortListener:
    """The process that listens on a port; without a pid if it is another user's."""

    pid: int | None
    program: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFact:
    """A port in a configuration."""

    key: str
    host: str
    port: int
    free: bool
    listener: PortListener | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One machine."""

    port: PortFact
    available_memory_bytes: int
    gpus: int
    versions: Mapping[str, str | None]
    """None: not installed."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA of the GPUs' driver; None: no driver, or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A running Ray cluster."""

    cpus: float
    gpus: float
    versions: Mapping[str, Mapping[str, str | None]]
    labels: tuple[Mapping[str, str], ...] = ({},)


def machine_facts(host: str, port: int) -> MachineFacts:
    """This machine, now."""
    return MachineFacts(
        port=port_fact(SERVER_PORT, host, port),
        available_memory_bytes=available_memory_bytes(),
        gpus=count_gpus(os.environ),
        driver_cuda=driver_cuda_version(),
        versions=installed_versions(PACKAGES),
    )


def port_fact(key: str, host: str, port: int) -> PortFact:
    """Whether the port that a key sets is free on this machine, and else its listener."""
    free = port_is_free(host, port)
    listener = None if free else port_listener(port)
    return PortFact(key=key, host=host, port=port, free=free, listener=listener)


def port_listener(port: int) -> PortListener | None:
    """The process that listens on a TCP port of this machine; None if none is visible."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:  # macOS shows them to root only
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.laddr[1:] != (port,):
            continue
        if connection.pid is None:
            return PortListener(pid=None)
        with contextlib.suppress(psutil.Error):
            return PortListener(pid=connection.pid, program=psutil.Process(connection.pid).name())
    return None


def available_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory for new processes: the machine's, or the container's if that is less."""
    available: int = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return available
    return min(available, max(0, limit - used))


def installed_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions from the packages' metadata: nothing is imported."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    # The CPU build of vLLM is a distribution of its own.
    for distribution in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def cluster_facts(packages: Sequence[str]) -> ClusterFacts:
    """The connected cluster, from a small task on every node; raises as `call_on_nodes`."""
    import ray

    arguments = {str(node["NodeID"]): (tuple(packages),) for node in ray.nodes() if node["Alive"]}
    return replace(cluster_resources(), versions=call_on_nodes(installed_versions, arguments))


def call_on_nodes(
    call: Callable[..., _Answer], arguments: Mapping[str, tuple[object, ...]]
) -> Mapping[str, _Answer]:
    """The results of a call on these nodes, by their names; all nodes run it at once.

    Args:
        call: Runs on each node, in a process of its own.
        arguments: Of the call, by the id of the node.

    Raises:
        TimeoutError: a node did not answer.
        ClusterFailed: a node cannot run baton.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote_call = ray.remote(num_cpus=0)(call)
    refs = {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": remote_call.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*arguments[node["NodeID"]])
        for node in ray.nodes()
        if node["NodeID"] in arguments
    }
    deadline_at_s = time.monotonic() + _NODE_TIMEOUT_S
    return {name: _node_result(name, ref, deadline_at_s) for name, ref in refs.items()}


def _node_result(node: str, ref: object, deadline_at_s: float) -> Any:  # noqa: ANN401 - as the node has it
    import ray

    try:
        return ray.get(ref, timeout=max(0.0, deadline_at_s - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"node {node} did not answer") from error
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1]
        raise ClusterFailed(
            f"node {node} cannot run baton: {why}",
            "install the same baton there, for the Python that Ray runs on",
        ) from error


def cluster_resources() -> ClusterFacts:
    """The resources of the connected cluster, without versions."""
    import ray

    totals = cast("dict[str, float]", ray.cluster_resources())
    return ClusterFacts(
        cpus=totals.get("CPU", 0.0),
        gpus=totals.get("GPU", 0.0),
        versions={},
        labels=tuple(node["Labels"] for node in ray.nodes() if node["Alive"]),
    )


def with_available_resources(facts: ClusterFacts) -> ClusterFacts:
    """The facts of a shared cluster: only free resources count."""
    import ray

    available = cast("dict[str, float]", ray.available_resources())
    return replace(facts, cpus=available.get("CPU", 0.0), gpus=available.get("GPU", 0.0))
