"""`baton up` in small: a local cluster with one ingress replica that streams until told to end.

Arguments: port, data path or "auto". Prints `READY <run dir>`, then waits; on Ctrl-C or SIGTERM it
stops the cluster and prints `STOPPED <ids left>`.
"""

# ruff: noqa: T201 - whoever started this reads what it prints

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

from baton.serving.cluster.local_cluster import ClusterSettings, LocalCluster
from baton.serving.front.data_path import DataPath

# A shell has a job in the background ignore Ctrl-C, and so what the job starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
Message = MutableMapping[str, Any]
port = int(sys.argv[1])
data_path = None if sys.argv[2] == "auto" else DataPath(sys.argv[2])
cluster = LocalCluster(
    ClusterSettings(http_host="127.0.0.1", http_port=port, cpus=4, data_path=data_path),
    progress=print,
)
state = cluster.start()

from ray import serve  # noqa: E402 - its environment must be set before


@serve.deployment(
    max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.1}, graceful_shutdown_timeout_s=10
)
@serve.ingress()
class Stream:
    """GET / streams 64 chunks, 5 ms apart; /endless goes on; /cancelled tells when it was cut."""

    def __init__(self) -> None:
        self.cancelled_at_s: list[float] = []

    async def __serve_build_asgi_app__(self) -> Callable[..., Awaitable[None]]:
        # Not a bound method: uvicorn would take it for an application of the old two-step kind.
        async def application(
            scope: Message,
            receive: Callable[[], Awaitable[Message]],
            send: Callable[[Message], Awaitable[None]],
        ) -> None:
            await self.answer(scope, receive, send)

        return application

    async def answer(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/cancelled":
            body = json.dumps(self.cancelled_at_s).encode()
            await send({"type": "http.response.body", "body": body})
            return
        try:
            for number in range(64 if scope["path"] == "/" else 1_000_000):
                chunk = b"data: %d\n\n" % number
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await asyncio.sleep(0.005)
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            self.cancelled_at_s.append(time.monotonic())
            raise


def bind(deployment: Any) -> serve.Application:  # noqa: ANN401
    """Ray's decorators hide from the type checker what they return."""
    return cast("serve.Application", deployment.bind())


async def lifespan(
    receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Serve refuses an application that does not take part in this."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


try:
    serve.run(bind(Stream), name="app", route_prefix="/")
    print("READY", state.run_dir, flush=True)
    signal.pause()
except (KeyboardInterrupt, SystemExit):
    print("STOPPED", sorted(cluster.stop()), flush=True)
