"""Assignments to vLLM's API server and its client; each is the `apply` of a row of `table`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from baton.runtime.patch import MissingAttribute, replace_attributes, wrap_attribute

VllmObject: TypeAlias = Any
"""An object of vLLM or FastAPI, which mypy does not follow."""
Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

BEAM_SEARCH_HANDLERS = ("openai_serving_chat", "openai_serving_completion")
STREAMING_HANDLERS = (
    "openai_serving_chat",
    "openai_serving_responses",
    "openai_serving_completion",
    "anthropic_serving_messages",
)
ROUTERS = (
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.openai.responses.api_router",
)
"""Modules whose routes answer with a stream."""
_RAW_STREAM_METHOD = "chat_completion_stream_generator_raw"


def wrap_beam_search(state: VllmObject, wrap: Wrap) -> None:
    """Wrap the beam search of each handler of an app."""
    for handler in _handlers(state, BEAM_SEARCH_HANDLERS):
        wrap_attribute(handler, "beam_search", wrap)


def wrap_stream_errors(
    state: VllmObject, *, streamed: Wrap, raw_stream: Wrap, raw_error: Wrap
) -> None:
    """Wrap the methods by which handlers end a stream with an error.

    From vLLM 0.33 on, chat chunks and errors among them become text later.
    """
    for handler in _handlers(state, STREAMING_HANDLERS):
        wrap_attribute(handler, "create_streaming_error_response", streamed)
        if hasattr(handler, _RAW_STREAM_METHOD):
            wrap_attribute(handler, _RAW_STREAM_METHOD, raw_stream)
            wrap_attribute(handler, "create_error_response", raw_error)


def _handlers(state: VllmObject, names: Iterable[str]) -> list[VllmObject]:
    """Handlers of an app; vLLM has None where the model does not support one.

    Raises:
        MissingAttribute: the app has no such name.
    """
    missing = [name for name in names if not hasattr(state, name)]
    if missing:
        raise MissingAttribute(f"app.state without {', '.join(missing)}")
    return [handler for name in names if (handler := getattr(state, name)) is not None]


def replace_validation_handler(handler: Callable[..., Any]) -> None:
    """Replace the next app's handler of invalid bodies."""
    from vllm.entrypoints.serve.exception_handling import register

    replace_attributes(register, validation_exception_handler=handler)


def set_server(app: VllmObject, server: object) -> None:
    """Set the server that vLLM's error handlers stop; vLLM's launcher does so otherwise."""
    app.state.server = server


def replace_streaming_responses(app: VllmObject, response_class: type, *, is_direct: bool) -> None:
    """Have vLLM's routes stream through this class; `is_direct` applies only to this app."""
    app.state.streams_straight = is_direct
    for module in map(importlib.import_module, ROUTERS):
        replace_attributes(module, StreamingResponse=response_class)


def replace_routes(
    app: VllmObject, routes: Sequence[VllmObject], apps: Iterable[tuple[VllmObject, object]]
) -> None:
    """Serve routes with these apps, and search the routes in this order."""
    for route, route_app in apps:
        replace_attributes(route, app=route_app)
    app.router.routes[:] = routes


def replace_chunk_classes(make_fast_class: Callable[[type], type], fast_base: type) -> None:
    """Have handlers make chunks of fast classes."""
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.completion import serving as completions
    from vllm.entrypoints.serve.utils import tool_calls_utils

    for module, names in (
        (completions, ("CompletionStreamResponse", "CompletionResponseStreamChoice")),
        (chat, ("ChatCompletionStreamResponse", "ChatCompletionResponseStreamChoice")),
    ):
        for name in names:
            vllm_class = getattr(module, name)
            if not issubclass(vllm_class, fast_base):
                replace_attributes(module, **{name: make_fast_class(vllm_class)})
    # It checks for this class, and then reads the choice's delta.
    vllm_choice = tool_calls_utils.ChatCompletionResponseStreamChoice
    if not isinstance(vllm_choice, tuple):
        choices = (vllm_choice, chat.ChatCompletionResponseStreamChoice)
        replace_attributes(tool_calls_utils, ChatCompletionResponseStreamChoice=choices)


def wrap_route_names(wrap: Wrap) -> None:
    """Wrap the function that names the route of a request in vLLM's metrics."""
    from prometheus_fastapi_instrumentator import routing

    wrap_attribute(routing, "get_route_name", wrap)


def mark_engine_dead(resources: VllmObject) -> None:
    """Mark a client's engine as dead."""
    replace_attributes(resources, engine_dead=True)


def restore_attribute(owner: VllmObject, name: str) -> None:
    """Remove a replacement from an object, whose class has the original."""
    delattr(owner, name)
