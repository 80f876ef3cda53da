"""The simulated engine, headless: it dials the HTTP server, as `vllm serve --headless` does.

    python -m benchmarks.rivals.engine SETTINGS_JSON HANDSHAKE_ADDRESS

HELLO, the addresses to connect to, READY; then EngineCore's wire, as in `benchmarks/_bare.py`.
"""

from __future__ import annotations

import sys

import msgspec
import uvloop
import zmq

from benchmarks._bare import engine_main, read_settings

# vLLM's client names the engine of data-parallel rank 0 so.
_IDENTITY = (0).to_bytes(2, "little")
_HANDSHAKE_TIMEOUT_MS = 120_000


class SocketAddresses(msgspec.Struct):
    """Where the other side listens, one for each of its processes."""

    inputs: list[str]
    outputs: list[str]


class HandshakeReply(msgspec.Struct):
    """What the other side answers to HELLO."""

    addresses: SocketAddresses


def handshake(address: str) -> SocketAddresses:
    """Register; returns where to connect.

    Raises:
        SystemExit: no answer.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, _IDENTITY)
        socket.connect(address)
        state = {"local": False, "headless": True}
        socket.send(msgspec.msgpack.encode({"status": "HELLO", **state}))
        if not socket.poll(_HANDSHAKE_TIMEOUT_MS):
            raise SystemExit(f"no answer at {address}")
        reply = msgspec.msgpack.decode(socket.recv(), type=HandshakeReply)
        socket.send(msgspec.msgpack.encode({"status": "READY", **state}))
    return reply.addresses


def main(settings: str, address: str) -> None:
    """Be the engine process."""
    addresses = handshake(address)
    uvloop.run(engine_main(read_settings(settings), addresses.inputs[0], addresses.outputs[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
