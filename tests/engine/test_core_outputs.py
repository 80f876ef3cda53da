"""What EngineCore says is read in order, as vLLM's own task would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, UtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from baton.engine.vllm.core.engine import CoreOutputs

PATIENCE_S = 10.0


@dataclass
class Ends:
    """An engine's end of the socket, and what reads at the other."""

    engine: zmq.Socket[bytes]
    resources: BackgroundResources
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        client = SimpleNamespace(
            resources=self.resources,
            decoder=MsgpackDecoder(EngineCoreOutputs),
            utility_results=self.calls,
        )
        self.outputs = CoreOutputs(cast("AsyncMPClient", client))

    def says(self, outputs: EngineCoreOutputs) -> None:
        self.engine.send_multipart(MsgpackEncoder().encode(outputs))

    def steps(self, *numbers: int) -> None:
        """Say one token for each number, each in a step of its own."""
        for number in numbers:
            one = EngineCoreOutput(request_id=str(number), new_token_ids=[number])
            self.says(EngineCoreOutputs(outputs=[one]))

    async def take(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            step = await self.outputs.get()
        return int(step.outputs[0].request_id)


@pytest_asyncio.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    context = zmq.asyncio.Context()
    inbox, engine = context.socket(zmq.PULL), zmq.Context(context).socket(zmq.PUSH)
    inbox.bind(f"ipc://{tmp_path}/s")
    engine.connect(f"ipc://{tmp_path}/s")
    made = Ends(engine, BackgroundResources(ctx=context, output_socket=inbox))
    yield made
    made.outputs.cancel()
    engine.close(linger=0)
    inbox.close(linger=0)
    context.term()


async def test_steps_are_taken_in_the_order_in_which_they_were_said(ends: Ends) -> None:
    ends.steps(*range(50))  # more than one turn of the loop reads
    assert [await ends.take() for _ in range(50)] == list(range(50))
    waiting = asyncio.create_task(ends.take())
    ends.steps(50)
    assert await waiting == 50


async def test_a_fence_is_passed_when_all_that_was_read_before_has_been_taken(ends: Ends) -> None:
    ends.steps(1, 2)
    assert await ends.take() == 1
    ends.calls[7] = answered = asyncio.get_running_loop().create_future()
    ends.says(EngineCoreOutputs(utility_output=UtilityOutput(7, result=UtilityResult("yes"))))
    async with asyncio.timeout(PATIENCE_S):
        assert await answered == "yes"  # so that the second step was read before it
    fence = ends.outputs.fence()
    assert await ends.take() == 2
    assert not fence.is_set(), "who took the last step may not have dealt with it yet"
    more = asyncio.create_task(ends.take())
    async with asyncio.timeout(PATIENCE_S):
        await fence.wait()
    ends.steps(3)
    assert await more == 3


async def test_a_call_that_failed_says_so_to_its_caller_alone(ends: Ends) -> None:
    ends.calls[7] = answered = asyncio.get_running_loop().create_future()
    ends.says(EngineCoreOutputs(utility_output=UtilityOutput(7, failure_message="no such thing")))
    ends.steps(1)
    assert await ends.take() == 1
    with pytest.raises(Exception, match="no such thing"):
        answered.result()


async def test_an_engine_that_says_that_it_is_dead_is_after_its_last_step(ends: Ends) -> None:
    ends.steps(1)
    ends.engine.send(EngineCoreProc.ENGINE_CORE_DEAD)
    assert await ends.take() == 1
    with pytest.raises(EngineDeadError):
        await ends.take()
    assert ends.resources.engine_dead
    assert ends.outputs.done()


async def test_an_unreadable_message_ends_it(ends: Ends) -> None:
    ends.engine.send(b"\xc1 nonsense")
    with pytest.raises(Exception, match=r"(?i)msgpack|decode|malformed|invalid"):
        await ends.take()
    assert ends.outputs.done()


async def test_vllms_client_ends_it_with_its_sockets(ends: Ends) -> None:
    waiting = asyncio.create_task(ends.take())
    await asyncio.sleep(0)
    await asyncio.to_thread(ends.resources)  # as its monitor of processes does
    with pytest.raises(EngineDeadError):
        await waiting
    assert ends.outputs.done()
