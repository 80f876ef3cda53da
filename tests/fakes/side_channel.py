"""A side channel that answers what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import zmq
import zmq.asyncio

HOST = "127.0.0.1"
Reply = Callable[[bytes], Sequence[bytes] | None]


def reply_metadata(compatibility: str = "a1", metadata: bytes = b"agent") -> Reply:
    payload = {"compatibility_hash": compatibility, "agent_metadata_bytes": metadata}
    return lambda _: (msgspec.msgpack.encode(payload), msgspec.msgpack.encode(1.5))


def reply_with(*parts: bytes) -> Reply:
    return lambda _: parts


class Listener:
    """A side channel that answers with what a test wants."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests: list[bytes] = []
        self.address = ""

    async def serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            identity, _, request = await router.recv_multipart()
            self.requests.append(request)
            parts = self.reply(request)
            if parts is not None:
                await router.send_multipart((identity, b"", *parts))


@asynccontextmanager
async def running_listener(reply: Reply, host: str = HOST) -> AsyncIterator[Listener]:
    listener = Listener(reply)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPV6, 1)
        name = f"[{host}]" if ":" in host else host
        listener.address = f"{name}:{router.bind_to_random_port(f'tcp://{name}')}"
        serving = asyncio.create_task(listener.serve(router))
        try:
            yield listener
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
