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

from baton.engine.vllm.fast_path.stream_bypass import StreamBypass
from baton.engine.vllm.gate.gate import CURRENT_EXCHANGE
from baton.engine.vllm.patches import table


def install_response_bypass(app: Any, *, middleware: bool) -> None:  # noqa: ANN401 - vllm is not followed
    """Have vLLM's app send chunks straight to the gate, unless it has `middleware` of others."""
    is_direct = not middleware and not envs.VLLM_DEBUG_LOG_API_SERVER_RESPONSE
    table.RESPONSE_BYPASS.install(app, BypassStreamingResponse, is_direct=is_direct)


class BypassStreamingResponse(StreamingResponse):
    """A stream of which only start and end pass through every layer."""

    _direct_send: Send | None = None
    _bypass: StreamBypass | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
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
            # What is cut off while it sends would go on until its generators are garbage.
            if (close := getattr(self.body_iterator, "aclose", None)) is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
