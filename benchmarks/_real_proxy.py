"""A proxy before two of vLLM's servers, one that prefills and one that decodes.

    python -m benchmarks._real_proxy PORT PREFILL_URL DECODE_URL

A request first goes to the prefill server for a single token, which keeps the prompt's
blocks for another. What it answers about them goes along when the request then goes to the decode
server, whose stream is passed on as it comes.

Source: the `kv_transfer_params` of vLLM's documents on disaggregated prefill with NixlConnector.
"""

from __future__ import annotations

import sys
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

PARAMS = "kv_transfer_params"
_TIMEOUT_S = 120.0
_KEEP_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """What the prefill server is asked: the same for one token, at once, and to keep the blocks."""
    request_body = {name: value for name, value in body.items() if name != "stream_options"}
    if "max_completion_tokens" in body:
        request_body["max_completion_tokens"] = 1
    return request_body | {"max_tokens": 1, "stream": False, PARAMS: _KEEP_BLOCKS}


def decode_body(body: dict[str, Any], prefilled: dict[str, Any]) -> dict[str, Any]:
    """What the decode server is asked: the same, and where its prompt's blocks are."""
    params = prefilled.get(PARAMS)
    return {**body, PARAMS: params} if params else body


def build_app(prefill_url: str, decode_url: str) -> Starlette:
    """The proxy."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits)

    async def complete(request: Request) -> Response:
        body, route = await request.json(), request.url.path
        first = await client.post(f"{prefill_url}{route}", json=prefill_body(body))
        if first.is_error:
            return Response(first.content, first.status_code, media_type="application/json")
        asked = decode_body(body, first.json())
        second = client.build_request("POST", f"{decode_url}{route}", json=asked)
        answer = await client.send(second, stream=True)
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            media_type=answer.headers.get("content-type"),
            background=BackgroundTask(answer.aclose),
        )

    async def health(_request: Request) -> Response:
        try:
            answers = [await client.get(f"{url}/health") for url in (prefill_url, decode_url)]
        except httpx.TransportError as error:
            return PlainTextResponse(repr(error), 503)
        return Response(status_code=max(answer.status_code for answer in answers))

    posts = ("/v1/completions", "/v1/chat/completions")
    return Starlette(
        routes=[
            Route("/health", health),
            *(Route(route, complete, methods=["POST"]) for route in posts),
        ]
    )


def main(port: str, prefill_url: str, decode_url: str) -> None:
    """Be the proxy's process; ends on SIGTERM."""
    app = build_app(prefill_url, decode_url)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
