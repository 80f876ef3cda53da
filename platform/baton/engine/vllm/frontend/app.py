"""The ingress' frontend: vLLM's API app behind a gate, with the fleet as its engine.

Theory of operation: `start` lets vLLM's engine client bind two sockets in a private folder while
the engine server connects to them; after their handshake the app is ready. The client is
constructed in a thread, because importing vLLM takes seconds and the construction blocks until the
handshake. Importing this module does not import vLLM.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.control.fleet.adapter_registry import RuntimeAdapter
from baton.engine.gpus import use_cpu_without_gpus
from baton.engine.log_handlers import preserve_log_handlers
from baton.engine.vllm.frontend.fleet_frontend import FleetFrontend
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.gate.adapters import Administer
from baton.engine.vllm.gate.gate import AsgiApp, Gate
from baton.runtime.ports import Clock

if TYPE_CHECKING:
    from baton.engine.vllm.frontend.llm import ApiApp, FleetLLM


class VllmFrontend(FleetFrontend):
    """VLLM's API server in this process."""

    def __init__(
        self, settings: FrontendSettings, facts: FleetFacts, *, hooks: FrontendHooks, clock: Clock
    ) -> None:
        super().__init__(settings, facts, hooks=hooks, clock=clock)
        self._llm: FleetLLM | None = None
        self._api: ApiApp | None = None
        self._gate: Gate | None = None
        self._adapters: tuple[RuntimeAdapter, ...] = ()

    async def start(self) -> AsgiApp:
        """Start the frontend and return the ASGI app.

        Raises:
            EngineStartFailed: with the cause and a remedy.
        """
        async with self._starting() as folder:
            addresses = {
                f"{direction}_address": f"ipc://{folder}/{direction}"
                for direction in ("input", "output")
            }
            return await self._start(addresses)

    async def _stop_api_server(self) -> None:
        llm, self._llm = self._llm, None
        self._api = self._gate = None
        if llm is not None:
            await llm.aclose()

    @property
    def api(self) -> AsgiApp:
        """The app without its gate, for a gate in front of several apps."""
        assert self._api is not None, "it is asked for once it has started"
        return self._api.asgi

    def gate_app(self, app: AsgiApp, *, healthy: Callable[[], bool]) -> AsgiApp:
        """This frontend's gate, with its limits and keys, in front of an app of several models."""
        assert self._gate is not None, "it is asked for once it has started"
        self._gate.replace_app(app, healthy=healthy)
        return _with_cors(self._gate, self._settings)

    def set_adapters(self, adapters: Sequence[RuntimeAdapter]) -> None:
        """Serve these runtime adapters, together with the configured adapters."""
        self._adapters = tuple(adapters)
        if self._api is not None:
            self._api.set_adapters(self._adapters)

    def set_administer(self, administer: Administer) -> None:
        """Set the function that loads and unloads adapters."""
        assert self._gate is not None, "it is asked for once it has started"
        self._gate.administer = administer

    def _has_api_server_failed(self) -> bool | None:
        return None if self._llm is None else self._llm.errored

    async def _start(self, addresses: dict[str, str]) -> AsgiApp:
        args = await asyncio.to_thread(_server_args, self._settings, self._facts)
        # Imported by now, in the thread.
        from baton.engine.vllm.frontend.engine_server import FleetEngineServer
        from baton.engine.vllm.frontend.llm import (
            FleetLLM,
            build_api_app,
            engine_config,
        )

        def construct() -> FleetLLM:
            with preserve_log_handlers():
                return FleetLLM(
                    engine_config(args),
                    addresses=addresses,
                    log_stats=self._settings.log_stats,
                    admit=self._hooks.admit,
                    limits=self._settings.limits,
                )

        self._engine_server = FleetEngineServer(self._facts, self._hooks, self._clock)
        await self._engine_server.start(addresses["input_address"], addresses["output_address"])
        self._llm = await asyncio.to_thread(construct)
        self._engine_server.attach_inprocess(self._llm.engine_core)
        self._api = await build_api_app(self._llm, args)
        self._gate = Gate(
            self._api.asgi,
            routes=self._settings.routes,
            healthy=self.healthy,
            admit=self._hooks.admit,
        )
        self._apply()
        return _with_cors(self._gate, self._settings)

    def _apply(self) -> None:
        limits = self._settings.limits
        if self._gate is not None:
            self._gate.limits, self._gate.access = limits, self._settings.access
        if self._llm is not None:
            self._llm.limits = limits
        if self._api is not None:
            self._api.set_default_max_tokens(limits.default_output_tokens)
            self._api.set_adapters(self._adapters)


def _with_cors(gate: Gate, settings: FrontendSettings) -> AsgiApp:
    """The gate, behind a CORS layer if any origin is allowed."""
    if not settings.cors_options:
        return gate
    from starlette.middleware.cors import CORSMiddleware

    layer: AsgiApp = CORSMiddleware(gate, **settings.cors_options)  # type: ignore[arg-type]  # by name
    return layer


def preload_python_frontend() -> None:
    """Import all heavy modules: for seconds, other threads hardly run.

    Call it before other processes wait for this process; starting a frontend calls it, too.
    """
    # vLLM reads it when it first reports usage to its makers.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The gate checks keys: with this variable vLLM's app would refuse callers of the gate.
    os.environ.pop("VLLM_API_KEY", None)
    # vLLM reads it for each fetch; a redirect could lead to a host that is not allowed.
    os.environ["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"
    use_cpu_without_gpus(os.environ)
    with preserve_log_handlers():
        from baton.engine.vllm.frontend import (
            engine_server,  # noqa: F401 - to have it imported
            llm,  # noqa: F401 - to have it imported
        )


def _server_args(settings: FrontendSettings, facts: FleetFacts) -> Namespace:
    preload_python_frontend()
    from baton.engine.vllm.frontend import llm as frontend_llm

    return frontend_llm.parse_server_args(settings.argv(max_len_tokens=facts.max_len_tokens))
