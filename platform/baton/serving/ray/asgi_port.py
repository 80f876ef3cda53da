"""The HTTP port of an ingress replica, without Serve's own app between it and ours.

Theory of operation: HAProxy sends to a port that the Serve controller assigns to each ingress
replica. The replica binds it and runs an HTTP server in Python there, with an app of Serve's that
calls ours. With the Python frontend, that server gets our app instead. Serve's app answers only
Serve's own paths: HAProxy's check whether the replica is there and does not drain. The server
remains Serve's: its options, its request ids and its end. At the end it accepts no more
connections, and its task ends when the answers in flight have ended. Requests through Serve's
Python proxy do not use this port.

In Rust mode the port is bound in the same way, and a gate gets its socket; Serve gets a stand-in
for its server. The rows `ASGI_PORT` and `GATE_PORT` of `couplings` name the private calls.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import traceback
from collections.abc import Mapping
from typing import Protocol

from baton.domain.errors import EngineStartFailed
from baton.domain.names.addresses import format_address
from baton.engine.vllm.gate.errors import Dialect, Problem
from baton.engine.vllm.gate.gate import AsgiApp, Receive, Scope, Send, send_problem
from baton.runtime.process.sockets import create_bound_socket
from baton.serving.ray import couplings
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_SERVE_PATH_PREFIX = "/-/"


class PortServer(Protocol):
    """The server behind a replica's port."""

    async def open(self, listener: socket.socket) -> None:
        """Serve this socket; the caller closes its own copy afterwards."""
        ...

    async def drain(self) -> None:
        """Accept no more connections; returns when the answers in flight have ended."""
        ...


class _HttpOptions(Protocol):
    host: str
    port: int


class _StartServer(Protocol):
    async def __call__(self, app: AsgiApp, *arguments: object, **options: object) -> object: ...


class _ServerHandle:
    """Stands for Serve's server, which ends when this attribute is set."""

    def __init__(self) -> None:
        self.exit_requested = asyncio.Event()

    @property
    def should_exit(self) -> bool:
        return self.exit_requested.is_set()

    @should_exit.setter
    def should_exit(self, requested: bool) -> None:
        if requested:
            self.exit_requested.set()


async def placeholder_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Our app for Serve when another server has the port: it starts and ends.

    Requests come here by Serve's Python proxy, until HAProxy has checked a new ingress.
    """
    if scope["type"] == "lifespan":
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return
    message = "the ingress has just been replaced, and the front has not found it yet"
    await send_problem(send, Problem(status=503, message=message), Dialect.OPENAI)


def serve_at_port(port_server: PortServer, environ: Mapping[str, str]) -> None:
    """Have `port_server` serve at the port of this replica, once Serve starts its server.

    Raises:
        EngineStartFailed: Serve is set up to carry requests through Python to the replica.
    """
    if environ.get("RAY_SERVE_ENABLE_DIRECT_INGRESS") != "1":
        raise EngineStartFailed(
            "server.api_server 'rust': requests come here through Ray Serve's Python proxy,"
            " expected HAProxy",
            "install ray[serve] on Linux, or use server.api_server 'python'",
        )
    from ray.serve._private import replica

    async def start(
        _app: object,
        options: _HttpOptions,
        *,
        event_loop: asyncio.AbstractEventLoop,
        enable_so_reuseport: bool = False,
    ) -> tuple[asyncio.Task[None], _ServerHandle]:
        del enable_so_reuseport  # one replica, one port
        with _bind(options) as listener:
            await port_server.open(listener)
        handle = _ServerHandle()
        return event_loop.create_task(_drain_on_exit(handle, port_server)), handle

    couplings.GATE_PORT.install(replica, start_asgi_http_server=start)


def serve_app_at_port(app: AsgiApp) -> None:
    """Have the server at the port of this replica serve our app, once Serve starts it.

    Serve does not start it where requests come through its Python proxy.
    """
    from ray.serve._private import replica

    start: _StartServer | None = getattr(replica, "start_asgi_http_server", None)

    async def start_ours(serve_app: AsgiApp, *arguments: object, **options: object) -> object:
        assert start is not None, "it is there where the row fits"
        return await start(_route_serve_paths(serve_app, app), *arguments, **options)

    couplings.ASGI_PORT.install(replica, start_asgi_http_server=start_ours)


def _route_serve_paths(serve_app: AsgiApp, own_app: AsgiApp) -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(_SERVE_PATH_PREFIX):
            await serve_app(scope, receive, send)
            return
        try:
            await own_app(scope, receive, send)
        except Exception as error:
            # The server logs nothing. The error's text may contain a prompt.
            traceback_text = "".join(traceback.format_tb(error.__traceback__))
            fields = {"error": type(error).__name__, "where": traceback_text}
            log_event(_LOGGER, logging.ERROR, "request_failed", fields)
            raise

    return app


def _bind(options: _HttpOptions) -> socket.socket:
    """A socket at a replica's port. On a RuntimeError, Serve tries another port."""
    try:
        return create_bound_socket(options.host, options.port, reuse_address=False)
    except OSError as error:
        address = format_address(options.host, options.port)
        raise RuntimeError(f"cannot listen at {address}") from error


async def _drain_on_exit(handle: _ServerHandle, port_server: PortServer) -> None:
    await handle.exit_requested.wait()
    await port_server.drain()
