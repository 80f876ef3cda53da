"""The data plane of a small deployment without Ray: one process of replicas, one ingress.

An ingress is the one that Ray Serve would run, with vLLM's own API server in front; it is told who
its replicas are, where otherwise it would ask Ray. Each process says in a line of JSON where it is,
serves until it is told to stop, and says in another one what its metrics cost it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from baton.config import DeploymentConfig, load_config
from baton.runtime.link.options import LinkOptions
from baton.runtime.replica_host import ReplicaHost
from baton.serving.engines import ReplicaSite, build_engine
from baton.serving.ingress_body import IngressBody
from baton.serving.membership import Member
from baton.serving.metadata import LINK_ADDRESS, REPLICA_ID
from baton.serving.replica import host_options, metrics_endpoint
from benchmarks._systems import SCENARIOS

_HOST = "127.0.0.1"
_NS = 1e-9
_ANSWERS = 100
"""A file descriptor that nobody else uses."""


class Timed:
    """Adds up the CPU time of what it calls, and how often."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.calls = 0
        self.cpu_ns = 0

    def __call__(self, argument: Any) -> Any:  # noqa: ANN401 - whatever the function takes
        began_ns = time.thread_time_ns()
        try:
            return self._function(argument)
        finally:
            self.cpu_ns += time.thread_time_ns() - began_ns
            self.calls += 1


class Told:
    """Who an ingress' replicas are, told once; in place of Ray's word."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    async def start(self) -> None:
        """Tell."""
        self._tell()

    async def stop(self) -> None:
        """Nothing is to be stopped."""


def read_config(sets: list[str]) -> DeploymentConfig:
    """The scenario, with what a run changes of it."""
    return load_config([SCENARIOS / "metrics.yaml"], env={}, sets=sets).config


async def replicas_main(sets: list[str]) -> None:
    """Be one replica of each pool."""
    config, hosts, endpoints = read_config(sets), {}, []
    for pool in config.pools:
        site = ReplicaSite(
            replica_id=f"{pool}-0",
            pool=pool,
            host=_HOST,
            reserve_ports=lambda _host, base, _count: base,
        )
        engine = build_engine(config, site)
        host = ReplicaHost(engine, bind=f"tcp://{_HOST}:0", options=host_options(config, pool))
        await host.start()
        hosts[site.replica_id] = host
        series = CollectorRegistry()
        endpoint = metrics_endpoint(config, host, address=_HOST, series=series)
        if endpoint is not None:
            await endpoint.start()
            endpoints.append(endpoint)
    say(
        links={name: host.address for name, host in hosts.items()},
        metrics=[endpoint.address for endpoint in endpoints],
    )
    await told_to_stop()
    say()
    for endpoint in endpoints:
        await endpoint.close()
    for host in hosts.values():
        await host.close()


async def ingress_main(sets: list[str], port: str, links: str) -> None:
    """Be the ingress, and serve HTTP by itself."""
    addresses: Mapping[str, str] = json.loads(links)
    members = frozenset(
        Member(
            replica_id=name,
            deployment=name.partition("-")[0],
            metadata={REPLICA_ID: name, LINK_ADDRESS: address},
            node_ip=_HOST,
        )
        for name, address in addresses.items()
    )
    body = IngressBody(
        read_config(sets), app="benchmark", coordinator_id="ingress", link=LinkOptions()
    )
    body._membership = Told(  # type: ignore[assignment]  # noqa: SLF001 - the seam to Ray
        lambda: body._watch.on_members(members)  # noqa: SLF001 - likewise
    )
    telemetry = body.telemetry
    steps, requests = Timed(telemetry.on_event), Timed(telemetry._metrics.record)  # noqa: SLF001
    if telemetry.recorders:
        setattr(telemetry, "on_event", steps)  # noqa: B010 - a method is put another in front of
        setattr(telemetry._metrics, "record", requests)  # noqa: B010, SLF001 - likewise
    app = await body.start(_HOST)
    config = uvicorn.Config(
        app,
        host=_HOST,
        port=int(port),
        loop="none",
        http="httptools",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=600,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    say(metrics=[address] if (address := telemetry.address) else [])
    await told_to_stop()
    say(
        steps=steps.calls,
        steps_cpu_s=steps.cpu_ns * _NS,
        requests=requests.calls,
        requests_cpu_s=requests.cpu_ns * _NS,
    )
    server.should_exit = True
    await serving
    await body.close()


async def told_to_stop() -> None:
    """Wait for the signal."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, stopped.set)
    await stopped.wait()


def say(**facts: object) -> None:
    """A line of JSON."""
    os.write(_ANSWERS, json.dumps(facts).encode() + b"\n")


def keep_answers_apart() -> None:
    """Whatever else is written goes to the log: vLLM writes its log to standard output."""
    os.dup2(1, _ANSWERS)
    os.dup2(2, 1)


def main(role: str, sets: str, *rest: str) -> None:
    """Be one of the two processes."""
    keep_answers_apart()
    if role == "replicas":
        uvloop.run(replicas_main(json.loads(sets)))
    else:
        port, links = rest
        uvloop.run(ingress_main(json.loads(sets), port, links))


if __name__ == "__main__":
    main(*sys.argv[1:])
