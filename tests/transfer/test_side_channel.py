"""The check of an engine's side channel, against listeners that are well, ill and wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest

from baton.domain.errors import TransferFailed
from baton.transfer.side_channel import (
    SideChannelChecker,
    SideChannelFacts,
    check_side_channel,
)
from tests.fakes.side_channel import HOST, Reply, reply_metadata, reply_with, running_listener

SOON_S = 5.0
BRIEF_S = 0.3
"""The deadline of a check that is meant to run into it."""


@asynccontextmanager
async def mute() -> AsyncIterator[str]:
    """A process that is stopped: the kernel still takes connections for it, and nobody reads."""
    with socket.create_server((HOST, 0)) as server:
        yield f"{HOST}:{server.getsockname()[1]}"


async def check(
    address: str, wanted: str | None = None, deadline_s: float = SOON_S
) -> SideChannelFacts:
    return await check_side_channel(
        "p-1", address, expected_compatibility=wanted, deadline_s=deadline_s
    )


async def why(address: str, wanted: str | None = None, deadline_s: float = SOON_S) -> str:
    with pytest.raises(TransferFailed) as caught:
        await check(address, wanted, deadline_s)
    assert caught.value.replica_id == "p-1"
    return caught.value.why


def descriptors() -> int:
    return psutil.Process().num_fds()


@pytest.mark.parametrize("host", [HOST, "::1"])
async def test_a_listener_that_is_well_says_what_it_is(host: str) -> None:
    async with running_listener(reply_metadata("a1", b"x" * 700), host) as listener:
        facts = await check(listener.address, "a1")
    assert (facts.compatibility, facts.metadata_bytes) == ("a1", 700)
    assert 0 < facts.elapsed_s < SOON_S


async def test_the_question_names_the_first_rank_which_every_engine_has() -> None:
    async with running_listener(reply_metadata()) as listener:
        await check(listener.address)
    assert [msgspec.msgpack.decode(request) for request in listener.requests] == [
        [b"get_meta_msg", 0, 0]
    ]


async def test_a_port_where_nobody_listens_is_named() -> None:
    async with running_listener(reply_metadata()) as listener:
        address = listener.address
    assert "no process listens" in await why(address)


async def test_a_listener_that_takes_connections_but_is_silent_is_given_up_at_the_deadline() -> (
    None
):
    async with mute() as address:
        text = await why(address, deadline_s=BRIEF_S)
    assert "no answer within 0.3 s" in text


async def test_a_listener_that_hangs_after_the_handshake_is_given_up_at_the_deadline() -> None:
    async with running_listener(lambda _: None) as listener:
        assert "no answer" in await why(listener.address, deadline_s=BRIEF_S)
    assert listener.requests


async def test_an_engine_that_is_not_compatible_is_refused_with_both_hashes() -> None:
    async with running_listener(reply_metadata("b2")) as listener:
        text = await why(listener.address, "a1")
    assert "got hash b2, expected a1" in text


async def test_any_hash_will_do_where_none_is_wanted() -> None:
    async with running_listener(reply_metadata("b2")) as listener:
        assert (await check(listener.address)).compatibility == "b2"


@pytest.mark.parametrize(
    "reply",
    [
        reply_with(b"hello"),
        reply_with(b"\x93", b"\x00"),
        reply_with(b"\xff" * 200, b"\x00"),
        reply_with(msgspec.msgpack.encode([1, 2]), b"\x00"),
        reply_with(msgspec.msgpack.encode({"compatibility_hash": "a1"}), b"\x00"),
        reply_with(*reply_metadata()(b""), b"more"),  # type: ignore[misc]  # this one does answer
        reply_metadata(""),
        reply_metadata(metadata=b""),
    ],
)
async def test_an_answer_that_no_engine_can_read_is_refused(reply: Reply) -> None:
    async with running_listener(reply) as listener:
        assert "no engine can read" in await why(listener.address)


async def test_an_endless_answer_is_not_taken_in() -> None:
    async with running_listener(reply_metadata(metadata=bytes(9 << 20))) as listener:
        assert "no answer" in await why(listener.address, deadline_s=BRIEF_S)


@pytest.mark.parametrize(
    "address", ["", "host", ":5600", "host:", "host:port", "host:-1", "::1:5600"]
)
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    assert "expected HOST:PORT" in await why(address)


async def test_no_outcome_leaves_a_socket_behind() -> None:
    async with running_listener(reply_metadata()) as listener, mute() as silent:
        await check(listener.address)
        before = descriptors()
        for _ in range(5):
            await check(listener.address)
            await why(listener.address, "other")
            await why(silent, deadline_s=0.02)
            await why(f"{HOST}:1")
        await asyncio.sleep(0)
        assert descriptors() <= before + 2


async def test_a_check_that_is_cancelled_leaves_no_socket_behind() -> None:
    asked = asyncio.Event()

    def note(_: bytes) -> None:
        asked.set()

    async with running_listener(note) as listener:
        await why(listener.address, deadline_s=BRIEF_S)
        before = descriptors()
        for _ in range(3):
            asked.clear()
            running = asyncio.create_task(check(listener.address))
            await asked.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert descriptors() <= before + 2


async def test_an_engine_compares_others_with_itself() -> None:
    async with (
        running_listener(reply_metadata("a1")) as own,
        running_listener(reply_metadata("b2")) as other,
    ):
        checks = SideChannelChecker("d-1", own.address)
        await checks.check("p-1", own.address, SOON_S)
        with pytest.raises(TransferFailed, match="got hash b2, expected a1"):
            await checks.check("p-1", other.address, SOON_S)
        assert len(own.requests) == 2, "its own hash is asked for once"


async def test_an_engine_whose_own_listener_is_dead_still_checks_others() -> None:
    async with running_listener(reply_metadata("b2")) as other, mute() as own:
        checks = SideChannelChecker("d-1", own)
        await checks.check("p-1", other.address, BRIEF_S)
        assert len(other.requests) == 1


async def test_asking_oneself_does_not_stretch_the_deadline() -> None:
    async with mute() as own, mute() as other:
        with pytest.raises(TransferFailed, match=r"p-1: .* within 0\.[0-2] s"):
            await SideChannelChecker("d-1", own).check("p-1", other, 0.5)
