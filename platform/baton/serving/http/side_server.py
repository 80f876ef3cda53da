"""An HTTP server for operators on the process's own loop, which never disturbs its work.

*Theory of operation.* `start` binds and serves; if that fails it logs why once, and tries again
every few seconds. It never raises, since no request depends on it. `address` is None until it is
bound. `close` cuts open connections after a moment.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from baton.domain.names.addresses import format_address
from baton.runtime.process.sockets import create_bound_socket
from baton.telemetry.logs import log_event

if TYPE_CHECKING:
    import uvicorn

_LOGGER = logging.getLogger(__name__)
_RETRY_INTERVAL_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
_MAX_CONNECTIONS = 256
_BACKLOG = 64

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class SideServer:
    """Serves one ASGI app; see the module."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        name: str,
        host: str,
        port: int = 0,
        remedy: str = "free that port",
        retry_interval_s: float = _RETRY_INTERVAL_S,
    ) -> None:
        """Nothing is bound yet.

        Args:
            app: Answers requests; its lifespan is not run.
            name: The subject, for the log.
            host: The address to bind, or a name that is looked up.
            port: 0 for any free port.
            remedy: Advice to an operator if it cannot be bound.
            retry_interval_s: Seconds between attempts.
        """
        self._app = app
        self._name = name
        self._host = host
        self._port = port
        self._remedy = remedy
        self._retry_interval_s = retry_interval_s
        self._error_logged = False
        self._address: str | None = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str | None:
        """`host:port`; None while it is not bound."""
        return self._address

    async def start(self) -> None:
        """Bind if that is possible, and serve from now on."""
        listener = await self._try_bind()
        self._task = asyncio.create_task(self._run(listener), name=f"baton-{self._name}")

    async def close(self) -> None:
        """Stop serving. Idempotent."""
        task, self._task = self._task, None
        self._address = None
        if task is None:
            return
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.wait([task], timeout=_CLOSE_TIMEOUT_S)
        task.cancel()
        await asyncio.wait([task])

    async def _run(self, listener: socket.socket | None) -> None:
        try:
            while listener is None:
                await asyncio.sleep(self._retry_interval_s)
                listener = await self._try_bind()
            self._server = _server(self._app)
            await self._server.serve(sockets=[listener])
        except Exception:
            self._address = None
            _LOGGER.exception("%s are served no more", self._name)
        finally:
            if listener is not None:
                listener.close()

    async def _try_bind(self) -> socket.socket | None:
        try:
            listener = await asyncio.to_thread(_bind, self._host, self._port)
        except OSError as error:
            if not self._error_logged:
                self._error_logged = True
                fields = {"host": self._host, "port": self._port, "reason": str(error)}
                fields |= {"remedy": self._remedy, "again_s": self._retry_interval_s}
                log_event(_LOGGER, logging.WARNING, f"{self._name}_not_served", fields)
            return None
        host, port = listener.getsockname()[:2]
        self._address = format_address(host, port)
        log_event(_LOGGER, logging.INFO, f"{self._name}_served", {"address": self._address})
        return listener


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens there, or OSError; may block on a name server."""
    listener = create_bound_socket(host, port)
    listener.listen(_BACKLOG)
    return listener


def _server(app: AsgiApp) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals to the process."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    return Server(
        uvicorn.Config(
            app,
            lifespan="off",
            loop="none",
            ws="none",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
    )
