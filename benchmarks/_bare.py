"""vLLM's own API server and one simulated engine, each in a process, with nothing between them.

    python -m benchmarks._bare engine FOLDER SETTINGS_JSON
    python -m benchmarks._bare api FOLDER SETTINGS_JSON MODEL PORT

The API server is vLLM's app on vLLM's `AsyncLLM`, under uvicorn with uvloop and httptools. The
engine takes each request as one leg and answers one message per step over vLLM's own wire: no
coordinator, no fleet link, no Ray, no proxy. Both processes end on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping

import uvicorn
import uvloop

from baton.domain.commands import Delivery
from baton.domain.fleet import ReplicaFacts, Role
from baton.domain.handoff import Leg, LegKind
from baton.domain.request import Request
from baton.engine.sim import SimEngine
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.runtime.process.clock import MonotonicClock
from baton.simulator.engine.settings import SimSettings

MODEL_NAME = "tiny"
_KEEP_ALIVE_S = 120
"""Longer than a run: HAProxy keeps its clients' connections too."""


def socket_addresses(folder: str) -> dict[str, str]:
    """Where vLLM's client binds its sockets."""
    return {f"{way}_address": f"ipc://{folder}/{way}" for way in ("input", "output")}


class SingleEngineServer:
    """Carries requests from the wire to one engine, and its steps back."""

    def __init__(self, engine: SimEngine, facts: ReplicaFacts) -> None:
        from baton.engine.vllm.frontend.engine_server import FleetEngineServer

        self._engine = engine
        # Bounded by the benchmark's own number of streams.
        self._inbox: asyncio.Queue[Leg | tuple[str, ...]] = asyncio.Queue()
        hooks = FrontendHooks(
            on_request=self._on_request,
            on_abort=self._inbox.put_nowait,
            admit=lambda _n, _caller: None,
            healthy=lambda: True,
        )
        fleet_facts = FleetFacts(
            max_len_tokens=facts.max_len_tokens,
            block_size_tokens=facts.block_size_tokens,
            kv_blocks=facts.kv_blocks,
            max_running_requests=facts.max_running_requests,
            max_batched_tokens=facts.max_batched_tokens,
            adapters=facts.adapter_slots,
        )
        self._server = FleetEngineServer(fleet_facts, hooks, MonotonicClock())

    async def run(self, input_address: str, output_address: str) -> None:
        """Serve until cancelled."""
        await self._server.start(input_address, output_address)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._feed())
                tasks.create_task(self._stream())
        finally:
            await self._server.close()

    def _on_request(self, request: Request) -> None:
        leg = Leg(
            leg_id=request.request_id,
            request_id=request.request_id,
            kind=LegKind.LOCAL,
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            payload=request.payload,
        )
        self._inbox.put_nowait(leg)

    async def _feed(self) -> None:
        while True:
            item = await self._inbox.get()
            if not isinstance(item, Leg):
                await self._engine.abort(item)
            elif (failure := await self._engine.submit(item)) is not None:
                raise SystemExit(f"the engine refused leg {item.leg_id}: {failure}")

    async def _stream(self) -> None:
        async for outputs in self._engine.steps():
            self._server.deliver(
                [
                    Delivery(o.leg_id, o.token_ids, o.finish, o.stop_reason, o.cached_tokens)
                    for o in outputs
                ]
            )


async def engine_main(settings: SimSettings, input_address: str, output_address: str) -> None:
    """Be the engine process."""
    engine = SimEngine(settings, replica_id="bare", pool="bare", role=Role.MIXED, model=MODEL_NAME)
    server = SingleEngineServer(engine, await engine.start())
    serve_task = asyncio.ensure_future(server.run(input_address, output_address))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serve_task.cancel)
    try:
        await serve_task
    except asyncio.CancelledError:
        await engine.close()


async def api_main(folder: str, settings: SimSettings, *, model: str, port: int) -> None:
    """Be the API server process."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from baton.engine.vllm.frontend.llm import engine_config, parse_server_args

    # The same arguments as baton's frontend has, statistics and request logs off on both sides.
    argv = FrontendSettings(model=model, served_model_name=MODEL_NAME).argv(
        max_len_tokens=settings.max_len_tokens
    )
    args = parse_server_args(argv)
    config = engine_config(args)
    llm = await asyncio.to_thread(
        lambda: AsyncLLM(
            config,
            Executor.get_class(config),
            log_stats=False,
            log_requests=False,
            client_addresses=socket_addresses(folder),
        )
    )
    app = build_app(args, ("generate",), config.model_config)
    await init_app_state(llm, app.state, args, ("generate",))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=port,
            loop="uvloop",
            http="httptools",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    )
    app.state.server = server
    await server.serve()
    llm.shutdown()


def read_settings(text: str) -> SimSettings:
    """The engine's settings, out of what the benchmark wrote."""
    fields: Mapping[str, object] = json.loads(text)
    return SimSettings(**fields)  # type: ignore[arg-type]  # written from an instance


def main(role: str, folder: str, settings: str, *arguments: str) -> None:
    """Be one of the two processes."""
    if role == "engine":
        addresses_by_direction = socket_addresses(folder)
        uvloop.run(
            engine_main(
                read_settings(settings),
                addresses_by_direction["input_address"],
                addresses_by_direction["output_address"],
            )
        )
    else:
        model, port = arguments
        uvloop.run(api_main(folder, read_settings(settings), model=model, port=int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
