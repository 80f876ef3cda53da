"""The middle of a plain stream goes from vLLM's output processor to its client in one call.

Theory of operation: for each token vLLM makes an output and wakes the request's task. The task
passes it through five generators, the last of which makes a chunk. In a stream of plain text,
chunks differ only in the text. So the bypass samples the first chunks: if the text of one can be
replaced to give the other, the rest is the template. From then on, whenever a stream has sent all
it had and waits, the output processor fills the template with the next text and sends it at once.

vLLM's handler counts tokens, so it gets these tokens with the next output that goes vLLM's way, at
the latest the last one. Other outputs that go that way: the first, outputs while its task is busy
or its client reads too slowly, and all outputs of any other request.

A server's `send` runs up to its first wait in the task of vLLM's output processor. Before that it
must not ask for the current task (as `asyncio.timeout` does); uvicorn's and Ray Serve's do not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineGenerateError

from baton.engine.vllm.gate.gate import CURRENT_EXCHANGE, Exchange, Message
from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.api_server import restore_attribute
from baton.runtime.patch import replace_attributes

VllmObject: TypeAlias = Any
"""An object of vLLM, which mypy does not follow."""
_MAX_SAMPLED_OUTPUTS = 8
"""Outputs without a template before the bypass gives up."""
_UNKNOWN = object()
PATHS = ("/v1/chat/completions", "/v1/completions")
_JSON = b"application/json"


class ChunkTemplate(NamedTuple):
    """A chunk's bytes before and after its text."""

    prefix: bytes
    suffix: bytes

    def render(self, text: str) -> bytes:
        """The chunk with this text."""
        return self.prefix + msgspec.json.encode(text) + self.suffix


class Chunk(NamedTuple):
    """A text and its chunk."""

    text: str
    body: bytes


def find_template(first: Chunk, second: Chunk) -> ChunkTemplate | None:
    """The template of two chunks; None unless exactly the text differs."""
    if first.text == second.text:
        return None
    encoded_text, templates, offset = msgspec.json.encode(first.text), [], 0
    while (offset := first.body.find(encoded_text, offset)) >= 0:
        template = ChunkTemplate(first.body[:offset], first.body[offset + len(encoded_text) :])
        if template.render(second.text) == second.body:
            templates.append(template)
        offset += 1
    return templates[0] if len(templates) == 1 else None


def is_bypassable(request: VllmObject, app: VllmObject) -> bool:
    """Whether a request is a stream of the text of a single answer, without accounting per token.

    `app` is the state of vLLM's app. Its handlers must not parse tools or reasoning, log texts, or
    send keep-alive comments.
    """
    if not request.stream or request.n not in (None, 1) or request.use_beam_search:
        return False
    options = request.stream_options
    wants_continuous_usage = options is not None and options.continuous_usage_stats
    if wants_continuous_usage or request.return_token_ids or request.echo:
        return False
    if getattr(getattr(app, "args", None), "sse_keep_alive_interval", 0) > 0:
        return False
    if isinstance(request, CompletionRequest):
        handler = getattr(app, "openai_serving_completion", None)
        has_one_text = request.logprobs is None and _is_one_prompt(request.prompt)
        return has_one_text and not getattr(handler, "enable_force_include_usage", True)
    if isinstance(request, ChatCompletionRequest):
        return not request.logprobs and _is_passthrough(getattr(app, "openai_serving_chat", None))
    return False


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and isinstance(prompt[0], int)
    return isinstance(prompt, str)


def _is_passthrough(handler: VllmObject) -> bool:
    """Whether a handler of chats only passes texts on."""
    parser = getattr(handler, "parser_cls", _UNKNOWN)
    option_names = ("enable_log_outputs", "enable_force_include_usage")
    return parser is None and not any(getattr(handler, name, True) for name in option_names)


class StreamBypass:
    """The bypass of a request; its creator closes it."""

    def __init__(self, exchange: Exchange) -> None:
        self.unsent: asyncio.Task[None] | None = None
        """The rest of a send to a slow client; await it before the next send."""
        self._exchange = exchange
        self._state: VllmObject = None
        self._is_active = False
        """The stream has a template, has sent all, and waits for an output."""
        self._template: ChunkTemplate | None = None
        self._sampled_outputs = 0
        self._previous: Chunk | None = None
        self._text = ""
        self._chunks: list[bytes] = []
        self._uncounted: list[int] = []
        """Tokens that were sent and that vLLM's handler has not counted yet."""

    def attach(self, state: VllmObject) -> None:
        """Intercept outputs between vLLM's output processor and its state of the request."""
        if self._state is not None:  # it asks for more than one answer after all
            self._detach()
            return
        logprobs = state.logprobs_processor
        if (
            state.queue is not None
            and state.parent_req is None
            and state.output_kind == RequestOutputKind.DELTA
            and state.stream_interval == 1
            and state.detokenizer is not None
            and not state.streaming_input
            and logprobs.num_logprobs is None
            and logprobs.num_prompt_logprobs is None
        ):
            self._state = state
            replace_attributes(state, make_request_output=self._make_request_output)

    def on_output(self, output: VllmObject) -> None:
        """Record that an output goes vLLM's way."""
        self._is_active = False
        if self._template is None:
            self._text = output.outputs[0].text
            self._chunks.clear()

    def on_chunk(self, chunk: bytes) -> None:
        """Record a chunk that vLLM's handler has made."""
        if self._template is None and self._sampled_outputs < _MAX_SAMPLED_OUTPUTS:
            self._chunks.append(chunk)

    def on_idle(self) -> None:
        """Record that all chunks of the last output were sent, and the task waits for the next."""
        if self._template is None and self._sampled_outputs < _MAX_SAMPLED_OUTPUTS:
            self._sample()
        all_sent = self.unsent is None or self.unsent.done()
        self._is_active = self._template is not None and self._state is not None and all_sent

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self._detach()
        if self.unsent is not None:
            self.unsent.cancel()

    def _detach(self) -> None:
        self._is_active, self._sampled_outputs = False, _MAX_SAMPLED_OUTPUTS
        if self._state is not None:
            restore_attribute(self._state, "make_request_output")
            self._state = None

    def _sample(self) -> None:
        self._sampled_outputs += 1
        if not self._chunks:
            return
        chunk = Chunk(self._text, self._chunks[-1])  # a stream may begin with a chunk of its own
        if self._previous is not None:
            self._template = (
                find_template(self._previous, chunk) if len(self._chunks) == 1 else None
            )
        self._previous = chunk

    def _make_request_output(  # noqa: PLR0913, PLR0917 - as vLLM has it
        self,
        new_token_ids: Sequence[int],
        pooling_output: VllmObject,
        finish_reason: VllmObject,
        stop_reason: VllmObject,
        kv_transfer_params: VllmObject = None,
        ec_transfer_params: VllmObject = None,
        error: VllmObject = None,
    ) -> VllmObject:
        """Replaces the state's method: an output, or None when all of it is sent."""
        state = self._state
        if (
            self._is_active
            and finish_reason is None
            and new_token_ids
            and pooling_output is None
            and error is None
            and state.queue.output is None
            and not state.sampling_mask_chunks
            and self._exchange.is_passthrough
        ):
            self._uncounted += new_token_ids
            self._send(state.detokenizer.get_next_output_text(False, True))  # noqa: FBT003 - vLLM's
            return None
        output = type(state).make_request_output(
            state,
            new_token_ids,
            pooling_output,
            finish_reason,
            stop_reason,
            kv_transfer_params,
            ec_transfer_params,
            error=error,
        )
        if self._uncounted and output is not None:
            first = output.outputs[0]
            first.token_ids = [*self._uncounted, *first.token_ids]
            self._uncounted.clear()
        return output

    def _send(self, text: str) -> None:
        """Send a chunk. If the client is slow, a task does the rest.

        This must not raise: it would end vLLM's output processor, and all streams with it.
        """
        try:
            generator = self._exchange.send(self._message(text)).__await__()
            awaited = next(generator)
        except StopIteration:
            return
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - its own task raises it
            self._is_active = False
            self._state.queue.put(EngineGenerateError(f"not sent: {type(error).__name__}"))
            return
        self._is_active = False
        self.unsent = asyncio.get_running_loop().create_task(
            _finish(_StartedAwaitable(generator, awaited))
        )

    def _message(self, text: str) -> Message:
        assert self._template is not None, "a short cut is open once it has a form"
        return {
            "type": "http.response.body",
            "body": self._template.render(text),
            "more_body": True,
        }


class _StartedAwaitable(Generator[Any, Any, None]):
    """The rest of an awaitable that was started outside of a task."""

    def __init__(self, generator: Generator[Any, Any, None], awaited: object) -> None:
        self._generator = generator
        self._awaited: object = awaited
        self._has_yielded = False

    def __await__(self) -> Generator[Any, Any, None]:
        return self

    def send(self, value: object) -> object:
        """Yield the awaited future first, then resume."""
        if self._has_yielded:
            return self._generator.send(value)
        self._has_yielded = True
        return self._awaited

    def throw(self, *error: Any) -> object:  # noqa: ANN401 - as a generator has it
        """Raise in the awaitable."""
        self._has_yielded = True
        return self._generator.throw(*error)


async def _finish(started: _StartedAwaitable) -> None:
    await started


def install_response_bypass(app: Any, *, middleware: bool) -> None:  # noqa: ANN401 - vllm is not followed
    """Have vLLM's app send chunks directly to the gate, unless an operator added `middleware`."""
    is_direct = not middleware and not envs.VLLM_DEBUG_LOG_API_SERVER_RESPONSE
    table.RESPONSE_BYPASS.install(app, BypassStreamingResponse, is_direct=is_direct)


class BypassStreamingResponse(StreamingResponse):
    """A stream of which only start and end pass every layer.

    A response passes five: three handle errors, one counts responses, and one adds headers for
    browsers. Each is a coroutine that does nothing with a chunk, and there is a chunk per token. An
    operator's layers (vLLM's argument `middleware`) may need chunks: then all chunks pass every
    layer.
    """

    _direct_send: Send | None = None
    _bypass: StreamBypass | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        exchange = CURRENT_EXCHANGE.get()
        if exchange is not None and getattr(scope["app"].state, "streams_straight", False):
            self._direct_send = exchange.send
            self._bypass = exchange.bypass
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send start, chunks and end."""
        direct_send, bypass = self._direct_send or send, self._bypass
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            async for chunk in self.body_iterator:
                body = chunk.encode(self.charset) if isinstance(chunk, str) else chunk
                if bypass is not None:
                    if bypass.unsent is not None:
                        await bypass.unsent
                    bypass.on_chunk(bytes(body))
                await direct_send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            # Otherwise generators of a stream that is cut off run until garbage collection.
            if (close := getattr(self.body_iterator, "aclose", None)) is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def install_request_bypass(app: Any) -> tuple[str, ...]:  # noqa: ANN401 - vllm is not followed
    """Bypass FastAPI for these routes; returns the paths for which that was possible."""
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
    """Whether its handler needs only one body, the request and the check of a header."""
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
    """Serves a route by its handler, or by FastAPI.

    FastAPI tries each route in turn, and for each request resolves the handler's dependencies: here
    a check of a header and a body. With the bypass, generation routes come first, and a few lines
    replace that resolution, with FastAPI's own field and vLLM's own handler. The layers around the
    routes stay: they count responses and answer errors.

    A body that is not JSON or does not fit the handler's model goes to FastAPI from its first byte
    on, for the same errors. So does a route of another form than expected.
    """

    def __init__(self, route: APIRoute, fastapi: ASGIApp, *, bypasses_streams: bool) -> None:
        """`fastapi` is the route's original app."""
        self._bypasses_streams = bypasses_streams
        self._endpoint: Callable[..., Any] = route.endpoint
        self._field = route.body_field
        self._fastapi = fastapi

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if not _is_json(scope):
            await self._fastapi(scope, receive, send)
            return
        body = _ReplayableBody(receive)
        await body.read()
        request = self._parse(body)
        if request is None:
            await self._fastapi(scope, body.replay, send)
            return
        # From the body's first byte on, in case a handler reads it.
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
        if response is None:  # its client has disconnected
            response = JSONResponse(None)
        assert isinstance(response, Response), "vLLM's handlers say how they answer"
        await response(raw_request.scope, receive, send)

    def _parse(self, body: _ReplayableBody) -> object:
        """The handler's request; None where FastAPI must report an error."""
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
        return request  # None after errors


class _ReplayableBody:
    """A request's body, which can be read again."""

    def __init__(self, receive: Receive) -> None:
        self.is_complete = False
        self.content = b""
        self._receive = receive
        self._messages: list[Message] = []
        self._failure: Exception | None = None

    async def read(self) -> None:
        """Read all of it, or up to a disconnect or an error."""
        parts = []
        while not self.is_complete:
            try:
                message = await self._receive()
            except Exception as error:  # noqa: BLE001 - raised at the next read
                self._failure = error
                return
            self._messages.append(message)
            if message["type"] != "http.request":
                return
            parts.append(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
        self.content = b"".join(parts)

    async def replay(self) -> Message:
        """The next message, from the first one on; then the messages after the body."""
        if self._messages:
            return self._messages.pop(0)
        if self._failure is not None:
            raise self._failure
        return await self._receive()


def _is_json(scope: Scope) -> bool:
    content_types = [value for name, value in scope["headers"] if name == b"content-type"]
    return len(content_types) == 1 and content_types[0].split(b";", 1)[0].lower() == _JSON
