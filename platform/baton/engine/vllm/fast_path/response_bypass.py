"""Chunks of a stream go past the layers of vLLM's app, which care for its start and its end.

A response passes five of them: three that see to errors, one that counts responses, and one that
adds headers for browsers. Each is a coroutine that does nothing with a chunk, and there is a chunk
for each token. What operators put there besides (`middleware` among vLLM's arguments) may want to
see chunks: then all pass through every layer.
"""

from __future__ import annotations

from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.anthropic import api_router as messages
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as completions
from vllm.entrypoints.openai.responses import api_router as responses

from baton.engine.vllm.fast_path.stream_bypass import ShortCut
from baton.engine.vllm.gate.gate import CURRENT_EXCHANGE

_ROUTERS = (chat, completions, messages, responses)


def stream_straight(app: Any, *, middleware: bool) -> None:  # noqa: ANN401 - vllm is not followed
    """Have vLLM's app send chunks straight to the gate, unless it has `middleware` of others."""
    app.state.streams_straight = not middleware and not envs.VLLM_DEBUG_LOG_API_SERVER_RESPONSE
    for router in _ROUTERS:
        router.StreamingResponse = StraightStream


class StraightStream(StreamingResponse):
    """A stream of which only start and end pass through every layer."""

    _straight: Send | None = None
    _short_cut: ShortCut | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        exchange = CURRENT_EXCHANGE.get()
        if exchange is not None and getattr(scope["app"].state, "streams_straight", False):
            self._straight = exchange.send
            self._short_cut = exchange.short_cut
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send start, chunks and end."""
        straight, short_cut = self._straight or send, self._short_cut
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
                if short_cut is not None:
                    if short_cut.unsent is not None:
                        await short_cut.unsent
                    short_cut.saw(bytes(body))
                await straight({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            # What is cut off while it sends would go on until its generators are garbage.
            if (close := getattr(self.body_iterator, "aclose", None)) is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
