"""The metrics of one process, for Prometheus.

*Theory of operation.* Numbers are read on the event loop, which owns them; a thread formats them,
which takes longer. One request is answered at a time, so that a fast scraper delays only itself.
Errors become status 500, and are logged once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from baton.serving.http.access import TokenAuthMiddleware, restrict_hosts
from baton.serving.http.side_server import AsgiApp, SideServer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_LOGGER = logging.getLogger(__name__)
METRICS_PATH = "/metrics"
# No name here needs escaping, and that client (0.26) would make `vllm_` of `vllm:` in this format.
_OPEN_METRICS = "application/openmetrics-text"

Collect = Callable[[], Iterable[Family]]
"""Reads numbers on the loop before it returns; a thread iterates over the result."""


class MetricsRenderer:
    """Formats numbers for a scraper."""

    def __init__(self, collect: Collect, *, extra: Collector | None = None) -> None:
        """Nothing is read yet.

        Args:
            collect: Reads numbers.
            extra: More of them, such as an engine's, which are read in the thread.
        """
        self._collect = collect
        self._extra = extra
        self._lock = asyncio.Lock()
        self._error_logged = False

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The text in a format that the scraper accepts, and that format's name."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith(_OPEN_METRICS):
            encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]  # it is a partial
        async with self._lock:
            collected = _CollectedFamilies(self._collect(), self._extra)
            return await asyncio.to_thread(encode, collected), content_type

    async def respond(self, request: Request) -> Response:
        """Answer a scrape."""
        from starlette.responses import Response

        try:
            text, content_type = await self.render(request.headers.get("accept", ""))
        except Exception:
            if not self._error_logged:
                self._error_logged = True
                _LOGGER.exception("metrics cannot be rendered")
            return Response("metrics cannot be rendered, see the log\n", status_code=500)
        self._error_logged = False
        return Response(text, headers={"content-type": content_type})


class _CollectedFamilies(Collector):
    def __init__(self, families: Iterable[Family], extra: Collector | None) -> None:
        self._families = families
        self._extra = extra

    def collect(self) -> Iterator[Family]:
        yield from self._families
        if self._extra is not None:
            yield from self._extra.collect()


class MetricsEndpoint:
    """`GET /metrics` of one process, on a port of its own."""

    def __init__(
        self,
        metrics: MetricsRenderer,
        *,
        host: str,
        port: int = 0,
        token: Callable[[], str] | None = None,
    ) -> None:
        """Nothing is bound yet.

        For `token`, see `TokenAuthMiddleware`, for the rest, `SideServer`.
        """
        self._auth = TokenAuthMiddleware(metrics_app(metrics), token)
        self._server = SideServer(
            restrict_hosts(self._auth, host),
            name="metrics",
            host=host,
            port=port,
            remedy="see whether the node's address is one of this machine's",
        )

    @property
    def address(self) -> str | None:
        """`host:port`; None while it is not bound."""
        return self._server.address

    async def start(self) -> None:
        """Serve from now on; never raises."""
        await self._server.start()

    async def close(self) -> None:
        """Stop serving. Idempotent."""
        await self._server.close()


def metrics_app(metrics: MetricsRenderer) -> AsgiApp:
    """An app with only the metrics."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    return Starlette(routes=[Route(METRICS_PATH, metrics.respond, methods=["GET"])])
