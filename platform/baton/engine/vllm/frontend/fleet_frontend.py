"""Common parts of the frontends in Python and in Rust: an engine server in a private folder."""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.domain.commands import Delivery
from baton.domain.errors import BatonError, EngineStartFailed, LinkFailed
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.runtime.ports import Clock
from baton.runtime.process.scratch import scratch_folder

if TYPE_CHECKING:
    from baton.engine.vllm.frontend.engine_server import FleetEngineServer


class FleetFrontend(ABC):
    """An API server of vLLM over a fleet. Satisfies `ports.Frontend` once started."""

    def __init__(
        self, settings: FrontendSettings, facts: FleetFacts, *, hooks: FrontendHooks, clock: Clock
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._hooks = hooks
        self._clock = clock
        self._folder: Path | None = None
        self._engine_server: FleetEngineServer | None = None

    @abstractmethod
    async def _stop_api_server(self) -> None:
        """Stop vLLM's API server. Idempotent."""

    @abstractmethod
    def _apply(self) -> None:
        """Pass the settings to the parts that exist; there are none before the start."""

    @abstractmethod
    def _has_api_server_failed(self) -> bool | None:
        """Whether the API server can never serve again; None while there is none."""

    def _log_tail(self) -> str:
        """The end of the API server's own log; empty if it has none."""
        return ""

    @asynccontextmanager
    async def _starting(self) -> AsyncGenerator[Path]:
        """A private folder for the time of a start. A failed start leaves nothing behind.

        Raises:
            EngineStartFailed: the start timeout is over.
        """
        # Its default mode makes the sockets private; a long folder would not fit a socket's
        # address.
        self._folder = scratch_folder("baton-", short=True)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                yield self._folder
        except TimeoutError as error:
            log_tail = self._log_tail()
            await self.close()
            raise EngineStartFailed(
                f"the frontend was not ready within {self._settings.start_timeout_s:.0f} s"
                f"{log_tail and f': {log_tail}'}",
                "look for a slow disk under the model, or raise the start timeout",
            ) from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop and leave no task, process, socket or file behind. Idempotent."""
        engine_server, self._engine_server = self._engine_server, None
        folder, self._folder = self._folder, None
        await self._stop_api_server()
        if engine_server is not None:
            await engine_server.close()
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def reconfigure(
        self, *, limits: FrontendLimits | None = None, access: Access | None = None
    ) -> None:
        """Replace limits or access from the next request on; None changes nothing.

        The Rust program's maximum size of a body is fixed when it starts.
        """
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
        """End a request with an error; the Rust program tells its client no more than that."""
        self._require_started().fail(request_id, error)

    @property
    def open_requests(self) -> int:
        """Requests in flight."""
        return 0 if self._engine_server is None else self._engine_server.open_requests

    def healthy(self) -> bool:
        """Whether a new request would be read and could be served."""
        is_started = self._has_api_server_failed() is not None
        return is_started and not self.has_failed and self._hooks.healthy()

    @property
    def has_failed(self) -> bool:
        """Whether it was started and can never serve again."""
        engine_server, api_server_failed = self._engine_server, self._has_api_server_failed()
        return (
            engine_server is not None
            and api_server_failed is not None
            and (api_server_failed or not engine_server.is_running)
        )

    def _require_started(self) -> FleetEngineServer:
        if self._engine_server is None:
            raise LinkFailed("frontend", "the frontend is not running")
        return self._engine_server
