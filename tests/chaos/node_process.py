"""One more node of a Ray cluster on this machine: `-m tests.chaos.node_process ADDRESS CPUS`.

As Ray's own `cluster_utils` has it; its command refuses where a cluster keeps to loopback. Prints
`UP RAYLET_PID`, and ends with everything of it on SIGTERM, or when its raylet has ended.
"""

# ruff: noqa: T201 - the parent reads what it prints

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.fakes.processes import REPOSITORY, start_process, stop_process, wait_output

_OBJECT_STORE_BYTES = 80 * 1024 * 1024
_POLL_S = 0.2
_START_S = 60.0
_END_S = 20.0


@contextmanager
def running_node(
    *options: str, log: Path, environment: Mapping[str, str], exec_prefix: tuple[str, ...] = ()
) -> Iterator[int]:
    """A node with these options of the command line; gives its raylet's process."""
    command = (*exec_prefix, sys.executable, "-m", "tests.chaos.node_process", *options)
    process = start_process(command, log, environment, folder=REPOSITORY)
    try:
        yield int(wait_output(r"^UP (\d+)$", process, log, timeout_s=_START_S)[1])
    finally:
        stop_process(process, within_s=_END_S)


def main(options: argparse.Namespace) -> None:
    """Be a node until an order to end."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    params = RayParams(
        gcs_address=options.address,
        node_ip_address=options.ip,
        num_cpus=options.cpus,
        num_gpus=0,
        labels=dict(item.split("=", 1) for item in options.label),
        temp_dir=options.temp_dir,
        object_store_memory=_OBJECT_STORE_BYTES,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=False,
        dashboard_agent_listen_port=None,
    )
    node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    print(f"UP {raylets[0].pid}", flush=True)
    while not stop.wait(_POLL_S) and raylets[0].status() != psutil.STATUS_ZOMBIE:
        pass
    node.kill_all_processes(check_alive=False, allow_graceful=False)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("cpus", type=int)
    parser.add_argument("--ip", default="127.0.0.1")
    parser.add_argument("--label", action="append", default=[], help="name=value")
    parser.add_argument("--temp-dir")
    return parser.parse_args()


if __name__ == "__main__":
    main(_parse_options())
