"""The controller's HTTP server: metrics, service discovery and the console.

*Theory of operation.* The server has a port of its own and only reads. `/metrics` returns the
controller's metrics, `/sd` the targets for Prometheus' HTTP service discovery, `/healthz` that it
runs, and `/` the console, whose chat is the only thing that is posted. With a configured token all
paths but `/healthz` require it. Without one,
only this machine can connect (`config.checks.topology`), and the Host header must name this
machine. That check stops DNS rebinding by a page in a browser.

If the port is taken, the server logs that once and retries; no request depends on it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from baton.config.derive.options import allows_anonymous, key_files
from baton.config.schema.deployment import DeploymentConfig
from baton.config.schema.deployment import Route as RouteGroup
from baton.config.schema.observability import ObservabilityConfig
from baton.config.write.render import render_redacted
from baton.console.feed import ChatTarget, ChatUnavailable, Feed, Row
from baton.console.history import History
from baton.domain.commands import RecordSelection
from baton.domain.errors import NotRunning, TimedOut
from baton.domain.names.addresses import (
    connectable_host,
    format_address,
    format_endpoint,
    is_any_address,
    is_loopback,
    parse_address,
)
from baton.serving.http.access import TokenAuthMiddleware, TokenFile, restrict_hosts
from baton.serving.http.metrics_endpoint import METRICS_PATH, MetricsRenderer
from baton.serving.http.side_server import AsgiApp, Message, Receive, Scope, Send, SideServer
from baton.serving.ray import serve_control
from baton.serving.ray.membership import Member
from baton.serving.ray.packing import unpack
from baton.serving.ray.serve_control import CallResults
from baton.serving.shared.names import INGRESS, METRICS_ADDRESS, REPLICA_ID
from baton.serving.shared.reports import merge_link_reports, merge_request_reports
from baton.telemetry.catalogue import Component

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
"""Added unless the response sets them."""
_QUERY_TIMEOUT_S = 3.0
"""Answers take milliseconds, so a viewer learns of a failure after this time."""
_Rows = Sequence[Row]
TargetGroup = Mapping[str, object]


class CallIngresses(Protocol):
    """Calls a method of every ingress."""

    def __call__(self, method: str, *arguments: object) -> Awaitable[CallResults]:
        """Answers, and a reason for each ingress without an answer."""
        ...


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
        """Nothing is served before `start`.

        Args:
        config: the pages to serve, their address and their token.
        node: the address by which other nodes reach this node.
        metrics: the controller's own.
        targets: maps this server's address to the scrape targets.
        feed: the console's data.
        retry_s: until a taken port is tried again.
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
        """`host:port` for other nodes; None while it does not listen."""
        address = None if self._server is None else self._server.address
        if address is None:
            return None
        parsed = parse_address(address)
        return format_address(self._node, parsed.port) if is_any_address(parsed.host) else address

    def status(self) -> dict[str, object]:
        """For operators: the URL, or why there is none."""
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
        """Listen, if metrics or the console are enabled; never raises."""
        config = self._config
        if self._server is not None or not (config.metrics.enabled or config.console.enabled):
            return
        self._server = SideServer(
            self.app(),
            name="observatory",
            host=config.metrics.host,
            port=config.metrics.port,
            remedy=f"free the port, or set {_PORT_KEY} to another (0: any free port)",
            retry_interval_s=self._retry_s,
        )
        # A context of its own: Ray would count this task as part of the current call, and cancel it
        # together with that call.
        start_task = asyncio.create_task(self._server.start(), context=contextvars.Context())
        await asyncio.shield(start_task)

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        server, self._server = self._server, None
        if self._close_console is not None:
            await self._close_console()
        if server is not None:
            await server.close()

    def app(self) -> AsgiApp:
        """The application behind its guards."""
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
        except Exception:  # a broken console leaves the metrics available
            _LOGGER.exception("the console cannot be shown")
            return []

    async def _discover(self, _request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse(list(self._targets(self.address)))


def chat_target(
    config: DeploymentConfig, ingress_nodes: Iterable[str]
) -> ChatTarget | ChatUnavailable:
    """The deployment's own API, as the controller reaches it, or why it cannot.

    The front listens on this node, or at least on those of ingresses.
    """
    server, tls = config.server, config.security.tls
    if RouteGroup.CHAT not in config.server.routes:
        return ChatUnavailable(reason="server.routes does not open 'chat'")
    if tls.client_ca_file is not None:
        return ChatUnavailable(
            reason="clients need a certificate (security.tls.client_ca_file), which a page lacks"
        )
    hosts = [connectable_host(server.host)]
    if not is_loopback(server.host):
        hosts += sorted(set(ingress_nodes))
    scheme = "http" if tls.cert_file is None else "https"
    return ChatTarget(
        urls=tuple(format_endpoint(scheme, host, server.port) for host in dict.fromkeys(hosts)),
        models=tuple(config.models),
        takes_key=bool(key_files(config)),
        needs_key=not allows_anonymous(config),
        cert_file=tls.cert_file,
        total_timeout_s=config.admission.timeouts.total_s,
    )


async def _healthy(_request: Request) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("ok\n")


def guard_app(app: AsgiApp, config: ObservabilityConfig) -> AsgiApp:
    """An app behind its token and host check, with security headers."""
    path = config.token_file
    token = None if path is None else TokenFile(Path(path))
    token_gate = TokenAuthMiddleware(app, token, open_paths={HEALTH_PATH})
    return _SecurityHeaders(restrict_hosts(token_gate, config.metrics.host))


class _SecurityHeaders:
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


def call_ingresses(app: str) -> CallIngresses:
    """A function that calls the ingresses of an application on Ray Serve."""

    async def call(method: str, *arguments: object) -> CallResults:
        return await serve_control.call_all(
            app, INGRESS, method, *arguments, timeout_s=_QUERY_TIMEOUT_S
        )

    return call


class LiveFeed:
    """The `console.feed.Feed` of a running deployment."""

    def __init__(
        self,
        *,
        status: Callable[[], Awaitable[Row]],
        ticks: Callable[[int], Row],
        config: Callable[[], DeploymentConfig],
        call: CallIngresses,
        points: History,
        chat_target: Callable[[], ChatTarget | ChatUnavailable],
    ) -> None:
        """`status`, `ticks` and `chat_target` are methods of `ControllerService`."""
        self._status = status
        self._ticks = ticks
        self._config = config
        self._call = call
        self._points = points
        self._chat_target = chat_target

    @property
    def points(self) -> History:
        """See `Feed.points`."""
        return self._points

    def chat_target(self) -> ChatTarget | ChatUnavailable:
        """See `Feed.chat_target`."""
        return self._chat_target()

    async def overview(self) -> Row:
        """See `Feed.overview`; ingresses that do not answer are under `unresponsive`."""
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                status = await self._status()
        except TimeoutError as error:
            raise TimedOut("the controller has seen no replica yet", "wait") from error
        answers = await self._call("status")
        ingresses = [unpack(value) for value in answers.values]
        unresponsive = {"unresponsive": list(answers.failures)} if answers.failures else {}
        return {**status, "ingresses": ingresses, **unresponsive}

    async def links(self) -> _Rows:
        """See `Feed.links`."""
        return merge_link_reports(await self._rows("links"))

    async def requests(self, count: int, order: RecordSelection) -> _Rows:
        """See `Feed.requests`."""
        return merge_request_reports(await self._rows("requests", count, str(order)), count, order)

    async def request(self, request_id: str) -> _Rows:
        """See `Feed.request`."""
        return [report for rows in await self._rows("explain", request_id) for report in rows]

    async def ticks(self, count: int) -> _Rows:
        """See `Feed.ticks`."""
        return cast("_Rows", self._ticks(count)["ticks"])

    async def config(self) -> str:
        """See `Feed.config`."""
        return render_redacted(self._config())

    async def _rows(self, method: str, *arguments: object) -> list[_Rows]:
        answers = await self._call(method, *arguments)
        if not answers.values:
            reason = "; ".join(answers.failures) or "there is none"
            raise NotRunning(f"no ingress answers: {reason}", "look at 'baton status'")
        return [cast("_Rows", unpack(value)) for value in answers.values]


def target_groups(
    members: Iterable[Member], *, controller: str | None, node: str
) -> list[TargetGroup]:
    """Every process with metrics, in a stable order.

    Prometheus adds a target's labels to every series. So they differ from the metrics' own labels:
    ingresses and the controller label metrics with `pool`.

    `controller` is the address of its endpoint, None without; `node` is its node.
    """
    groups: list[TargetGroup] = []
    if controller is not None:
        groups.append(_target_group(controller, Component.CONTROLLER, node=node))
    for member in sorted(members, key=lambda member: (member.deployment, member.replica_id)):
        address = member.metadata.get(METRICS_ADDRESS)
        if not address:
            continue
        if member.deployment == INGRESS:
            labels = {"replica": member.replica_id}
            component = Component.INGRESS
        else:
            replica_id = str(member.metadata.get(REPLICA_ID, member.replica_id))
            labels = {"pool": member.deployment, "replica": replica_id}
            component = Component.REPLICA
        # An ingress of several models has one address for each.
        groups += [
            _target_group(part, component, node=member.node_ip, **labels)
            for part in str(address).split(",")
        ]
    return groups


def _target_group(address: str, component: Component, **labels: str) -> TargetGroup:
    target_labels = {"__metrics_path__": METRICS_PATH, "component": str(component), **labels}
    return {"targets": [address], "labels": target_labels}
