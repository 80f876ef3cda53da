"""Requests for tokens go from vLLM's app to vLLM's handlers, past FastAPI's search for the way.

FastAPI tries each route of the app in turn, and for the one that fits solves for each request what
its handler depends on: a graph of one check of a header and one body. Here the routes that ask for
tokens come first, and what FastAPI does for them is done in a few lines, by FastAPI's own field and
vLLM's own handler. The layers around the routes stay: they count responses and answer errors.

Whatever is not a readable body of JSON that fits the handler's model takes FastAPI's way from its
first byte on, so that errors are worded by those who know; and so does a route that is of another
form than this was written for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from baton.engine.vllm.fast_path.stream_bypass import StreamBypass, is_bypassable
from baton.engine.vllm.gate.gate import CURRENT_EXCHANGE
from baton.engine.vllm.patches import table

PATHS = ("/v1/chat/completions", "/v1/completions")
_JSON = b"application/json"


def install_request_bypass(app: Any) -> tuple[str, ...]:  # noqa: ANN401 - vllm is not followed
    """Have the app serve those routes so; returns which of them it does."""
    routes = app.router.routes
    token_routes = [
        route for route in routes if isinstance(route, APIRoute) and route.path in PATHS
    ]
    bypassed = (
        []
        if app.dependency_overrides
        else [token_route for token_route in token_routes if _is_plain(token_route)]
    )
    bypasses_streams = table.STREAM_BYPASS.fits()
    is_installed = table.REQUEST_BYPASS.install(
        app,
        [*bypassed, *(route for route in routes if route not in bypassed)],
        [
            (route, BypassRoute(route, route.app, bypasses_streams=bypasses_streams))
            for route in bypassed
        ],
    )
    return tuple(route.path for route in bypassed) if is_installed else ()


def _is_plain(route: APIRoute) -> bool:
    """Whether its handler gets one body and the request, once a header was looked at; no more."""
    dependant = route.dependant
    params = (
        dependant.path_params,
        dependant.query_params,
        dependant.header_params,
        dependant.cookie_params,
    )
    return (
        not any(params)
        and [dependency.call for dependency in dependant.dependencies] == [validate_json_request]
        and [body_param.name for body_param in dependant.body_params] == ["request"]
        and dependant.request_param_name == "raw_request"
        and dependant.background_tasks_param_name is None
        and dependant.response_param_name is None
        and route.body_field is not None
        and route.methods == {"POST"}
    )


class BypassRoute:
    """What serves a route: its handler, or FastAPI."""

    def __init__(self, route: APIRoute, fastapi: ASGIApp, *, bypasses_streams: bool) -> None:
        """`fastapi` is what has served it."""
        self._bypasses_streams = bypasses_streams
        self._endpoint: Callable[..., Any] = route.endpoint
        self._field = route.body_field
        self._fastapi = fastapi

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if not _is_json(scope):
            await self._fastapi(scope, receive, send)
            return
        body = ReplayableBody(receive)
        await body.read()
        request = self._parse(body)
        if request is None:
            await self._fastapi(scope, body.replay, send)
            return
        # From the body's first byte on, should a handler want to read it for itself.
        raw_request = Request(scope, body.replay, send)
        exchange = CURRENT_EXCHANGE.get()
        if (
            exchange is None
            or not self._bypasses_streams
            or not is_bypassable(request, raw_request.app.state)
        ):
            await self._serve(request, raw_request, receive, send)
            return
        exchange.bypass = bypass = StreamBypass(exchange)
        try:
            await self._serve(request, raw_request, receive, send)
        finally:
            exchange.bypass = None
            bypass.close()

    async def _serve(
        self, request: object, raw_request: Request, receive: Receive, send: Send
    ) -> None:
        response = await self._endpoint(request=request, raw_request=raw_request)
        if response is None:  # its client has gone
            response = JSONResponse(None)
        assert isinstance(response, Response), "vLLM's handlers say how they answer"
        await response(raw_request.scope, receive, send)

    def _parse(self, body: ReplayableBody) -> object:
        """The handler's request; None where FastAPI shall say what is wrong."""
        if not body.is_complete:
            return None
        try:
            value = json.loads(body.content)
        except (ValueError, RecursionError):
            return None
        assert self._field is not None, "only such a route is served so"
        try:
            request, _errors = self._field.validate(value, {}, loc=("body",))
        except Exception:  # noqa: BLE001 - vLLM's checks stumble over some values, which is answered
            return None
        return request  # None where there are errors


class ReplayableBody:
    """A request's body, which can be read again as it came."""

    def __init__(self, receive: Receive) -> None:
        self.is_complete = False
        self.content = b""
        self._receive = receive
        self._messages: list[Message] = []
        self._failure: Exception | None = None

    async def read(self) -> None:
        """Read all of it, or up to what ended it."""
        parts = []
        while not self.is_complete:
            try:
                message = await self._receive()
            except Exception as error:  # noqa: BLE001 - raised for whoever reads it again
                self._failure = error
                return
            self._messages.append(message)
            if message["type"] != "http.request":
                return
            parts.append(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
        self.content = b"".join(parts)

    async def replay(self) -> Message:
        """The next message, from the first one on; then what comes after the body."""
        if self._messages:
            return self._messages.pop(0)
        if self._failure is not None:
            raise self._failure
        return await self._receive()


def _is_json(scope: Scope) -> bool:
    content_types = [value for name, value in scope["headers"] if name == b"content-type"]
    return len(content_types) == 1 and content_types[0].split(b";", 1)[0].lower() == _JSON
