"""The console as an application: one page, its files, its events, and two answers on demand."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from jinja2 import Environment
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.console.assets import load_assets, page_template
from baton.console.feed import Feed
from baton.console.hub import Hub
from baton.console.security import SecurityMiddleware
from baton.console.stream import EventStream
from baton.console.topics import Topic
from baton.domain.errors import BatonError

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
MAX_REQUEST_ID_CHARS: Final = 1024
"""Longest request id that a caller may ask for, in characters."""
MAX_CONCURRENT_QUERIES: Final = 4
"""Answers on demand that are worked on at once; more wait for their turn."""
_CACHE_CONTROL: Final = "public, max-age=31536000, immutable"
SECTIONS: Final = (
    ("overview", "Overview"),
    ("fleet", "Fleet"),
    ("requests", "Requests"),
    ("scaling", "Scaling"),
    ("config", "Config"),
)


def console_app(feed: Feed, *, hub: Hub | None = None, deadline_s: float = 5.0) -> Starlette:
    """The console over a feed; `state.hub.close()` ends its streams.

    It may be mounted anywhere: the page names everything relative to itself. The mounting
    application decides about access.
    """
    handlers = _Handlers(feed, hub or Hub(feed), deadline_s)
    app = Starlette(
        routes=[
            Route("/", handlers.page),
            Route("/static/{tag}/{path:path}", handlers.static),
            Route("/events", handlers.events),
            Route("/api/request", handlers.request),
            Route("/api/config", handlers.config),
        ],
        middleware=[Middleware(SecurityMiddleware)],
    )
    app.router.redirect_slashes = False
    app.state.hub = handlers.hub
    return app


class _QueryFailed(Exception):
    """The feed does not say; the text is for the viewer."""


class _Handlers:
    def __init__(self, feed: Feed, hub: Hub, deadline_s: float) -> None:
        self.hub = hub
        self._feed = feed
        self._deadline_s = deadline_s
        self._query_slots = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)
        self._assets = load_assets()
        template = Environment(autoescape=True).from_string(page_template())
        self._html = template.render(tag=self._assets.tag, sections=SECTIONS)

    async def page(self, _request: Request) -> Response:
        return HTMLResponse(self._html, headers={"cache-control": "no-cache"})

    async def static(self, request: Request) -> Response:
        """A file. An address with another tag is one of another version: it is gone."""
        asset = self._assets.by_path.get(request.path_params["path"])
        if asset is None or request.path_params["tag"] != self._assets.tag:
            return PlainTextResponse("no such file, load the page again\n", 404)
        headers = {"etag": asset.etag, "cache-control": _CACHE_CONTROL}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, media_type=asset.media_type, headers=headers)

    async def events(self, request: Request) -> ASGIApp:
        names = [name for name in request.query_params.get("topics", "").split(",") if name]
        unknown = sorted(set(names) - set(Topic))
        if unknown:
            known = ", ".join(Topic)
            return JSONResponse({"why": f"no topic {unknown[0][:64]!r}, there are {known}"}, 400)
        return EventStream(self.hub, frozenset(map(Topic, names)))

    async def request(self, request: Request) -> Response:
        """The whole records of one request."""
        request_id = request.query_params.get("id", "")
        if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
            return JSONResponse(
                {"why": f"expected 'id', of 1 to {MAX_REQUEST_ID_CHARS} characters"}, 400
            )
        try:
            reports = await self._query_feed(lambda: self._feed.request(request_id))
        except _QueryFailed as error:
            return JSONResponse({"why": str(error)}, 503)
        if not reports:
            why = "nobody remembers it: an ingress keeps its last few thousand requests"
            return JSONResponse({"why": why}, 404)
        body = msgspec.json.encode({"requests": reports})
        return Response(body, media_type="application/json")

    async def config(self, request: Request) -> Response:
        """The configuration that holds, as YAML."""
        try:
            body = (await self._query_feed(self._feed.config)).encode()
        except _QueryFailed as error:
            return JSONResponse({"why": str(error)}, 503)
        headers = {
            "etag": f'"{hashlib.sha256(body).hexdigest()[:20]}"',
            "cache-control": "no-cache",
        }
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return PlainTextResponse(body, headers=headers)

    async def _query_feed(self, query: Callable[[], Awaitable[_T]]) -> _T:
        """Ask the feed, with a deadline, for the wait of its turn as well."""
        try:
            async with asyncio.timeout(self._deadline_s), self._query_slots:
                return await query()
        except TimeoutError:
            raise _QueryFailed(f"no answer within {self._deadline_s:g} s") from None
        except BatonError as error:
            raise _QueryFailed(str(error)) from error
        except Exception as error:
            _LOGGER.warning("console cannot answer", exc_info=error)
            raise _QueryFailed("it cannot be read: see the controller's log") from error
