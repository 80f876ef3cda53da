"""A coordinator in a process of its own, with as much HTTP before it as clients of a load need.

It stands for an ingress where one is to be killed or stopped: `POST /v1/completions` with a prompt
of token ids streams events as vLLM's frontend does, and refuses by status and Retry-After. What
that frontend does beyond it is tested behind the real one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

from aiohttp import web

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import RequestRecord
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.runtime.link.options import LinkOptions
from tests.chaos.history import Ending, Exchange
from tests.chaos.local_ingress import FleetChange, Ingress
from tests.chaos.remote import RemoteProcess, serve_commands

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSpec:
    """How a coordinator is made."""

    name: str
    limits: CoordinatorLimits
    link: LinkOptions
    disaggregate: Disaggregate
    probing: ProbeOptions
    coordinators: int
    """How many there are in all."""
    seed: int

    def make_ingress(self, payload: bytes = b"") -> Ingress:
        """The coordinator, on the running loop."""
        placer = PredictedPlacer(PredictedOptions(disaggregate=self.disaggregate), seed=self.seed)
        coordinator = Coordinator(
            limits=self.limits,
            placer=placer,
            coordinators=self.coordinators,
            probing=self.probing,
            seed=self.seed,
        )
        return Ingress(self.name, coordinator, link=self.link, payload=payload)


def serve(plan: CoordinatorSpec, commands: Connection) -> None:
    """The process."""
    asyncio.run(_serve(plan, commands))


async def _serve(plan: CoordinatorSpec, commands: Connection) -> None:
    ingress = plan.make_ingress()
    app = web.Application()
    app.router.add_post("/v1/completions", _Completions(ingress).answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, _HOST, 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        await serve_commands(commands, f"http://{_HOST}:{port}", _CommandHandler(ingress).handle)
    finally:
        await ingress.close()
        await runner.cleanup()


class _CommandHandler:
    """Carries out the orders of a front."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    def handle(self, command: str, value: object) -> object:
        match command:
            case "connect":
                self._ingress.link.connect(*cast("tuple[str, str]", value))
            case "forget":
                self._ingress.link.disconnect(cast("str", value))
            case "knows":
                return sorted(self._ingress.driver.fleet().replicas)
            case "heard":
                return self._ingress.fleet_changes
            case "records":
                return self._ingress.records
            case "held":
                self._ingress.coordinator.check_integrity()
                return self._ingress.held_resources()
            case _:
                raise ValueError(f"no order is called {command!r}")
        return None


@dataclass(slots=True, kw_only=True)
class _StreamedExchange(Exchange):
    """An exchange whose tokens another process reads."""

    chunks: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    """None at the end. As long as the answer at most."""

    def add_tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        Exchange.add_tokens(self, token_ids, now_s)
        self.chunks.put_nowait(list(token_ids))

    def end(self, ending: Ending, now_s: float, reason: str = "") -> None:
        Exchange.end(self, ending, now_s, reason)
        self.chunks.put_nowait(None)


class _Completions:
    """Streams completions."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress
        self._numbers = itertools.count()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One completion; the client's own name of it is kept."""
        body = await request.json()
        name = request.headers.get("X-Request-Id") or f"unnamed-{next(self._numbers)}"
        exchange = _StreamedExchange(
            request_id=name, prompt=tuple(body["prompt"]), max_tokens=body["max_tokens"]
        )
        sending = asyncio.create_task(self._ingress.send(exchange))
        try:
            return await self._stream(request, exchange)
        finally:
            if not exchange.endings:
                self._ingress.cancel(exchange)
            await sending

    async def _stream(
        self, request: web.Request, exchange: _StreamedExchange
    ) -> web.StreamResponse:
        first = await exchange.chunks.get()
        if first is None:
            headers = {}
            if exchange.retry_after_s is not None:
                headers["Retry-After"] = f"{max(1.0, exchange.retry_after_s):.0f}"
            return web.Response(
                status=exchange.status or 500, text=exchange.reason, headers=headers
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk: list[int] | None = first
        while chunk is not None:
            await response.write(_event(token_ids=chunk, finish_reason=None))
            chunk = await exchange.chunks.get()
        if exchange.ending is Ending.FINISHED:
            await response.write(_event(token_ids=[], finish_reason="length"))
        else:
            await response.write(
                b"data: " + json.dumps({"error": exchange.reason}).encode() + b"\n\n"
            )
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class IngressProcess(RemoteProcess):
    """A coordinator's process, as its owner sees it."""

    def __init__(self, plan: CoordinatorSpec) -> None:
        super().__init__(plan.name, serve, plan)
        self.url = ""

    async def start(self) -> None:
        """Run; returns when clients can ask."""
        self.url = cast("str", await self.start_process())

    async def known_replicas(self) -> list[str]:
        """The replicas that it can send work to."""
        return cast("list[str]", await self.send_command("knows"))

    async def fleet_changes(self) -> list[FleetChange]:
        """What it has heard of replicas."""
        return cast("list[FleetChange]", await self.send_command("heard"))

    async def records(self) -> list[RequestRecord]:
        """What it wrote down of requests."""
        return cast("list[RequestRecord]", await self.send_command("records"))
