"""Unauthenticated peers at the links of a fleet that serves, and the cost of rejecting them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from baton.domain.events import Event, ReplicaJoined, StepCompleted
from baton.domain.fleet import Role
from baton.domain.handoff import LegOutput
from baton.runtime.link import codec, frames
from baton.runtime.link.client import LinkClient
from baton.runtime.link.keys import FleetKeys
from baton.runtime.link.options import LinkOptions
from tests.chaos.case import Engines, Outcome, at_least, at_most, case, exactly
from tests.chaos.load import Load
from tests.chaos.runs import collect_history, outcome, run_load
from tests.chaos.stage import SimStage, StageSpec, sim_stage
from tests.fakes.link_rig import running_client, running_host
from tests.fakes.scripted_engine import make_leg

_HANDSHAKE_S = 1.0
_STREAMS = Load(rate_per_s=50, requests=750)
"""50 a second for 15 s."""

ConnectPeer = Callable[[str], Coroutine[None, None, None]]
"""What a peer does at an address."""

# -------------------------------------------------------------------- S1: at the links


@case(
    "S1",
    "unauthenticated peers at links under load: no key, wrong keys, garbage, no bytes, a recording",
    engines=Engines.SIMULATED,
    minutes=1,
)
def unauthenticated_peers(_: Path) -> Outcome:
    """They hear nothing, are hung up on, and no stream notices them."""
    return asyncio.run(_unauthenticated_peers())


async def _unauthenticated_peers() -> Outcome:
    keys, peers = FleetKeys.generate(), UnauthenticatedPeers()
    link = LinkOptions(keys=keys, handshake_s=_HANDSHAKE_S)
    prefill, decode = Role.PREFILL, Role.DECODE
    plan = StageSpec(roles=(prefill, prefill, decode, decode), ingresses=2, link=link)
    async with sim_stage(plan) as stage:
        recorded_bytes = await _record_handshake(stage, link)

        async def connect_peers() -> None:
            until_s = time.monotonic() + 14.0
            while time.monotonic() < until_s:
                async with asyncio.TaskGroup() as group:
                    for replica in stage.replicas.values():
                        for visit in (
                            peers.without_encryption,
                            peers.with_other_keys,
                            peers.with_a_key_of_its_own(keys),
                            *(
                                peers.with_bytes(sent)
                                for sent in (b"\0" * 4096, recorded_bytes, b"")
                            ),
                        ):
                            group.create_task(visit(replica.address))

        exchanges = await run_load(stage, _STREAMS, connect_peers)
        history = await collect_history(stage, exchanges)
        lost = sum(ingress.link.counters.sessions_lost for ingress in stage.ingresses)
    bounds = (
        at_least("connections of unauthenticated peers", peers.came, 100),
        exactly("frames sent to unauthenticated peers", peers.received_frames, 0),
        exactly("connections that were not hung up on within a handshake + 2 s", peers.kept, 0),
        exactly("sessions that were lost", lost, 0),
    )
    return outcome(history, bounds, {"recording_bytes": len(recorded_bytes)})


class UnauthenticatedPeers:
    """Peers that connect, and the frames that they get."""

    def __init__(self) -> None:
        self.came = 0
        self.received_frames = 0
        self.kept = 0

    async def without_encryption(self, address: str) -> None:
        """As a coordinator of before, or another deployment's without keys."""
        await self._send_frames(address, lambda _socket: None)

    async def with_other_keys(self, address: str) -> None:
        """As a coordinator of another deployment."""
        await self._send_frames(address, FleetKeys.generate().apply_curve)

    def with_a_key_of_its_own(self, keys: FleetKeys) -> ConnectPeer:
        """Knowing the replicas' public key, and not the coordinators' secret one."""

        def guard(socket: zmq.Socket[Any]) -> None:
            replace(keys, coordinator_secret=FleetKeys.generate().coordinator_secret).apply_curve(
                socket
            )

        return lambda address: self._send_frames(address, guard)

    async def _send_frames(self, address: str, guard: Callable[[zmq.Socket[Any]], None]) -> None:
        self.came += 1
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            guard(peer)
            peer.connect(address)
            hello = frames.Open(frames.PROTOCOL_VERSION, "stranger", "s")
            for frame in (hello, frames.Submit(make_leg("theirs"))):
                # ZMQ has no peer left to send to, and waits, where the peer has closed already.
                with contextlib.suppress(zmq.Again):
                    await peer.send_multipart(codec.encode(frame), zmq.NOBLOCK)
            self.received_frames += bool(await peer.poll(500))

    def with_bytes(self, payload: bytes) -> ConnectPeer:
        """With these bytes, or with none: then it waits."""

        async def visit(address: str) -> None:
            self.came += 1
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(payload)
            try:
                async with asyncio.timeout(_HANDSHAKE_S + 2.0):
                    while await reader.read(65_536):
                        pass
            except TimeoutError:
                self.kept += 1
            except ConnectionError:
                pass  # hung up on, too
            finally:
                writer.close()

        return visit


async def _record_handshake(stage: SimStage, link: LinkOptions) -> bytes:
    """What a good coordinator says until it has joined, as an eavesdropper gets it."""
    replica = next(iter(stage.replicas.values()))
    host, _, port = replica.address.removeprefix("tcp://").rpartition(":")
    recorded = bytearray()
    pumps: list[asyncio.Task[None]] = []

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray
    ) -> None:
        while data := await reader.read(65_536):
            seen += data
            writer.write(data)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        pumps.append(asyncio.create_task(pump(reader, back, recorded)))
        pumps.append(asyncio.create_task(pump(there, writer, bytearray())))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with running_client("recorded", link=link) as (client, log):
        client.connect(replica.name, address)
        await log.wait_joined(timeout_s=10)
    server.close()
    for task in pumps:
        task.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    return bytes(recorded)


# -------------------------------------------------------------------- S2: what a frame costs


_FRAMES = 3000
_OUTPUTS = 64
_MAX_IN_FLIGHT = 50
"""Frames that may be on their way."""
_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of one frame, both ends together, microseconds."""

    all_us: float
    """Of all threads."""
    loop_us: float
    """Of the thread that runs both event loops: what others have to wait for."""


@case("S2", "what guarding links costs, by frames of 64 outputs", engines=Engines.NONE, minutes=1)
def cost_of_frames(_: Path) -> Outcome:
    """Both ways in one run, turn by turn; medians are compared."""
    encrypted, unencrypted = list[Cost](), list[Cost]()
    keys = FleetKeys.generate()
    for _turn in range(_ROUNDS):
        unencrypted.append(asyncio.run(_measure_frames(None)))
        encrypted.append(asyncio.run(_measure_frames(keys)))
    all_us = [
        statistics.median(cost.all_us for cost in costs) for costs in (unencrypted, encrypted)
    ]
    loop_us = [
        statistics.median(cost.loop_us for cost in costs) for costs in (unencrypted, encrypted)
    ]
    return Outcome(
        bounds=(
            at_most("CPU of a guarded frame to one in clear", all_us[1] / all_us[0], 1.5),
            at_most("of that, on the event loop", loop_us[1] / loop_us[0], 1.2),
        ),
        figures={
            "clear_us": round(all_us[0], 1),
            "guarded_us": round(all_us[1], 1),
            "clear_loop_us": round(loop_us[0], 1),
            "guarded_loop_us": round(loop_us[1], 1),
            "frames": _FRAMES,
            "turns": _ROUNDS,
        },
    )


async def _measure_frames(keys: FleetKeys | None) -> Cost:
    """Both ends in this process: sending, encrypting, decrypting, decoding."""
    link, steps = LinkOptions(keys=keys), 0
    first_output, joined = asyncio.Event(), asyncio.Event()

    def on_event(event: Event) -> None:
        nonlocal steps
        match event:
            case ReplicaJoined():
                joined.set()
            case StepCompleted():
                steps += 1
                first_output.set()

    async with running_host(link=link) as (host, engine):
        client = LinkClient("c", on_event, options=link)
        client.connect("decode-1", host.address)
        async with asyncio.timeout(120):
            await joined.wait()
            for number in range(_OUTPUTS):
                client.submit("decode-1", make_leg(f"leg-{number}"))
            await engine.watch.wait_until(lambda: len(engine.running) == _OUTPUTS)
            began_s, loop_s = _cpu_s(), time.thread_time()
            for step in range(_FRAMES):
                engine.emit(*(LegOutput(f"leg-{n}", (step,)) for n in range(_OUTPUTS)))
                while steps + _MAX_IN_FLIGHT < step:
                    first_output.clear()
                    await first_output.wait()
            while steps < _FRAMES:
                first_output.clear()
                await first_output.wait()
            cost = Cost(
                (_cpu_s() - began_s) / _FRAMES * 1e6, (time.thread_time() - loop_s) / _FRAMES * 1e6
            )
        await client.close()
    return cost


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
