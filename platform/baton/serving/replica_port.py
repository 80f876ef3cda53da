"""Where Ray Serve sends what is for a replica: here the gate listens in place of Serve's server.

Theory of operation: HAProxy in front of a deployment sends to a port that the Serve controller
deals out to each ingress replica. The replica binds it and runs an HTTP server in Python there. In
Rust mode the port is bound in the same way, and its socket is handed to a gate that is no Python.
What is handed back to Serve behaves as its server did: told to exit, it takes no more connections,
and its task ends when the answers under way have ended. Only this module knows how Serve starts
that server (private parts of Ray 2.60); a test tells when that changes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Protocol

from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.frontend_errors import Dialect, Problem
from baton.engine.vllm.frontend_gate import Receive, Scope, Send, answer


class Doorway(Protocol):
    """Who serves what comes to a replica's port."""

    async def open(self, listener: socket.socket) -> None:
        """Serve who comes to this socket; the caller closes its own copy afterwards."""
        ...

    async def drain(self) -> None:
        """Take no more connections; returns when the answers under way have ended."""
        ...


class _Options(Protocol):
    host: str
    port: int


class _Served:
    """Stands for Serve's server: it is told to exit by an attribute."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()

    @property
    def should_exit(self) -> bool:
        return self.wanted.is_set()

    @should_exit.setter
    def should_exit(self, wanted: bool) -> None:
        if wanted:
            self.wanted.set()


async def nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    """What Serve runs of ours where another serves: it starts and ends, and nobody comes here."""
    if scope["type"] == "lifespan":
        for asked in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{asked}.complete"})
        return
    await answer(send, Problem(status=503, message="not served here"), Dialect.OPENAI)


def serve_at_port(doorway: Doorway, environ: Mapping[str, str]) -> None:
    """Have the doorway serve at the port of this replica, once Serve starts its server.

    Raises:
        EngineStartFailed: Serve is set up to carry requests through Python to the replica.
    """
    if environ.get("RAY_SERVE_ENABLE_DIRECT_INGRESS") != "1":
        raise EngineStartFailed(
            "server.frontend 'rust': requests come here through Ray Serve's Python proxy, wanted"
            " HAProxy",
            "install ray[serve] on Linux, or use server.frontend 'python'",
        )
    from ray.serve._private import replica

    async def start(
        _app: object,
        options: _Options,
        *,
        event_loop: asyncio.AbstractEventLoop,
        enable_so_reuseport: bool = False,
    ) -> tuple[asyncio.Task[None], _Served]:
        del enable_so_reuseport  # one replica, one port
        with _bound(options) as listener:
            await doorway.open(listener)
        served = _Served()
        return event_loop.create_task(_run(served, doorway)), served

    vars(replica)["start_asgi_http_server"] = start


def _bound(options: _Options) -> socket.socket:
    """A socket at a replica's port.

    Raises:
        RuntimeError: as Serve has it, who tries another port.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise RuntimeError(f"cannot listen at {options.host}:{options.port}") from error
    return listener


async def _run(served: _Served, doorway: Doorway) -> None:
    await served.wanted.wait()
    await doorway.drain()
