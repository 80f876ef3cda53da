"""What an engine says of its KV cache, and what becomes of an answer that is none."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.domain.cache import CacheGroup, CacheShape, PrefixRequirement

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    from baton.engine.vllm.patches import engine_reports
    from baton.engine.vllm.patches.engine_reports import (
        CACHE_CALL,
        CacheReport,
        request_cache_report,
    )

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **HEADS)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=40, **HEADS)
STATE = MambaSpec(
    block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
PAGE = 16 * 2 * 2 * 8 * 2
"""Tokens, keys and values, heads, head size, bytes."""


def core_with(*specs: KVCacheSpec, ranks: int = 1) -> SimpleNamespace:
    """As much of vLLM's EngineCore as is asked, with two layers in each group."""
    register_all_kvcache_specs(None)
    groups = [
        KVCacheGroupSpec([f"layer.{place}", f"layer.{place}b"], spec)
        for place, spec in enumerate(specs)
    ]
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=128,
        scheduler_block_size=16,
        hash_block_size=16,
    )
    layers = {name: group.kv_cache_spec for group in groups for name in group.layer_names}
    return SimpleNamespace(
        scheduler=SimpleNamespace(kv_cache_manager=manager),
        model_executor=SimpleNamespace(get_kv_cache_specs=lambda: [layers] * ranks),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=16)),
    )


class Core:
    """vLLM's client of an engine."""

    def __init__(self, core: object = None, failure: Exception | None = None) -> None:
        self.core = core
        self.failure = failure

    async def call_utility_async(self, method: str, *args: object) -> object:
        if self.failure is not None:
            raise self.failure
        answer = getattr(EngineCore, method)(self.core)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer))


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, CACHE_CALL, None, raising=False)  # so that it is taken back
    engine_reports.apply_cache_report()


async def test_plain_attention_has_no_shape() -> None:
    assert await request_cache_report(Core(core_with(FULL))) == CacheReport(
        events_understood=True, block_bytes=2 * PAGE
    )


async def test_a_block_has_the_bytes_of_all_layers_and_ranks_but_no_states() -> None:
    report = await request_cache_report(Core(core_with(FULL, WINDOW, STATE, ranks=4)))
    assert report.block_bytes == 4 * 4 * PAGE


async def test_a_hybrid_cache_says_what_each_group_needs() -> None:
    report = await request_cache_report(Core(core_with(FULL, WINDOW, STATE)))
    assert report.events_understood
    assert report.shape == CacheShape(
        (
            CacheGroup(PrefixRequirement.ALL, 16),
            CacheGroup(PrefixRequirement.TRAILING_BLOCKS, 16, span=3),
            CacheGroup(PrefixRequirement.TRAILING_BLOCKS, 16, span=1),
        ),
        alignment_tokens=16,
    )


async def test_a_group_of_layers_that_is_not_known_has_the_engine_not_be_listened_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = core_with(FULL)
    coordinator = core.scheduler.kv_cache_manager.coordinator
    coordinator.single_type_managers = (SimpleNamespace(kv_cache_spec=FULL, block_size=16),)
    with caplog.at_level(logging.WARNING):
        report = await request_cache_report(Core(core))
    assert report == CacheReport(events_understood=False, block_bytes=2 * PAGE)
    (record,) = caplog.records
    assert "SimpleNamespace" in str(record.__dict__)


@pytest.mark.parametrize("failure", [Exception("no such call"), TypeError("x")])
async def test_an_engine_that_does_not_answer_is_not_listened_to(failure: Exception) -> None:
    assert await request_cache_report(Core(failure=failure)) == CacheReport(events_understood=False)


async def test_an_answer_of_another_shape_is_none() -> None:
    class Strange(Core):
        async def call_utility_async(self, method: str, *args: object) -> object:
            return {"shape": {"groups": [["some", 1]]}}

    assert await request_cache_report(Strange()) == CacheReport(events_understood=False)


async def test_an_engine_that_is_dead_is_said_to_be() -> None:
    with pytest.raises(EngineDeadError):
        await request_cache_report(Core(failure=EngineDeadError()))
