"""What can be seen of a deployment at one address: metrics, whom else to ask, the live page.

*Theory of operation.* The controller serves it, on a port of its own. `/metrics` are its numbers,
`/sd` names every process that has some (Prometheus' HTTP service discovery), `/healthz` says that
it is there, and the console is at `/`. All of it only reads. Where a token is configured, all but
`/healthz` asks for it. Where there is none, only this machine can ask (`config.checks.topology`);
and so that no page in a browser on this machine can, under a name of its own that leads here, the
name by which the server is called must then be one of this machine's.

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
from baton.domain.names.addresses import format_address, is_any_address, parse_address
from baton.serving.controller.scrape_targets import TargetGroup
from baton.serving.http.access import TokenAuthMiddleware, TokenFile, restrict_hosts
from baton.serving.http.metrics_endpoint import METRICS_PATH, MetricsRenderer
from baton.serving.http.side_server import AsgiApp, Message, Receive, Scope, Send, SideServer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_LOGGER = logging.getLogger(__name__)
SD_PATH = "/sd"
HEALTH_PATH = "/healthz"
_PORT_KEY = "observability.metrics.port"
_RETRY_S = 5.0
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
"""Of every answer that does not say otherwise itself."""


class ControllerHttp:
    """See the module."""

    def __init__(
        self,
        config: ObservabilityConfig,
        *,
        node: str,
        metrics: MetricsRenderer,
        targets: Callable[[str | None], Sequence[TargetGroup]],
        feed: Feed,
        retry_s: float = _RETRY_S,
    ) -> None:
        """Nothing is served yet.

        Args:
            config: what is to be seen, where, and by whom.
            node: the address by which other nodes reach this one.
            metrics: the controller's own.
            targets: whom to ask, given where this endpoint is reached.
            feed: what the console shows.
            retry_s: how long until a port that is taken is tried again.
        """
        self._config = config
        self._node = node
        self._metrics = metrics
        self._targets = targets
        self._feed = feed
        self._retry_s = retry_s
        self._server: SideServer | None = None
        self._close_console: Callable[[], Awaitable[None]] | None = None

    @property
    def address(self) -> str | None:
        """Where it is reached, `host:port`; None while it is not."""
        address = None if self._server is None else self._server.address
        if address is None:
            return None
        parsed = parse_address(address)
        return format_address(self._node, parsed.port) if is_any_address(parsed.host) else address

    def status(self) -> dict[str, object]:
        """For operators: where it is, or why it is nowhere."""
        metrics, console = self._config.metrics.enabled, self._config.console.enabled
        report: dict[str, object] = {"url": None, "metrics": metrics, "console": console}
        if not (metrics or console):
            return report
        if (address := self.address) is not None:
            return report | {"url": f"http://{address}"}
        configured_address = format_address(self._config.metrics.host, self._config.metrics.port)
        return report | {
            "trouble": f"{configured_address} cannot be listened on yet, see {_PORT_KEY}"
        }

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
            retry_interval_s=self._retry_s,
        )
        # A context of its own: Ray would take what is asked here for part of the call in which it
        # was started, and cancel it with that.
        start_task = asyncio.create_task(self._server.start(), context=contextvars.Context())
        await asyncio.shield(start_task)

    async def close(self) -> None:
        """Serve no more. Idempotent."""
        server, self._server = self._server, None
        if self._close_console is not None:
            await self._close_console()
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
            routes += self._console_routes()
        return guard_app(Starlette(routes=routes), self._config)

    def _console_routes(self) -> list[BaseRoute]:
        from starlette.routing import Mount

        try:
            from baton.console.app import console_app

            console = console_app(self._feed)
            self._close_console = console.state.hub.close
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


def guard_app(app: AsgiApp, config: ObservabilityConfig) -> AsgiApp:
    """An app behind its token, under its own names only, with headers that browsers heed."""
    path = config.token_file
    token = None if path is None else TokenFile(Path(path))
    token_gate = TokenAuthMiddleware(app, token, open_paths={HEALTH_PATH})
    return _SecurityHeaders(restrict_hosts(token_gate, config.metrics.host))


class _SecurityHeaders:
    """Adds to every answer the headers that it does not have."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = list(message.get("headers", ()))
                known = {bytes(name).lower() for name, _ in own}
                own += [(name, value) for name, value in _SECURITY_HEADERS if name not in known]
                message["headers"] = own
            await send(message)

        await self._app(scope, receive, send_with_headers)
