"""The check against vLLM's own handshake listener, and how a single packet ends that for good."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from baton.domain.errors import TransferFailed
from baton.transfer import side_channel
from baton.transfer.side_channel import check_side_channel

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import (
        NixlBaseConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        GET_META_MSG,
        NixlHandshakePayload,
    )

HOST = "127.0.0.1"
DEADLINE_S = 5.0
PAYLOAD = NixlHandshakePayload(compatibility_hash="a1", agent_metadata_bytes=b"agent" * 100)


class VllmListener:
    """vLLM's listener thread, with the metadata of an engine that does not exist."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        self.error: BaseException | None = None
        self.stop = threading.Event()
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._ready.wait(DEADLINE_S)

    def _run(self) -> None:
        data = {(0, 0): msgspec.msgpack.encode(PAYLOAD)}
        try:
            NixlBaseConnectorScheduler._nixl_handshake_listener(
                data, self._ready, self.stop, HOST, self.port
            )
        except Exception as error:  # noqa: BLE001 - whatever ends the thread is what we look for
            self.error = error

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def send(self, *frames: bytes) -> None:
        """Send a packet as it is, without the envelope of a request."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, int(DEADLINE_S * 1000))
            dealer.connect(f"tcp://{self.address}")
            dealer.send_multipart(frames)


@contextmanager
def vllm_listener() -> Iterator[VllmListener]:
    listener = VllmListener()
    try:
        yield listener
    finally:
        listener.stop.set()
        listener.thread.join(DEADLINE_S)


async def check(listener: VllmListener) -> side_channel.SideChannelFacts:
    return await check_side_channel(
        "p-1", listener.address, expected_compatibility="a1", deadline_s=DEADLINE_S
    )


def test_our_request_is_vllms_to_the_byte() -> None:
    assert msgspec.msgpack.encode((GET_META_MSG, 0, 0)) == side_channel._REQUEST


async def test_vllms_listener_answers_the_check_and_lives_on() -> None:
    with vllm_listener() as listener:
        for _ in range(3):
            facts = await check(listener)
            assert facts.compatibility == PAYLOAD.compatibility_hash
            assert facts.metadata_bytes == len(PAYLOAD.agent_metadata_bytes)
        assert listener.thread.is_alive()


@pytest.mark.parametrize(
    "packet",
    [
        (b"", b"no message pack"),
        (b"", msgspec.msgpack.encode((GET_META_MSG, 0))),
        (b"", msgspec.msgpack.encode((GET_META_MSG, 0, 7))),
        (b"a single frame",),
    ],
    ids=["garbage", "too short", "a rank it does not have", "no envelope"],
)
async def test_one_malformed_packet_ends_vllms_listener_and_the_check_says_so(
    packet: tuple[bytes, ...],
) -> None:
    # The day this fails, vLLM's listener survives bad packets, and its replicas need no restart.
    with vllm_listener() as listener:
        await check(listener)
        listener.send(*packet)
        listener.thread.join(DEADLINE_S)
        assert not listener.thread.is_alive()
        assert listener.error is not None
        with pytest.raises(TransferFailed, match="no process listens"):
            await check(listener)
