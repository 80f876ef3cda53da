"""Ray as an operator starts it manually, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from baton.domain.names.addresses import is_loopback
from tests.fakes.free_ports import free_port
from tests.fakes.processes import (
    REPOSITORY,
    descendants,
    start_process,
    stop_process,
    wait_output,
)

HEAD, WORKER, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
_RAY = Path(sys.executable).with_name("ray")
_UP_S = 90.0
_FAKE_HEAD = "f" * 51 + "00000"
"""What the provider for tests calls the head. Source: Ray 2.60, `FAKE_HEAD_NODE_ID`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """A cluster that runs."""

    address: str
    dashboard: str
    """Where Ray's REST API is."""
    environment: Mapping[str, str]
    """Of every node that may join it."""
    processes: tuple[psutil.Process, ...]
    """Of all nodes, as they were at the start."""

    def are_all_running(self) -> bool:
        """Whether none of the nodes' own processes has ended."""
        return all(process.is_running() for process in self.processes)

    def kill_node(self, address: str) -> None:
        """End a node without notice; Ray's workers there end with it."""
        raylets = (process for process in self.processes if process.name() == "raylet")
        (raylet,) = (process for process in raylets if _is_at(address, process))
        raylet.kill()

    @contextlib.contextmanager
    def joined_node(self, address: str, folder: Path) -> Iterator[None]:
        """One more worker, whose logs are in this folder."""
        words = ("--address", self.address, *_worker_options(address, folder))
        log = folder / "node.log"
        process = _start_node((*words, "--num-gpus", "0"), log, self.environment)
        try:
            wait_output("Ray runtime started", process, log, timeout_s=_UP_S)
            yield
        finally:
            stop_process(process, within_s=30.0)


def _is_at(address: str, process: psutil.Process) -> bool:
    return f"--node_ip_address={address}" in process.cmdline()


def _worker_options(address: str, folder: Path) -> tuple[str, ...]:
    """Of a node with logs of its own, as another machine would have."""
    node_options = ("--node-ip-address", address, "--num-cpus", "4")
    return (*node_options, "--temp-dir", str(folder))


@contextlib.contextmanager
def two_nodes() -> Iterator[RayCluster]:
    """A head without CPUs and a worker, which ask for a token."""
    with _cluster(HEAD, "0", WORKER, token=True) as cluster:
        yield cluster


@contextlib.contextmanager
def three_nodes(*, gpus: int, path: Path) -> Iterator[RayCluster]:
    """A head and two workers that say to have GPUs, with a folder to import from."""
    variables = {"PYTHONPATH": os.pathsep.join((str(path), str(REPOSITORY)))}
    # Asked for CPUs, vLLM would look at no other platform; where no GPU is, baton asks for them.
    variables["VLLM_TARGET_DEVICE"] = "cuda"
    with _cluster(HEAD, "4", WORKER, THIRD, token=True, gpus=gpus, variables=variables) as cluster:
        yield cluster


@contextlib.contextmanager
def open_node() -> Iterator[RayCluster]:
    """One node that others could reach, and that asks no client for a token."""
    with _cluster(_reachable_address(), "4", token=False) as cluster:
        yield cluster


@contextlib.contextmanager
def autoscaling_node(
    types: Mapping[str, Mapping[str, object]], *, v2: bool
) -> Iterator[RayCluster]:
    """A head without CPUs whose autoscaler starts nodes of these types, on this machine.

    Not `ray.cluster_utils.AutoscalingCluster`: that begins with `ray stop --force`.
    """
    variables = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    if v2:
        variables |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": _FAKE_HEAD}
        variables |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": _FAKE_HEAD}
    with _cluster(
        _reachable_address(), "0", token=True, types=types, variables=variables
    ) as cluster:
        yield cluster


def _autoscaler_config(types: Mapping[str, Mapping[str, object]], head: str) -> dict[str, object]:
    """The configuration of an autoscaler with Ray's own provider for tests."""
    commands = ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "growing",
        "max_workers": 8,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 10,
        "docker": {},
        "auth": {},
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "disable_launch_config_check": True,
            "disable_node_updaters": True,
            "use_node_id_as_ip": True,
            "launch_multiple": True,
            "head_node_id": _FAKE_HEAD,
            "gcs_address": head,
        },
        "available_node_types": {
            **types,
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        },
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        **{f"{command}_commands": [] for command in commands},
    }


def _reachable_address() -> str:
    rows = [row for rows in psutil.net_if_addrs().values() for row in rows]
    addresses = [row.address for row in rows if row.family is socket.AF_INET]
    return next(address for address in addresses if not is_loopback(address))


@contextlib.contextmanager
def _cluster(
    head: str,
    head_cpus: str,
    *workers: str,
    token: bool,
    gpus: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
    types: Mapping[str, Mapping[str, object]] | None = None,
) -> Iterator[RayCluster]:
    """Nodes that are ended, with what they started, at the end."""
    with (
        # Sockets lie below it: a short path.
        tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as name,
        contextlib.ExitStack() as exit_stack,
    ):
        folder, address, dashboard_port = Path(name), f"{head}:{free_port()}", free_port()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "BATON_"))}
        environment = {**inherited, "RAY_USAGE_STATS_ENABLED": "0", "NO_COLOR": "1", **variables}
        environment |= _token(folder / "token") if token else {"RAY_AUTH_MODE": "disabled"}
        commands: list[tuple[str, ...]] = [
            (
                *("--head", "--port", address.rpartition(":")[2], "--num-cpus", head_cpus),
                *("--node-ip-address", head, "--ray-client-server-port", str(free_port())),
                *("--dashboard-port", str(dashboard_port), "--temp-dir", str(folder / "r")),
            )
        ]
        if types is not None:
            file = folder / "autoscaling.yaml"
            file.write_text(json.dumps(_autoscaler_config(types, address)))
            commands[0] += ("--autoscaling-config", str(file))
        for worker in workers:
            options = _worker_options(worker, folder / str(len(commands)))
            commands.append(("--address", address, *options))
        processes: list[subprocess.Popen[bytes]] = []
        for words in commands:
            log = folder / f"{len(processes)}.log"
            process = _start_node((*words, "--num-gpus", str(gpus)), log, environment)
            exit_stack.callback(stop_process, process, within_s=30.0)
            wait_output("Ray runtime started", process, log, timeout_s=_UP_S)
            processes.append(process)
        descendants_of_all = [
            descendant for process in processes for descendant in descendants(process.pid)
        ]
        # Agents and workers come and go; these are what a node is.
        nodes = tuple(
            descendant
            for descendant in descendants_of_all
            if descendant.name() in {"raylet", "gcs_server"}
        )
        yield RayCluster(
            address=address,
            dashboard=f"http://127.0.0.1:{dashboard_port}",
            environment=environment,
            processes=nodes,
        )


def _token(file: Path) -> dict[str, str]:
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def _start_node(
    words: tuple[str, ...], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [str(_RAY), "start", "--block", "--object-store-memory", "100000000", *words]
    # Two nodes of one machine, and others beside them: no port that Ray would have by default.
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]
    command += ["--dashboard-agent-listen-port", str(free_port())]
    return start_process(command, log, environment)
