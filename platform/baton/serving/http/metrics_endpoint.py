"""What Prometheus asks of one process: its metrics, as text.

*Theory of operation.* Numbers are read on the event loop, since they are of what lives there; the
text, which takes longer, is made of them in a thread. One request is answered at a time,
so that a scraper in a hurry delays itself alone. What goes wrong is an answer with status 500, and
is logged once.
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

from baton.serving.http.access_token import TokenGate
from baton.serving.http.allowed_hosts import by_own_names
from baton.serving.http.side_server import AsgiApp, SideServer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_LOGGER = logging.getLogger(__name__)
METRICS_PATH = "/metrics"
# No name here needs escaping, and that client (0.26) would make `vllm_` of `vllm:` in this format.
_OPEN_METRICS = "application/openmetrics-text"

Collect = Callable[[], Iterable[Family]]
"""Reads numbers, on the loop, before it returns; what it returns is iterated in a thread."""


class Metrics:
    """Turns numbers into what a scraper reads."""

    def __init__(self, collect: Collect, *, others: Collector | None = None) -> None:
        """Nothing is read yet.

        Args:
            collect: reads numbers.
            others: more of them, as an engine's own, which are read in the thread.
        """
        self._collect = collect
        self._others = others
        self._one_at_a_time = asyncio.Lock()
        self._said = False

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The text in one of the formats that a scraper accepts, and that format's name."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith(_OPEN_METRICS):
            encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]  # it is a partial
        async with self._one_at_a_time:
            read = _Read(self._collect(), self._others)
            return await asyncio.to_thread(encode, read), content_type

    async def respond(self, request: Request) -> Response:
        """Answer a scrape."""
        from starlette.responses import Response

        try:
            text, content_type = await self.text(request.headers.get("accept", ""))
        except Exception:
            if not self._said:
                self._said = True
                _LOGGER.exception("metrics cannot be told")
            return Response("metrics cannot be told, see the log\n", status_code=500)
        self._said = False
        return Response(text, headers={"content-type": content_type})


class _Read(Collector):
    """Families that have been read, and others that will be."""

    def __init__(self, families: Iterable[Family], others: Collector | None) -> None:
        self._families = families
        self._others = others

    def collect(self) -> Iterator[Family]:
        yield from self._families
        if self._others is not None:
            yield from self._others.collect()


class MetricsEndpoint:
    """`GET /metrics` of one process, on a port of its own."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        host: str,
        port: int = 0,
        token: Callable[[], str] | None = None,
    ) -> None:
        """Nothing is bound yet; for `token`, see `TokenGate`, for the rest, `SideServer`."""
        self._gate = TokenGate(metrics_app(metrics), token)
        self._server = SideServer(
            by_own_names(self._gate, host),
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
        """Serve no more. Idempotent."""
        await self._server.close()


def metrics_app(metrics: Metrics) -> AsgiApp:
    """An app with nothing but the metrics."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    return Starlette(routes=[Route(METRICS_PATH, metrics.respond, methods=["GET"])])
