"""Real vLLM engines: blocks that were lost are never decoded from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from baton.domain.fleet import Role
from baton.domain.handoff import LegKind
from baton.engine.vllm.core.settings import VllmEngineSettings
from baton.transfer.side_channel import check_side_channel
from tests.contracts.engine_contract import DEADLINE_S, RunningPair, running_pair
from tests.contracts.lease_contract import LeaseContract
from tests.engine.vllm_engines import VllmEngine, VllmLegs, engine_settings
from tests.fakes.tiny_model import tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

FEW_BLOCKS_BYTES = 12 << 20


def settings(model: Path, role: Role) -> VllmEngineSettings:
    found = engine_settings(model, role)
    assert found.nixl is not None
    nixl = replace(found.nixl, lease_s=1, max_pulls=1)
    return replace(found, nixl=nixl, kv_cache_bytes=FEW_BLOCKS_BYTES, dtype="float32")


@pytest.mark.asyncio(loop_scope="module")
class TestVllmLeases(VllmLegs, LeaseContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="module")
    async def lease_pair(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> AsyncIterator[RunningPair]:
        model = tiny_model(tmp_path_factory.mktemp("models"))
        prefill = VllmEngine(settings(model, Role.PREFILL))
        decode = VllmEngine(replace(settings(model, Role.DECODE), max_running_requests=1))
        async with running_pair(prefill, decode) as pair:
            yield pair

    async def test_a_side_channel_survives_what_it_cannot_read(
        self, lease_pair: RunningPair
    ) -> None:
        prefill, decode = lease_pair.prefill, lease_pair.decode
        address = prefill.facts.side_channel
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(f"tcp://{address}")
            for parts in ([b"garbage"], [b"", b"garbage"], [b"", b""], [b"", b"\x93", b"more"]):
                await socket.send_multipart(parts)
        await check_side_channel("p", address, expected_compatibility=None, deadline_s=10.0)
        prompt = self.new_prompt(100)
        ticket = await self.run_prefill(lease_pair, prompt)
        leg = self.make_leg(LegKind.DECODE, prompt, max_tokens=4, ticket=ticket)
        async with asyncio.timeout(DEADLINE_S):
            assert await decode.run(leg) == await self.run_locally(prefill, prompt, max_tokens=4)
