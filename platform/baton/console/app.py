"""The console's ASGI application: a page, its files, server-sent events, queries, and a chat."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, TypeVar

import msgspec
from jinja2 import Environment
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.console.feed import Feed
from baton.console.hub import Hub, Mailbox, TooManyViewers
from baton.console.playground import CHAT_PATH, Playground
from baton.console.topics import Topic
from baton.domain.errors import BatonError
from baton.domain.names.retry_after import retry_after_seconds, retry_after_text

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
MAX_REQUEST_ID_CHARS: Final = 1024
"""Longest request id in a query, in characters."""
MAX_CONCURRENT_QUERIES: Final = 4
"""Queries that the feed answers at once; more wait."""
_CACHE_CONTROL: Final = "public, max-age=31536000, immutable"
SECTIONS: Final = (
    ("overview", "Overview"),
    ("fleet", "Fleet"),
    ("requests", "Requests"),
    ("scaling", "Scaling"),
    ("config", "Config"),
    ("playground", "Playground"),
)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_KEEPALIVE = b": \n\n"
_RETRY_AFTER_S = 10.0
_MEDIA_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files of other kinds are not served."""
_CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Nothing from other origins, nothing inline, and no string becomes markup."""
_SECURITY_HEADERS: Final = {
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
_OTHER_SITES = frozenset({"cross-site", "same-site"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asset:
    body: bytes
    media_type: str
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assets:
    """Files by path below `static/`, and a tag that changes with any of them.

    URLs contain the tag, so that modules that import each other by relative paths have one version.
    """

    tag: str
    by_path: Mapping[str, _Asset]


def console_app(feed: Feed, *, hub: Hub | None = None, deadline_s: float = 5.0) -> Starlette:
    """The console over a feed; `state.hub.close()` ends its streams.

    It can be mounted anywhere, because all its URLs are relative. The mounting application controls
    access.
    """
    playground = Playground(feed.chat_target)
    handlers = _Handlers(feed, hub or Hub(feed), deadline_s)
    app = Starlette(
        routes=[
            Route("/", handlers.page),
            Route("/static/{tag}/{path:path}", handlers.static),
            Route("/events", handlers.events),
            Route("/api/request", handlers.request),
            Route("/api/config", handlers.config),
            Route("/api/playground", playground.status),
            Route(CHAT_PATH, playground.chat, methods=["POST"]),
        ],
        middleware=[Middleware(_SecurityMiddleware)],
    )
    app.router.redirect_slashes = False
    app.state.hub = handlers.hub
    return app


class _QueryFailed(Exception):
    """The feed did not answer; the text is shown to the viewer."""


class _Handlers:
    def __init__(self, feed: Feed, hub: Hub, deadline_s: float) -> None:
        self.hub = hub
        self._feed = feed
        self._deadline_s = deadline_s
        self._query_slots = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)
        self._assets = _load_assets()
        template = Environment(autoescape=True).from_string(_page_template())
        self._html = template.render(tag=self._assets.tag, sections=SECTIONS)

    async def page(self, _request: Request) -> Response:
        return HTMLResponse(self._html, headers={"cache-control": "no-cache"})

    async def static(self, request: Request) -> Response:
        """A file; 404 for the tag of another version."""
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
            return JSONResponse({"reason": f"no topic {unknown[0][:64]!r}, there are {known}"}, 400)
        return EventStream(self.hub, frozenset(map(Topic, names)))

    async def request(self, request: Request) -> Response:
        request_id = request.query_params.get("id", "")
        if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
            return JSONResponse(
                {"reason": f"expected 'id', of 1 to {MAX_REQUEST_ID_CHARS} characters"}, 400
            )
        try:
            reports = await self._query_feed(lambda: self._feed.request(request_id))
        except _QueryFailed as error:
            return JSONResponse({"reason": str(error)}, 503)
        if not reports:
            reason = "no ingress has its record: an ingress keeps its last few thousand requests"
            return JSONResponse({"reason": reason}, 404)
        body = msgspec.json.encode({"requests": reports})
        return Response(body, media_type="application/json")

    async def config(self, request: Request) -> Response:
        try:
            body = (await self._query_feed(self._feed.config)).encode()
        except _QueryFailed as error:
            return JSONResponse({"reason": str(error)}, 503)
        headers = {
            "etag": f'"{hashlib.sha256(body).hexdigest()[:20]}"',
            "cache-control": "no-cache",
        }
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return PlainTextResponse(body, headers=headers)

    async def _query_feed(self, query: Callable[[], Awaitable[_T]]) -> _T:
        """Query the feed; the deadline includes the wait for a slot."""
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


class EventStream:
    """An ASGI response. A slow viewer misses frames: see `Mailbox`."""

    def __init__(self, hub: Hub, topics: frozenset[Topic], *, keepalive_s: float = 15.0) -> None:
        self._hub = hub
        self._topics = topics
        self._keepalive_s = keepalive_s
        """Interval of comments that keep an idle stream open in proxies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the viewer disconnects or the hub closes; 503 at the limit of viewers."""
        try:
            mailbox = self._hub.subscribe(self._topics)
        except TooManyViewers as error:
            response = JSONResponse(
                {"reason": f"{error}; {retry_after_text(_RETRY_AFTER_S)}"},
                status_code=503,
                headers={"retry-after": str(retry_after_seconds(_RETRY_AFTER_S))},
            )
            await response(scope, receive, send)
            return
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._serve(mailbox, receive, send)
        finally:
            self._hub.unsubscribe(mailbox)

    async def _serve(self, mailbox: Mailbox, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = {
                group.create_task(self._send_frames(mailbox, send)),
                group.create_task(_wait_for_disconnect(receive)),
            }
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def _send_frames(self, mailbox: Mailbox, send: Send) -> None:
        while frames := await self._next(mailbox):
            try:
                await send(_body(frames, more=True))
            except OSError:
                return  # the viewer is gone
        await send(_body(b"", more=False))

    async def _next(self, mailbox: Mailbox) -> bytes:
        try:
            async with asyncio.timeout(self._keepalive_s):
                return await mailbox.drain()
        except TimeoutError:
            return _KEEPALIVE


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _load_assets() -> _Assets:
    by_path = dict(_collect(files("baton.console") / "static", ""))
    digest = hashlib.sha256()
    for path in sorted(by_path):
        digest.update(path.encode() + b"\0" + by_path[path].etag.encode())
    return _Assets(tag=digest.hexdigest()[:12], by_path=by_path)


def _page_template() -> str:
    return (files("baton.console") / "templates" / "page.html").read_text(encoding="utf-8")


def _collect(folder: Traversable, prefix: str) -> list[tuple[str, _Asset]]:
    assets: list[tuple[str, _Asset]] = []
    for entry in folder.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            assets += _collect(entry, f"{path}/")
        elif (media_type := _MEDIA_TYPES.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            assets.append((path, _Asset(body=body, media_type=media_type, etag=etag)))
    return assets


class _SecurityMiddleware:
    """ASGI middleware that adds security headers and rejects all but GET, and POST of a chat.

    Another site may link here, but not fetch: it could read nothing, but occupy the slots of
    viewers. A chat must be JSON, which no other site can post without a preflight, also in browsers
    that do not say where a request comes from.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 405 or 403, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        app = _rejection(scope) or self._app
        await app(scope, receive, send_with_headers)


def _rejection(scope: Scope) -> ASGIApp | None:
    """The answer to a rejected request; None for an accepted request."""
    headers = Headers(scope=scope)
    if scope["method"] == "POST" and scope["path"].endswith(CHAT_PATH):
        return _chat_rejection(headers)
    if scope["method"] != "GET":
        return PlainTextResponse("the console only reads: GET\n", 405, headers={"allow": "GET"})
    is_link = headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site") in _OTHER_SITES and not is_link:
        return PlainTextResponse("not for other sites' pages\n", 403)
    return None


def _chat_rejection(headers: Headers) -> ASGIApp | None:
    if headers.get("sec-fetch-site") in _OTHER_SITES:
        return PlainTextResponse("not for other sites' pages\n", 403)
    if headers.get("content-type") != "application/json":
        return PlainTextResponse("a chat is application/json\n", 415)
    return None
