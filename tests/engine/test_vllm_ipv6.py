"""Real engines whose side channels are at an address of IPv6."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegKind
from baton.domain.names.addresses import parse_address
from tests.contracts.engine_contract import RunningPair, running_pair
from tests.engine.vllm_engines import VllmEngine, engine_settings, engine_with_checks, with_payload
from tests.fakes.machine import require_ipv6
from tests.fakes.scripted_engine import make_leg
from tests.fakes.tiny_model import tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
HOST = "::1"


def engine(model: Path, role: Role) -> VllmEngine:
    settings = engine_settings(model, role)
    assert settings.nixl is not None
    return engine_with_checks(replace(settings, nixl=replace(settings.nixl, host=HOST)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningPair]:
    require_ipv6()
    model = tiny_model(tmp_path_factory.mktemp("models"))
    async with running_pair(engine(model, Role.PREFILL), engine(model, Role.DECODE)) as made:
        yield made


async def test_blocks_are_pulled_over_a_side_channel_at_an_address_of_ipv6(
    pair: RunningPair,
) -> None:
    source = pair.prefill.facts
    assert parse_address(source.side_channel).host == HOST
    await pair.decode.engine.check_side_channel(source.replica_id, source.side_channel, 20.0)
    prompt = tuple(3 + i % 90 for i in range(200))

    def leg(leg_id: str, kind: LegKind, **more: object) -> Leg:
        tokens = 1 if kind is LegKind.PREFILL else 12
        return with_payload(make_leg(leg_id, kind, prompt=prompt, max_tokens=tokens, **more))

    await pair.prefill.run(leg("p", LegKind.PREFILL))
    ticket = pair.prefill.outputs("p")[-1].kv_handle
    assert ticket is not None
    handed_off = await pair.decode.run(leg("d", LegKind.DECODE, kv_handle=ticket))
    assert handed_off == await pair.prefill.run(leg("l", LegKind.LOCAL))
    await pair.decode.run(leg("n", LegKind.LOCAL))  # after a step it says what it has pulled
    assert pair.decode.engine.load().transfers.pulls == 1
