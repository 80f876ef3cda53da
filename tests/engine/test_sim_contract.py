from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.domain.fleet import Role
from baton.engine.sim import SimEngine, SimSettings
from baton.runtime.ports import Engine
from tests.contracts.engine_contract import EngineContract, RunningPair, running_pair

SETTINGS = SimSettings(
    max_len_tokens=1024, kv_blocks=512, max_running_requests=32, max_batched_tokens=128, speed=4.0
)


def new_engine(replica_id: str, role: Role) -> SimEngine:
    return SimEngine(SETTINGS, replica_id=replica_id, pool="test", role=role, model="tiny")


class TestSimEngine(EngineContract):
    @pytest.fixture
    async def engine_pair(self) -> AsyncIterator[RunningPair]:
        prefill, decode = new_engine("p0", Role.PREFILL), new_engine("d0", Role.DECODE)
        async with running_pair(prefill, decode) as pair:
            yield pair

    def new_engine(self) -> Engine:
        return new_engine("spare", Role.MIXED)
