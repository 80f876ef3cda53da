from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.domain.fleet import Role
from baton.domain.handoff import KvHandle, Leg, LegKind
from baton.engine.sim import SimEngine, SimSettings
from baton.runtime.ports import Engine
from tests.contracts.engine_contract import EngineContract, RunningPair, running_pair
from tests.contracts.lease_contract import LeaseContract

INVALID = 2
"""In no prompt but those that the engine is to find wrong."""
SETTINGS = SimSettings(
    max_len_tokens=1024,
    kv_blocks=512,
    max_running_requests=32,
    max_batched_tokens=128,
    speed=4.0,
    invalid_token_id=INVALID,
)


FEW_BLOCKS = replace(SETTINGS, kv_blocks=96, lease_s=1.0, speed=1.0)


def new_engine(replica_id: str, role: Role, settings: SimSettings = SETTINGS) -> SimEngine:
    return SimEngine(settings, replica_id=replica_id, pool="test", role=role, model="tiny")


class TestSimEngine(EngineContract):
    @pytest.fixture
    async def engine_pair(self) -> AsyncIterator[RunningPair]:
        prefill, decode = new_engine("p0", Role.PREFILL), new_engine("d0", Role.DECODE)
        async with running_pair(prefill, decode) as pair:
            yield pair

    def make_invalid_leg(
        self, kind: LegKind, prompt: tuple[int, ...], ticket: KvHandle | None
    ) -> Leg:
        return self.make_leg(kind, (*prompt, INVALID), max_tokens=3, ticket=ticket)

    def new_engine(self) -> Engine:
        return new_engine("spare", Role.MIXED)


class TestSimLeases(LeaseContract):
    @pytest.fixture
    async def lease_pair(self) -> AsyncIterator[RunningPair]:
        prefill = new_engine("p0", Role.PREFILL, FEW_BLOCKS)
        one = replace(FEW_BLOCKS, max_running_requests=1, max_pulls=1)
        async with running_pair(prefill, new_engine("d0", Role.DECODE, one)) as pair:
            yield pair
