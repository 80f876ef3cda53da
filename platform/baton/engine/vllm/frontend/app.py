"""The ingress' frontend: vLLM's API app behind a gate, with the fleet as its engine.

Theory of operation: `start` lets vLLM's engine client bind two sockets in a private folder while
the engine server connects to them; after their handshake the app is ready. The client is
constructed in a thread, because importing vLLM takes seconds and the construction blocks until the
handshake. Importing this module does not import vLLM.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.control.fleet.adapter_registry import RuntimeAdapter
from baton.domain.commands import Delivery
from baton.domain.errors import BatonError, EngineStartFailed, LinkFailed
from baton.engine.gpus import use_cpu_without_gpus
from baton.engine.log_handlers import preserve_log_handlers
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.adapters import Administer
from baton.engine.vllm.gate.gate import AsgiApp, Gate
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.runtime.ports import Clock
from baton.runtime.process.scratch import scratch_folder

if TYPE_CHECKING:
    from baton.engine.vllm.frontend.engine_server import FleetEngineServer
    from baton.engine.vllm.frontend.llm import ApiApp, FleetLLM


class VllmFrontend:
    """VLLM's API server over a fleet. Satisfies `ports.Frontend` once started."""

    def __init__(
        self, settings: FrontendSettings, facts: FleetFacts, *, hooks: FrontendHooks, clock: Clock
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._hooks = hooks
        self._clock = clock
        self._folder: str | None = None
        self._engine_server: FleetEngineServer | None = None
        self._llm: FleetLLM | None = None
        self._api: ApiApp | None = None
        self._gate: Gate | None = None
        self._adapters: tuple[RuntimeAdapter, ...] = ()

    async def start(self) -> AsgiApp:
        """Start the frontend and return the ASGI app.

        Raises:
            EngineStartFailed: with the cause and a remedy.
        """
        # Its default mode makes the sockets private; a long folder would not fit a socket's
        # address.
        self._folder = str(scratch_folder("baton-", short=True))
        addresses = {
            f"{direction}_address": f"ipc://{self._folder}/{direction}"
            for direction in ("input", "output")
        }
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                return await self._start(addresses)
        except TimeoutError as error:
            await self.close()
            raise EngineStartFailed(
                f"the frontend was not ready within {self._settings.start_timeout_s:.0f} s",
                "look for a slow disk under the model, or raise the start timeout",
            ) from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop and leave no task, socket or file behind. Idempotent."""
        engine_server, self._engine_server = self._engine_server, None
        llm, self._llm = self._llm, None
        self._api = self._gate = None
        folder, self._folder = self._folder, None
        if llm is not None:
            await llm.aclose()
        if engine_server is not None:
            await engine_server.close()
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

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

    def reconfigure(
        self, *, limits: FrontendLimits | None = None, access: Access | None = None
    ) -> None:
        """Replace limits or access from the next request on; None changes nothing."""
        self._settings = replace(
            self._settings,
            limits=limits or self._settings.limits,
            access=access or self._settings.access,
        )
        self._apply()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Stream tokens to clients; one call per engine step."""
        self._require_started().deliver(deliveries)

    def fail(self, request_id: str, error: BatonError) -> None:
        """End a request with an error for the client."""
        self._require_started().fail(request_id, error)

    @property
    def open_requests(self) -> int:
        """Requests in flight."""
        return 0 if self._engine_server is None else self._engine_server.open_requests

    def healthy(self) -> bool:
        """Whether a new request would be read and could be served."""
        if self._engine_server is None or self._llm is None or self.has_failed:
            return False
        return self._hooks.healthy()

    @property
    def has_failed(self) -> bool:
        """Whether it was started and can never serve again."""
        engine_server, llm = self._engine_server, self._llm
        return (
            engine_server is not None
            and llm is not None
            and (not engine_server.is_running or llm.errored)
        )

    def _require_started(self) -> FleetEngineServer:
        if self._engine_server is None:
            raise LinkFailed("frontend", "the frontend is not running")
        return self._engine_server

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
        """Pass the settings to the parts that exist; there are none before the start."""
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
