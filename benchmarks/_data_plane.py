"""The data plane of a deployment without Ray: processes of replicas, one ingress.

An ingress is the one that Ray Serve would run, with either of vLLM's API servers in front; it
gets its replicas as an argument, where otherwise it would ask Ray. Each process prints as JSON
where it is, serves until an order to stop, and prints the cost of its metrics in another line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from baton.config import DeploymentConfig, load_config
from baton.domain.names import addresses
from baton.engine.vllm.gate.gate import AsgiApp
from baton.runtime.link.options import LinkOptions
from baton.runtime.replica_host import ReplicaHost
from baton.serving.ingress.model_ingress import ModelIngress
from baton.serving.ray.membership import Member
from baton.serving.replica.deployment import host_options, metrics_endpoint
from baton.serving.replica.engines import ReplicaSite, build_engine
from baton.serving.shared.names import LINK_ADDRESS, REPLICA_ID
from benchmarks._systems import SCENARIOS

_HOST = "127.0.0.1"
_NS = 1e-9
_BACKLOG = 2048
_ANSWER_FD = 100
"""A file descriptor of its own."""


class CpuTimed:
    """Adds up the CPU time of what it calls, and how often."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.calls = 0
        self.cpu_ns = 0

    def __call__(self, argument: Any) -> Any:  # noqa: ANN401 - the arguments of any function
        started_ns = time.thread_time_ns()
        try:
            return self._function(argument)
        finally:
            self.cpu_ns += time.thread_time_ns() - started_ns
            self.calls += 1


class StaticMembership:
    """The replicas of an ingress, given once in place of Ray's table."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._notify = tell

    async def start(self) -> None:
        """Tell."""
        self._notify()

    async def stop(self) -> None:
        """Nothing is to be stopped."""


def read_config(scenario: str, overrides: Sequence[str]) -> DeploymentConfig:
    """A scenario, with what a run changes of it."""
    return load_config([SCENARIOS / f"{scenario}.yaml"], env={}, sets=overrides).config


async def replicas_main(config: DeploymentConfig, names: Sequence[str]) -> None:
    """Be the replicas that are named, each `POOL-NUMBER`."""
    hosts, endpoints = {}, []
    for name in names:
        pool = pool_of(name)
        site = ReplicaSite(
            replica_id=name,
            pool=pool,
            host=_HOST,
            reserve_ports=lambda _host, base, _count: base,
        )
        engine = build_engine(config, site)
        bind = addresses.format_endpoint("tcp", _HOST, 0)
        host = ReplicaHost(engine, bind=bind, options=host_options(config, pool))
        await host.start()
        hosts[site.replica_id] = host
        registry = CollectorRegistry()
        endpoint = metrics_endpoint(config, host, address=_HOST, series=registry)
        if endpoint is not None:
            await endpoint.start()
            endpoints.append(endpoint)
    print_json(
        links={name: host.address for name, host in hosts.items()},
        metrics=[endpoint.address for endpoint in endpoints],
    )
    await wait_for_stop_signal()
    print_json()
    for endpoint in endpoints:
        await endpoint.close()
    for host in hosts.values():
        await host.close()


async def ingress_main(
    config: DeploymentConfig, port: int, addresses: Mapping[str, str], *, is_timed: bool
) -> None:
    """Be the ingress, and serve HTTP by itself; `is_timed` is what its metrics cost it."""
    members = frozenset(
        Member(
            replica_id=name,
            deployment=pool_of(name),
            metadata={REPLICA_ID: name, LINK_ADDRESS: address},
            node_ip=_HOST,
        )
        for name, address in addresses.items()
    )
    ingress = ModelIngress(config, app="benchmark", coordinator_id="ingress", link=LinkOptions())
    ingress._membership = StaticMembership(  # type: ignore[assignment]  # noqa: SLF001 - the seam to Ray
        lambda: ingress._fleet_watch.on_members(members)  # noqa: SLF001 - likewise
    )
    telemetry = ingress.telemetry
    timed_events, timed_records = CpuTimed(telemetry.on_event), CpuTimed(telemetry._metrics.record)  # noqa: SLF001
    if is_timed and telemetry.recorders:
        setattr(telemetry, "on_event", timed_events)  # noqa: B010 - a method is put another in front of
        setattr(telemetry._metrics, "record", timed_records)  # noqa: B010, SLF001 - likewise
    app = await ingress.start(_HOST)
    async with _serve_http(ingress, app, port):
        print_json(metrics=[address] if (address := telemetry.address) else [])
        await wait_for_stop_signal()
        print_json(
            steps=timed_events.calls,
            steps_cpu_s=timed_events.cpu_ns * _NS,
            requests=timed_records.calls,
            requests_cpu_s=timed_records.cpu_ns * _NS,
        )
    await ingress.close()


@asynccontextmanager
async def _serve_http(ingress: ModelIngress, app: AsgiApp, port: int) -> AsyncIterator[None]:
    """Have clients come to a port, as they come to that of an ingress replica."""
    with socket.create_server((_HOST, port), backlog=_BACKLOG) as listener:
        if ingress.rust_ingress is not None:
            await ingress.rust_ingress.open(listener)
            yield
            return
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=600,
        )
        server = uvicorn.Server(config)
        serve_task = asyncio.create_task(server.serve(sockets=[listener]))
        yield
        server.should_exit = True
        await serve_task


def pool_of(replica_id: str) -> str:
    """The pool that a replica is named after."""
    return replica_id.rpartition("-")[0]


async def wait_for_stop_signal() -> None:
    """Wait for the signal."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, stopped.set)
    await stopped.wait()


def print_json(**facts: object) -> None:
    """A line of JSON."""
    os.write(_ANSWER_FD, json.dumps(facts).encode() + b"\n")


def redirect_stdout() -> None:
    """Other output goes to the log: vLLM writes its log to standard output."""
    os.dup2(1, _ANSWER_FD)
    os.dup2(2, 1)


def main(role: str, scenario: str, sets: str, *arguments: str) -> None:
    """Be one of the processes: `replicas SCENARIO SETS NAMES`, `ingress SCENARIO SETS PORT LINKS`.

    SETS, NAMES and LINKS are JSON. As `timed-ingress` it says what its metrics cost it.
    """
    redirect_stdout()
    config = read_config(scenario, json.loads(sets))
    if role == "replicas":
        (names,) = arguments
        uvloop.run(replicas_main(config, json.loads(names)))
    else:
        port, links = arguments
        is_timed = role == "timed-ingress"
        uvloop.run(ingress_main(config, int(port), json.loads(links), is_timed=is_timed))


if __name__ == "__main__":
    main(*sys.argv[1:])
