"""What can be seen of a deployment at one address: metrics, whom else to ask, the live page.

*Theory of operation.* The controller serves it, on a port of its own. `/metrics` are its numbers,
`/sd` names every process that has some (Prometheus' HTTP service discovery), `/healthz` says that
it is there, and the console is at `/`. All of it only reads. Where a token is configured, all but
`/healthz` asks for it. Where there is none, only this machine can ask (`config.checks`); and so
that no page in a browser on this machine can, under a name of its own that leads here, the name by
which the server is called must then be one of this machine's.

What may fail: the port is taken. That is said once, with what to do, and tried again; nothing that
serves requests depends on it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.schema.observability import ObservabilityConfig
from baton.console.feed import Feed
from baton.domain.names.addresses import address_text, is_any, parse_address
from baton.serving.controller.scrape_targets import TargetGroup
from baton.serving.http.access_token import TokenFile, TokenGate
from baton.serving.http.allowed_hosts import by_own_names
from baton.serving.http.metrics_endpoint import METRICS_PATH, Metrics
from baton.serving.http.side_server import AsgiApp, Message, Receive, Scope, Send, SideServer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_LOGGER = logging.getLogger(__name__)
SD_PATH = "/sd"
HEALTH_PATH = "/healthz"
_PORT_KEY = "observability.metrics.port"
_AGAIN_S = 5.0
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
"""Of every answer that does not say otherwise itself."""


class Observatory:
    """See the module."""

    def __init__(
        self,
        config: ObservabilityConfig,
        *,
        node: str,
        metrics: Metrics,
        targets: Callable[[str | None], Sequence[TargetGroup]],
        feed: Feed,
        again_s: float = _AGAIN_S,
    ) -> None:
        """Nothing is served yet.

        Args:
            config: what is to be seen, where, and by whom.
            node: the address by which other nodes reach this one.
            metrics: the controller's own.
            targets: whom to ask, given where this endpoint is reached.
            feed: what the console shows.
            again_s: how long until a port that is taken is tried again.
        """
        self._config = config
        self._node = node
        self._metrics = metrics
        self._targets = targets
        self._feed = feed
        self._again_s = again_s
        self._server: SideServer | None = None
        self._end_console: Callable[[], Awaitable[None]] | None = None

    @property
    def address(self) -> str | None:
        """Where it is reached, `host:port`; None while it is not."""
        address = None if self._server is None else self._server.address
        if address is None:
            return None
        at = parse_address(address)
        return address_text(self._node, at.port) if is_any(at.host) else address

    def status(self) -> dict[str, object]:
        """For operators: where it is, or why it is nowhere."""
        metrics, console = self._config.metrics.enabled, self._config.console.enabled
        told: dict[str, object] = {"url": None, "metrics": metrics, "console": console}
        if not (metrics or console):
            return told
        if (address := self.address) is not None:
            return told | {"url": f"http://{address}"}
        where = address_text(self._config.metrics.host, self._config.metrics.port)
        return told | {"trouble": f"{where} cannot be listened on yet, see {_PORT_KEY}"}

    async def start(self) -> None:
        """Serve from now on, if anything is to be; never raises."""
        config = self._config
        if self._server is not None or not (config.metrics.enabled or config.console.enabled):
            return
        self._server = SideServer(
            self.app(),
            name="observatory",
            host=config.metrics.host,
            port=config.metrics.port,
            remedy=f"end who has the port, or set {_PORT_KEY} to another one (0: any free one)",
            again_s=self._again_s,
        )
        # A context of its own: Ray would take what is asked here for part of the call in which it
        # was started, and cancel it with that.
        starting = asyncio.create_task(self._server.start(), context=contextvars.Context())
        await asyncio.shield(starting)

    async def close(self) -> None:
        """Serve no more. Idempotent."""
        server, self._server = self._server, None
        if self._end_console is not None:
            await self._end_console()
        if server is not None:
            await server.close()

    def app(self) -> AsgiApp:
        """What is served, behind what guards it."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes: list[BaseRoute] = [Route(HEALTH_PATH, _healthy, methods=["GET"])]
        if self._config.metrics.enabled:
            routes.append(Route(METRICS_PATH, self._metrics.respond, methods=["GET"]))
            routes.append(Route(SD_PATH, self._discover, methods=["GET"]))
        if self._config.console.enabled:
            routes += self._console()
        return guarded(Starlette(routes=routes), self._config)

    def _console(self) -> list[BaseRoute]:
        from starlette.routing import Mount

        try:
            from baton.console.app import console_app

            console = console_app(self._feed)
            self._end_console = console.state.hub.close
            return [Mount("/", console)]
        except Exception:  # a page that cannot be shown is no reason to have no metrics
            _LOGGER.exception("the console cannot be shown")
            return []

    async def _discover(self, _request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse(list(self._targets(self.address)))


async def _healthy(_request: Request) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("ok\n")


def guarded(app: AsgiApp, config: ObservabilityConfig) -> AsgiApp:
    """An app behind its token, under its own names only, with headers that browsers heed."""
    path = config.token_file
    token = None if path is None else TokenFile(Path(path))
    gate = TokenGate(app, token, open_paths={HEALTH_PATH})
    return _Headers(by_own_names(gate, config.metrics.host))


class _Headers:
    """Adds to every answer the headers that it does not have."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = list(message.get("headers", ()))
                known = {bytes(name).lower() for name, _ in own}
                own += [(name, value) for name, value in _HEADERS if name not in known]
                message["headers"] = own
            await send(message)

        await self._app(scope, receive, sending)
