"""The ASGI layer in front of vLLM's app: routes, callers, and the shape of errors.

Theory of operation: a request gets 404 before vLLM sees it if its exact path is not listed. So
routes that a new vLLM adds are closed until an operator opens them. Then the gate checks the head
(`http`), the caller, the size of the body, and whether the fleet admits requests. It checks a body
again when it is complete (`limits`), before vLLM parses it; a body that takes too long ends the
exchange.

Each request gets an `Exchange`, which the engine client inside vLLM's handlers reaches through a
context variable. The gate holds its response back until the first token, the complete response or
an error. So an error before the first token has a real status code, streaming or not. A later error
is the last event of the stream, in the shape of its API. Nothing is buffered once tokens flow. A
keep-alive comment (vLLM's `sse_keep_alive_interval`) sends the status at once; a later error is an
event of the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from baton.domain.errors import BatonError
from baton.domain.names.trace_context import TraceContext
from baton.engine.vllm.gate.access import Access, forwarded_headers, trace_context
from baton.engine.vllm.gate.adapters import (
    ADAPTER_PATHS,
    Administer,
    parse_adapter_request,
    success_body,
)
from baton.engine.vllm.gate.errors import INTERNAL, Dialect, Problem, sanitize, to_dialect
from baton.engine.vllm.gate.http import check_head
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.engine.vllm.gate.model_list import LIST_PATH, ModelList, is_model_path
from baton.engine.vllm.wire.identity import ANONYMOUS, Caller, session_in_body, session_in_headers

if TYPE_CHECKING:
    from baton.engine.vllm.fast_path.stream_bypass import StreamBypass

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
HEALTH_PATH = "/health"
ROUTES: Mapping[str, tuple[str, ...]] = {
    "chat": ("/v1/chat/completions",),
    "completions": ("/v1/completions",),
    "models": (LIST_PATH,),
    "responses": ("/v1/responses",),
    "messages": ("/v1/messages", "/v1/messages/count_tokens"),
    "tokenize": ("/tokenize", "/detokenize"),
    "health": (HEALTH_PATH,),
    "metrics": ("/metrics",),
    "adapters": ADAPTER_PATHS,
}
"""Paths by the names that a configuration uses."""
GENERATION_PATHS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Dialect.OPENAI,
    "/v1/completions": Dialect.OPENAI,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/messages": Dialect.ANTHROPIC,
}
"""Paths that generate tokens, with the shape of their errors."""
METHODS: Mapping[str, tuple[str, ...]] = {
    LIST_PATH: ("GET",),
    HEALTH_PATH: ("GET", "HEAD"),
    "/metrics": ("GET", "HEAD"),
}
"""Of paths that accept other methods than `POST`."""
ANTHROPIC_HEADER = b"anthropic-version"
"""Anthropic's clients send it with every request."""
MESSAGES_PATH = "/v1/messages"

# A stream with more events than this before its first token is released; its errors are events.
_MAX_BUFFERED_MESSAGES = 8

# Lines of a stream that only keep its connection alive.
_COMMENT = b":"

# The start of an error that vLLM's handler of messages sends by itself.
_ERROR_EVENT = b"event: error"
_MALFORMED_BODY_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_UNREADABLE = Problem(
    status=400, message="a field of the body is of a type, or has a value, that it cannot have"
)
_FIRST_ERROR, _FIRST_SERVER_ERROR = 400, 500
_ADAPTERS_NOT_READY = Problem(status=503, message="adapters cannot be loaded here yet; try again")
_PLAIN_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
_MAX_METHOD_CHARS = 20
_CLIENT_ERROR = ("vllm.exceptions", "VLLMClientError")
"""By its name, so that listing routes does not import vLLM."""
logger = logging.getLogger(__name__)
_DRAIN_TIMEOUT_S = 5.0
_SALT_FIELD = b'"cache_salt"'


class _BodyRejected(Exception):
    """Stops reading a body that breaks a limit."""


class Exchange:
    """A request and its response, which is held back until it flows or is complete."""

    __slots__ = (
        "_buffered",
        "_dialect",
        "_ended",
        "_is_stream",
        "_send",
        "_sent_messages",
        "bypass",
        "caller",
        "generates",
        "has_begun_stream",
        "has_cache_salt",
        "has_output",
        "problem",
        "session",
        "submitted",
        "trace",
    )

    def __init__(
        self,
        dialect: Dialect,
        send: Send,
        *,
        generates: bool,
        caller: Caller = ANONYMOUS,
        trace: TraceContext | None = None,
    ) -> None:
        self.caller = caller
        self.trace = trace
        self.generates = generates
        """Whether it asks the fleet for tokens."""
        self.submitted = False
        """Whether vLLM accepted its body and sent it to the fleet."""
        self.has_cache_salt = False
        """Whether its body names a cache salt."""
        self.session: str | None = None
        """The session in fields or headers that vLLM's handlers do not read."""
        self.has_output = False
        """Whether the engine's first output has arrived."""
        self.has_begun_stream = False
        """Whether chunks of a stream are made, so that vLLM's errors would be among them."""
        self.bypass: StreamBypass | None = None
        self.problem: Problem | None = None
        """Why it ends early; later messages of the app are dropped."""
        self._dialect = dialect
        self._send = send
        self._buffered: list[Message] | None = []
        self._is_stream = False
        self._sent_messages = 0
        self._ended = False

    @property
    def is_passthrough(self) -> bool:
        """Whether messages of the app go to the client unchanged."""
        return self._buffered is None and self.problem is None and not self._ended

    def send(self, message: Message) -> Awaitable[None]:
        """Pass on, hold back or replace a message of the app."""
        if self._buffered is not None or self.problem is not None or self._ended:
            return self._buffer_or_end(message)
        if self._may_carry_errors and message.get("body", b"").startswith(_ERROR_EVENT):
            self.problem = INTERNAL
            return self.end_with(INTERNAL)
        # No coroutine around the server's: there is one such message per token.
        return self._forward(message)

    async def _buffer_or_end(self, message: Message) -> None:
        if self._buffered is not None and message["type"] == "http.response.start":
            self._is_stream = _is_event_stream(message)
        body: bytes = message.get("body", b"")
        if self._may_carry_errors and self.problem is None and body.startswith(_ERROR_EVENT):
            self.problem = INTERNAL  # of the handler itself: a request's own was noted before
        if self.problem is not None:
            await self.end_with(self.problem)
        elif self._buffered is not None:
            self._buffered.append(message)
            is_complete = _is_last(message) and not self._awaits_exception
            is_comment = self._is_stream and body.startswith(_COMMENT)
            if (
                self.has_output
                or is_complete
                or is_comment
                or len(self._buffered) > _MAX_BUFFERED_MESSAGES
            ):
                await self._flush()

    @property
    def _may_carry_errors(self) -> bool:
        """Whether vLLM's handler may put errors into the stream without raising them."""
        return self._is_stream and self._dialect is Dialect.ANTHROPIC

    @property
    def _awaits_exception(self) -> bool:
        """Whether the app is about to raise: frameworks send 500 first."""
        return not self.submitted and bool(
            (self._buffered or [{}])[0].get("status", 0) >= _FIRST_SERVER_ERROR
        )

    async def end_with(self, problem: Problem) -> None:
        """End with an error: a status, or an event if the response has begun. Idempotent."""
        if self._ended:
            return
        if self._buffered is not None:
            self._buffered, self._ended = None, True
            await send_problem(self._send, problem, self._dialect)
        elif self._is_stream:
            event = problem.event(self._dialect, sequence_number=self._sent_messages)
            self._ended = True
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def finish(self) -> None:
        """Send the rest after the app has returned."""
        if self.problem is not None:
            await self.end_with(self.problem)
        elif self._buffered:
            await self._flush()

    async def _flush(self) -> None:
        buffered, self._buffered = self._buffered or [], None
        for message in _to_dialect(buffered, self._dialect):
            if not self._ended:
                await self._forward(message)

    def _forward(self, message: Message) -> Awaitable[None]:
        if message["type"] != "http.response.start":
            self._sent_messages += 1
            self._ended = _is_last(message)
        return self._send(message)


CURRENT_EXCHANGE: ContextVar[Exchange | None] = ContextVar("baton_exchange", default=None)
"""The exchange of the running task; vLLM passes no values of baton to its engine."""


class Gate:
    """An ASGI app that lets listed requests through to `app`."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        routes: Collection[str],
        healthy: Callable[[], bool],
        admit: Callable[[int, Caller], BatonError | None],
        limits: FrontendLimits | None = None,
        access: Access | None = None,
    ) -> None:
        self.limits = limits or FrontendLimits()
        """May be replaced at any time; a request keeps the limits of its arrival."""
        self.access = access or Access()
        """Likewise."""
        self._app = app
        self._paths = frozenset(path for name in routes for path in ROUTES[name])
        self._healthy = healthy
        self._admit = admit
        self.administer: Administer | None = None
        """Loads and unloads adapters; None until the ingress sets it."""

    def replace_app(self, app: AsgiApp, *, healthy: Callable[[], bool]) -> None:
        """Let requests through to an app of several models.

        The body names the model, so only the models' own apps can report that they are full.
        """
        self._app, self._healthy, self._admit = app, healthy, _admit_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
            case _:
                await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        dialect = _dialect(path, scope["headers"])
        if (problem := check_head(scope)) is not None:
            await send_problem(send, problem, dialect)
        elif not self._is_listed(scope):
            await send_problem(send, Problem(status=404, message="not found"), dialect)
        elif path == HEALTH_PATH:
            await self._serve_health(scope, send, dialect)
        else:
            await self._serve_listed(scope, receive, send, dialect)

    async def _serve_health(self, scope: Scope, send: Send, dialect: Dialect) -> None:
        methods = METHODS[HEALTH_PATH]
        if scope["method"] not in methods:
            await send_problem(send, method_not_allowed(scope["method"], methods), dialect)
        else:
            await _respond(send, 200 if self._healthy() else 503)

    def _is_listed(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if is_model_path(path):
            return LIST_PATH in self._paths
        # The raw path tells `/v1/%63hat` from `/v1/chat`; servers may leave it out.
        return path in self._paths and scope.get("raw_path") in {None, path.encode()}

    async def _serve_listed(
        self, scope: Scope, receive: Receive, send: Send, dialect: Dialect
    ) -> None:
        path: str = scope["path"]
        caller = self.access.identify_caller(scope["headers"])
        if isinstance(caller, Problem):
            await send_problem(send, caller, dialect)
            return
        if scope["method"] not in (methods := allowed_methods(path)):
            await send_problem(send, method_not_allowed(scope["method"], methods), dialect)
            return
        body = _BoundedBody(receive, path, self.limits)
        if body.is_declared_too_large(scope["headers"]):
            if not _has_header(scope["headers"], b"expect"):
                # A client that is cut off while it still writes never reads the answer.
                await body.drain()
            await send_problem(send, body.too_large, dialect)
            return
        if path in ADAPTER_PATHS:
            await self._serve_adapters(scope, body, send)
            return
        generates = scope["method"] == "POST" and path in GENERATION_PATHS
        if generates and (rejection := self._admit(1, caller)) is not None:
            await send_problem(send, Problem.from_error(rejection), dialect)
            return
        trace = None
        if generates:
            sample_fraction = self.access.trace_sample_fraction
            trace = trace_context(scope["headers"], path, sample_fraction=sample_fraction)
        exchange = Exchange(dialect, send, generates=generates, caller=caller, trace=trace)
        if generates:
            exchange.session = session_in_headers(scope["headers"])
        body.exchange = exchange
        # With spec 2.4 or later, Starlette notices a disconnect only when it next sends, and a
        # waiting client that leaves would keep its place.
        asgi_info = {**scope.get("asgi", {}), "spec_version": "2.3"}
        scope = {**scope, "asgi": asgi_info, "headers": forwarded_headers(scope["headers"])}
        is_models = path == LIST_PATH or is_model_path(path)
        app: AsgiApp = ModelList(self._app, dialect) if is_models else self._app
        await _run(app, exchange, scope, body.receive)

    async def _serve_adapters(self, scope: Scope, body: _BoundedBody, send: Send) -> None:
        """Load or unload an adapter; only for keys that may administer."""
        path, administer = scope["path"], self.administer
        administrator = self.access.identify_administrator(scope["headers"])
        if isinstance(administrator, Problem):
            await send_problem(send, administrator, Dialect.OPENAI)
            return
        exchange = body.exchange = Exchange(Dialect.OPENAI, send, generates=False)
        try:
            request = parse_adapter_request(path, await body.read_all(), administrator.tenant)
        except _BodyRejected:
            await exchange.finish()
            return
        if isinstance(request, Problem):
            await send_problem(send, request, Dialect.OPENAI)
            return
        problem = _ADAPTERS_NOT_READY if administer is None else await administer(request)
        if problem is not None:
            await send_problem(send, problem, Dialect.OPENAI)
            return
        await _respond(send, 200, body=success_body(request), headers=_PLAIN_TEXT)


async def _run(app: AsgiApp, exchange: Exchange, scope: Scope, receive: Receive) -> None:
    token = CURRENT_EXCHANGE.set(exchange)
    try:
        await app(scope, receive, exchange.send)
    except Exception as error:
        problem = _request_problem(error, submitted=exchange.submitted)
        if exchange.problem is None and problem is not None:
            await exchange.end_with(problem)
            return
        if exchange.problem is None:
            # The server closes the connection; a proxy in front of it must know.
            await exchange.end_with(replace(INTERNAL, close=True))
            raise
        # vLLM's handlers fail on some errors on their way out; this one is known.
        logger.debug("the app raised after %s", exchange.problem, exc_info=True)
        await exchange.finish()
    else:
        await exchange.finish()
    finally:
        CURRENT_EXCHANGE.reset(token)


def _request_problem(error: BaseException, *, submitted: bool) -> Problem | None:
    """The error of a request that stopped the app; None if the request was not the cause.

    vLLM's checks raise on fields of unexpected types. After submission that would be baton's error,
    except for streams of `/v1/responses`: vLLM checks them late, and Starlette raises that they
    have begun.
    """
    cause: BaseException | None = error
    while cause is not None:
        if _CLIENT_ERROR in {(base.__module__, base.__name__) for base in type(cause).__mro__}:
            return Problem(status=_FIRST_ERROR, message=sanitize(str(cause)))
        if isinstance(cause, ValidationError if submitted else _MALFORMED_BODY_ERRORS):
            return _UNREADABLE
        cause = cause.__cause__
    return None


def _admit_all(_requests: int, _caller: Caller) -> None:
    """Reject no request."""


async def reject_request(scope: Scope, send: Send, problem: Problem) -> None:
    """Answer a request with an error in the shape of its API."""
    await send_problem(send, problem, _dialect(scope["path"], scope["headers"]))


async def send_problem(send: Send, problem: Problem, dialect: Dialect) -> None:
    """Send a complete error response."""
    headers = [(b"content-type", b"application/json"), *problem.headers()]
    await _respond(send, problem.status, body=problem.body(dialect), headers=headers)


async def _respond(
    send: Send, status: int, *, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def allowed_methods(path: str) -> tuple[str, ...]:
    """The methods that a listed path has."""
    return METHODS.get(LIST_PATH if is_model_path(path) else path, ("POST",))


def method_not_allowed(method: str, methods: Sequence[str]) -> Problem:
    """The answer to a method that a path does not have."""
    expected = " or ".join(methods)
    return Problem(
        status=405,
        message=f"got the method {method[:_MAX_METHOD_CHARS]}, expected {expected}",
        allow=", ".join(methods),
    )


def _dialect(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Dialect:
    """The shape of errors: Anthropic's for its paths and clients, else the path's."""
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        return Dialect.ANTHROPIC
    if any(name.lower() == ANTHROPIC_HEADER for name, _ in headers):
        return Dialect.ANTHROPIC
    return GENERATION_PATHS.get(path, Dialect.OPENAI)


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _to_dialect(messages: list[Message], dialect: Dialect) -> list[Message]:
    """A response; a complete error gets the shape of its route's API."""
    start = messages[0]
    if start.get("status", 0) < _FIRST_ERROR or not _is_last(messages[-1]):
        return messages
    body = b"".join(message.get("body", b"") for message in messages[1:])
    converted = to_dialect(start["status"], body, dialect)
    if converted is None:
        return messages
    replaced_headers = {b"content-length", b"content-type"}
    headers = [(name, value) for name, value in start["headers"] if name not in replaced_headers]
    headers.append((b"content-type", b"application/json"))
    headers.append((b"content-length", str(len(converted)).encode()))
    end = {"type": "http.response.body", "body": converted, "more_body": False}
    return [{**start, "headers": headers}, end]


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


def _has_header(headers: Collection[tuple[bytes, bytes]], header: bytes) -> bool:
    return any(name == header for name, _ in headers)


class _BoundedBody:
    """A request's body, which ends the exchange when it breaks a limit."""

    def __init__(self, receive: Receive, path: str, limits: FrontendLimits) -> None:
        self.exchange: Exchange | None = None
        """None until the gate has made it."""
        self._receive = receive
        self._path = path
        self._limits = limits
        self._max_bytes = limits.max_body_bytes
        self._bytes = 0
        self._chunks: list[bytes] = []
        self._complete = False
        self._deadline_at_s = asyncio.get_running_loop().time() + limits.max_body_s

    @property
    def too_large(self) -> Problem:
        """The answer to a body over the limit."""
        return Problem(
            status=413, message=f"the request body is larger than {self._max_bytes} bytes"
        )

    def is_declared_too_large(self, headers: Collection[tuple[bytes, bytes]]) -> bool:
        """Whether Content-Length is over the limit; the body need not be read then."""
        return any(
            name == b"content-length" and value.isdigit() and int(value) > self._max_bytes
            for name, value in headers
        )

    async def receive(self) -> Message:
        """The next ASGI message of the body.

        Raises:
            BodyRejected: it breaks a limit; the exchange has the problem.
        """
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_at_s):
                message = await self._receive()
        except TimeoutError as error:
            raise self._reject(self._too_slow) from error
        if message["type"] == "http.request":
            problem = self._on_body_message(message)
            if problem is not None:
                raise self._reject(problem)
        return message

    async def read_all(self) -> bytes:
        """The whole body; less if the client disconnects.

        Raises:
            BodyRejected: it breaks a limit; the exchange has the problem.
        """
        parts = []
        while not self._complete:
            message = await self.receive()
            if message["type"] != "http.request":
                break
            parts.append(message.get("body", b""))
        return b"".join(parts)

    @property
    def _too_slow(self) -> Problem:
        limit_s = self._limits.max_body_s
        message = f"the request body was not complete within {limit_s:g} s"
        return Problem(status=408, message=message, close=True)

    def _reject(self, problem: Problem) -> _BodyRejected:
        if self.exchange is not None:
            # The app may turn the exception into an answer of its own, which is then replaced.
            self.exchange.problem = problem
        return _BodyRejected()

    def _on_body_message(self, message: Message) -> Problem | None:
        chunk: bytes = message.get("body", b"")
        self._bytes += len(chunk)
        if self._bytes > self._max_bytes:
            return self.too_large
        self._chunks.append(chunk)
        if message.get("more_body"):
            return None
        self._complete = True
        body, self._chunks = b"".join(self._chunks), []
        if self.exchange is not None:
            self.exchange.has_cache_salt = _SALT_FIELD in body
            if self.exchange.generates and self.exchange.session is None:
                self.exchange.session = session_in_body(body)
        return self._limits.check_body(self._path, body)

    async def drain(self) -> None:
        """Read and discard at most twice the limit."""
        remaining_bytes = 2 * self._max_bytes
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                while remaining_bytes > 0:
                    message = await self._receive()
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
                    remaining_bytes -= len(message.get("body", b""))
        except TimeoutError:
            return
