"""A frontend and an HTTP server in a thread, with a stand-in for the fleet behind them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from baton.control.fleet.adapter_registry import RuntimeAdapter
from baton.engine.vllm.frontend.app import VllmFrontend
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.adapters import Administer
from baton.engine.vllm.gate.limits import FrontendLimits
from tests.compat.echo_fleet import EchoFleet
from tests.fakes.frontends import fleet_facts

MODEL = "tiny"
ADAPTER = "tiny-ada"
MAX_LEN_TOKENS = 1024
MAX_BODY_BYTES = 256 * 1024


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a client needs to know; `capabilities` are those that not every engine has."""

    base_url: str
    model: str
    max_len_tokens: int
    adapters: tuple[str, ...] = ()
    """LoRA adapters over the model, by name."""
    capabilities: frozenset[str]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.base_url.removeprefix("http://").split(":")
        return host, int(port)


class _ReadySignalServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()


class ServerThread:
    """Runs a frontend and an HTTP server in an event loop of their own."""

    def __init__(self, settings: FrontendSettings, fleet: EchoFleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server: uvicorn.Server | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frontend")
        self._loop: asyncio.AbstractEventLoop | None = None
        self.frontend: VllmFrontend | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(110)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()
        assert not self._thread.is_alive()

    def close_frontend(self) -> None:
        """Close the frontend under the running HTTP server."""
        assert self.frontend is not None
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.frontend.close(), self._loop).result(10)

    def reconfigure(
        self, *, limits: FrontendLimits | None = None, access: Access | None = None
    ) -> None:
        """Have the running frontend go by other limits, or let others in."""
        assert self._loop is not None

        async def switch() -> None:
            assert self.frontend is not None
            self.frontend.reconfigure(limits=limits, access=access)

        asyncio.run_coroutine_threadsafe(switch(), self._loop).result(10)

    def administer(
        self, administer: Administer | None, adapters: Sequence[RuntimeAdapter] = ()
    ) -> None:
        """Have adapters loaded and unloaded by this, and serve these besides those of the start."""
        assert self._loop is not None

        async def switch() -> None:
            assert self.frontend is not None
            self.frontend.set_adapters(adapters)
            if administer is not None:
                self.frontend.set_administer(administer)

        asyncio.run_coroutine_threadsafe(switch(), self._loop).result(10)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that started us
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        fleet = self._fleet
        facts = fleet_facts(MAX_LEN_TOKENS, adapters=len(self._settings.adapters))
        frontend = VllmFrontend(self._settings, facts, hooks=fleet.hooks(), clock=MonotonicClock())
        app = await frontend.start()
        fleet.frontend = self.frontend = frontend
        steps = asyncio.create_task(fleet.run())
        try:
            config = uvicorn.Config(app, log_level="warning", lifespan="on")
            self._server = _ReadySignalServer(config, self._ready)
            await self._server.serve(sockets=[self._socket])
        finally:
            steps.cancel()
            await asyncio.wait([steps])
            await frontend.close()


@contextlib.contextmanager
def serve(settings: FrontendSettings, fleet: EchoFleet) -> Iterator[ServerThread]:
    thread = ServerThread(settings, fleet)
    with warnings.catch_warnings():
        # The vendors' imports warn; what our code warns about is caught when the tests run.
        warnings.simplefilter("ignore")
        thread.start()
    try:
        yield thread
    finally:
        thread.stop()
