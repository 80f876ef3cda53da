"""A queue of prompts is as long as what of them must be computed, not as long as they are."""

from __future__ import annotations

import pytest

from baton.domain.handoff import KvHandle, Leg, LegKind
from baton.domain.value import evolve
from baton.engine.sim import SimSettings
from baton.simulator.fleet.engines import EngineSettings, create_engine
from tests.simulator.scenes import ENGINE as COUNTED

EXACT = SimSettings(max_len_tokens=2048, kv_blocks=512)


def leg(number: int, uncached_tokens: int | None) -> Leg:
    return Leg(
        leg_id=f"l{number}",
        request_id=f"r{number}",
        kind=LegKind.PREFILL,
        prompt_token_ids=tuple(range(100, 1100)),
        max_tokens=8,
        uncached_tokens=uncached_tokens,
    )


@pytest.mark.parametrize("settings", [EXACT, COUNTED], ids=["exact", "counted"])
@pytest.mark.parametrize(("uncached", "queued"), [(64, 192), (None, 3000), (5000, 3000)])
def test_prompts_queue_with_their_expected_computation(
    settings: EngineSettings, uncached: int | None, queued: int
) -> None:
    engine = create_engine(settings, engine_id="e", model="sim", address="e:0")
    for number in range(3):
        assert engine.add(leg(number, uncached), now_s=0.0) is None
    assert engine.load(0.0).queued_tokens == queued


@pytest.mark.parametrize("settings", [EXACT, COUNTED], ids=["exact", "counted"])
def test_after_the_begin_uncached_tokens_count_for_every_expectation(
    settings: EngineSettings,
) -> None:
    engine = create_engine(settings, engine_id="e", model="sim", address="e:0")
    engine.add(leg(0, 64), now_s=0.0)
    engine.begin(0.0, horizon_s=0.0)
    assert engine.load(0.0).queued_tokens in {0, 1000}  # before, or with, the step under way


def test_a_leg_computes_what_it_neither_pulls_nor_finds_cached() -> None:
    expected = {None: 1000, 0: 0, 64: 64, 9999: 1000}
    assert {value: leg(0, value).uncached_prompt_tokens for value in expected} == expected
    ticket = KvHandle(tokens=960, blocks=60, params=b"")
    pulling = evolve(leg(0, None), kind=LegKind.DECODE, kv_handle=ticket, source_id="p")
    assert pulling.uncached_prompt_tokens == 40
