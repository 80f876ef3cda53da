"""What the fleet link costs: CPU per token at both ends, and CPU of a large idle fleet.

Prints one JSON object. The two ends run in processes of their own, so that each one's CPU time is
its own (ZMQ's I/O thread included). Run: `python benchmarks/link.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import uvloop
import zmq

from baton.domain.events import Event, ReplicaJoined, StepProduced
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import Leg, LegKind, LegOutput, Ticket
from baton.runtime.link.client import LinkClient
from baton.runtime.link.server import LinkServer

PACE_S = 0.005
"""A decode step of a fast engine: the paced figure includes the wakeups that real streams cost."""


def make_facts(replica_id: str) -> ReplicaFacts:
    """Return facts that differ in the id only."""
    return ReplicaFacts(
        replica_id=replica_id,
        pool="decode",
        role=Role.DECODE,
        model="none",
        engine="benchmark",
        engine_version="1",
        block_size_tokens=16,
        kv_blocks=1,
        kv_block_bytes=1,
        max_len_tokens=1,
        max_running_requests=1,
        max_batched_tokens=1,
        layout="none",
    )


class Shape(NamedTuple):
    """A stream: `steps` engine steps, `pace_s` apart, each with one token for `batch` legs."""

    batch: int = 0
    steps: int = 0
    pace_s: float = 0.0


class Generator:
    """Sends a step for all submitted legs, `steps` times, once the batch is complete."""

    def __init__(self, shape: Shape) -> None:
        self.server: LinkServer | None = None
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._legs: list[str] = []
        self._batch = shape.batch
        self._left = shape.steps
        self._pace_s = shape.pace_s
        self._cpu_at_start_s = 0.0

    def submit(self, leg: Leg) -> None:
        """Take a leg; the last one starts the stream."""
        self._legs.append(leg.leg_id)
        if len(self._legs) == self._batch:
            self._cpu_at_start_s = time.process_time()
            self._step()

    def _step(self) -> None:
        if self.server is None:
            return
        if not self._left:
            self.ended.set_result(time.process_time() - self._cpu_at_start_s)
            return
        token = (self._left,)
        self._left -= 1
        self.server.step([LegOutput(leg_id, token) for leg_id in self._legs])
        asyncio.get_running_loop().call_later(self._pace_s, self._step)

    def abort(self, leg_ids: tuple[str, ...]) -> None:
        """Nobody aborts here."""

    def orphan(self, leg_ids: tuple[str, ...]) -> None:
        """Legs end with the benchmark."""

    def release(self, ticket: Ticket) -> None:
        """Nobody releases here."""

    def sync_cache(self, *, at_once: bool) -> None:
        """There is no cache."""

    def check_side_channel(self, source_id: str, address: str) -> bool:
        """Nobody checks here."""
        return False

    def beat(self) -> tuple[Load, bool]:
        """Return no load."""
        return Load(), False

    def links(self) -> tuple[LinkTotals, ...]:
        """Nothing is pulled."""
        return ()


async def replica_side(pipe: Connection, shape: Shape) -> None:
    """Serve one stream; reports the address, then the CPU seconds it took."""
    generator = Generator(shape)
    server = generator.server = LinkServer(make_facts("r"), generator)
    pipe.send(server.bind("tcp://127.0.0.1:0"))
    pipe.send(await generator.ended)
    await asyncio.to_thread(pipe.recv)
    await server.close()


class Counter:
    """Counts tokens as a driver would see them."""

    def __init__(self, wanted: int) -> None:
        self.joined = asyncio.Event()
        self.done = asyncio.Event()
        self._left = wanted

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, StepProduced):
            self._left -= len(event.outputs)
            if self._left <= 0:
                self.done.set()
        elif isinstance(event, ReplicaJoined):
            self.joined.set()


async def stream(address: str, shape: Shape) -> tuple[float, float]:
    """Return CPU and wall seconds of the coordinator's side of one stream."""
    counter = Counter(shape.batch * shape.steps)
    client = LinkClient("benchmark", counter)
    client.connect("r", address)
    async with asyncio.timeout(30):
        await counter.joined.wait()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for n in range(shape.batch):
        leg_id = f"chatcmpl-{n:032x}/0"
        leg = Leg(
            leg_id=leg_id,
            request_id=leg_id,
            kind=LegKind.LOCAL,
            prompt_token_ids=(1,) * 2000,
            max_tokens=shape.steps,
        )
        if client.submit("r", leg) is not None:
            sys.exit("the benchmark's own legs were refused")
    async with asyncio.timeout(300):
        await counter.done.wait()
    spent = time.process_time() - cpu_s, time.perf_counter() - wall_s
    await client.close()
    return spent


def in_process(
    target: Callable[..., None], *arguments: object
) -> tuple[multiprocessing.Process, Connection]:
    """Start the other side in a fresh interpreter."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    return process, here  # type: ignore[return-value]


def _replica_main(pipe: Connection, shape: Shape) -> None:
    uvloop.run(replica_side(pipe, shape))


def measure_stream(shape: Shape) -> dict[str, float]:
    """Return microseconds of CPU per token at both ends."""
    process, pipe = in_process(_replica_main, shape)
    coordinator_cpu_s, wall_s = uvloop.run(stream(pipe.recv(), shape))
    replica_cpu_s = pipe.recv()
    pipe.send("end")
    process.join(10)
    tokens = shape.batch * shape.steps
    return {
        **shape._asdict(),
        "coordinator_us_per_token": round(coordinator_cpu_s / tokens * 1e6, 3),
        "replica_us_per_token": round(replica_cpu_s / tokens * 1e6, 3),
        "tokens_per_s": round(tokens / wall_s),
    }


async def fleet_side(pipe: Connection, replicas: int) -> None:
    """Be many idle replicas; reports their addresses, then the CPU seconds of all of them."""
    servers = [LinkServer(make_facts(f"r{n}"), Generator(Shape())) for n in range(replicas)]
    pipe.send([server.bind("tcp://127.0.0.1:0") for server in servers])
    for _ in range(2):
        await asyncio.to_thread(pipe.recv)
        pipe.send(time.process_time())
    for server in servers:
        await server.close()


def _fleet_main(pipe: Connection, replicas: int) -> None:
    uvloop.run(fleet_side(pipe, replicas))


async def idle(pipe: Connection, replicas: int, idle_s: float) -> dict[str, float]:
    """Return the share of a core that an idle fleet costs on each side."""
    client = LinkClient("benchmark", lambda _: None)
    for n, address in enumerate(await asyncio.to_thread(pipe.recv)):
        client.connect(f"r{n}", address)
    async with asyncio.timeout(30):
        while len(client.joined_ids) < replicas:  # noqa: ASYNC110 - a benchmark may poll
            await asyncio.sleep(0.05)
    await asyncio.to_thread(pipe.send, "begin")
    theirs_s, mine_s = await asyncio.to_thread(pipe.recv), time.process_time()
    await asyncio.sleep(idle_s)
    mine_s = time.process_time() - mine_s
    await asyncio.to_thread(pipe.send, "end")
    theirs_s = await asyncio.to_thread(pipe.recv) - theirs_s
    await client.close()
    return {
        "replicas": replicas,
        "coordinator_core_fraction": round(mine_s / idle_s, 4),
        "core_fraction_per_replica": round(theirs_s / idle_s / replicas, 5),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--idle-s", type=float, default=5.0)
    options = parser.parse_args()
    unpaced = measure_stream(Shape(options.batch, options.steps))
    paced = measure_stream(Shape(options.batch, options.steps, PACE_S))
    process, pipe = in_process(_fleet_main, options.replicas)
    idle_fleet = uvloop.run(idle(pipe, options.replicas, options.idle_s))
    process.join(10)
    result = {
        "unpaced": unpaced,
        "paced": paced,
        "idle": idle_fleet,
        "python": platform.python_version(),
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
