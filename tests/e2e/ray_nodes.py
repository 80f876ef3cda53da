"""Ray as somebody else starts it, by hand: a head and a worker on this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.deployments import alive, descendants
from tests.fakes.free_ports import free_port
from tests.fakes.scaled_deadline import ScaledDeadline

HEAD, WORKER = "127.0.0.1", "127.0.0.2"
_RAY = Path(sys.executable).with_name("ray")
_UP_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A cluster of two nodes; only the worker has CPUs."""

    address: str
    environment: Mapping[str, str]
    """Of whoever may join it."""
    processes: tuple[psutil.Process, ...]
    """Of both nodes, as they were at the start."""

    def all_run(self) -> bool:
        """Whether none of the nodes' own processes has ended."""
        return all(one.is_running() for one in self.processes)


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """A head and a worker that ask for a token; ended, with what they started, at the end."""
    # Sockets lie below it: a short path.
    with (
        tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as name,
        contextlib.ExitStack() as ends,
    ):
        folder, port = Path(name), free_port()
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "BATON_"))}
        environment |= own | {"RAY_USAGE_STATS_ENABLED": "0", "NO_COLOR": "1"}
        address = f"{HEAD}:{port}"
        head = ("--head", "--port", str(port), "--node-ip-address", HEAD, "--num-cpus", "0")
        worker = ("--address", address, "--node-ip-address", WORKER, "--num-cpus", "4")
        started: list[subprocess.Popen[bytes]] = []
        for words in (
            (*head, "--include-dashboard=false", "--temp-dir", str(folder / "r")),
            worker,
        ):
            log = folder / f"{len(started)}.log"
            process = _started(words, log, environment)
            ends.callback(_ended, process)
            _await_runtime(process, log)
            started.append(process)
        below = [one for process in started for one in descendants(process.pid)]
        # Agents and workers come and go; these are what a node is.
        nodes = tuple(one for one in below if one.name() in {"raylet", "gcs_server"})
        yield Nodes(address=address, environment=environment, processes=nodes)


def _started(
    words: tuple[str, ...], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [str(_RAY), "start", "--block", "--object-store-memory", "100000000", *words]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment
        )


def _await_runtime(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = ScaledDeadline(_UP_S)
    while "Ray runtime started" not in (said := log.read_text(errors="replace")):
        assert process.poll() is None, f"ray start ended:\n{said}"
        assert not deadline.passed(), f"no node yet:\n{said}"
        time.sleep(0.2)


def _ended(process: subprocess.Popen[bytes]) -> None:
    family = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for one in alive(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()
