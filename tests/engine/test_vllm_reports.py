"""What vLLM reports of itself, in our words: facts, load, and why it did not start."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.domain.cache import CacheGroup, CacheShape, PrefixRequirement
from baton.domain.errors import EngineStartFailed, TransferFailed
from baton.domain.fleet import Load, ReplicaFacts, Role, TransferTotals
from baton.domain.handoff import KvHandle, LegFailure, LegKind
from baton.domain.value import evolve
from baton.engine.vllm.core.settings import NixlSettings, VllmEngineSettings, engine_arguments
from tests.fakes.scripted_engine import make_leg

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    import torch
    from vllm.v1.metrics.stats import SchedulerIterationDetails, SchedulerStats

    from baton.engine.vllm.core.engine import VllmEngine
    from baton.engine.vllm.core.facts import replica_facts, start_failure, typed_arguments
    from baton.engine.vllm.core.legs import LoadMeter
    from baton.engine.vllm.patches.engine_reports import CacheReport

SETTINGS = VllmEngineSettings(
    replica_id="p0", pool="p", model_source="m", model_name="m", role=Role.PREFILL
)


NIXL = NixlSettings(host="10.0.0.1", port=5600)
EVENTS = "ipc:///tmp/e"


def facts(
    settings: VllmEngineSettings,
    *,
    endpoint: str | None = EVENTS,
    told: Mapping[str, object] | None = None,
    cache: CacheReport | None = None,
) -> ReplicaFacts:
    """The facts of an engine that was started with `settings`, or was `told` otherwise."""
    arguments = typed_arguments(engine_arguments(settings, endpoint) | dict(told or {}))
    model = SimpleNamespace(
        use_mla=False,
        dtype=torch.bfloat16,
        max_model_len=2048,
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 64,
        get_total_num_hidden_layers=lambda: 4,
    )
    options = SimpleNamespace(
        block_size=32,
        num_gpu_blocks=10,
        cache_dtype="auto",
        enable_prefix_caching=arguments["enable_prefix_caching"],
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=options,
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=2048),
        kv_events_config=arguments.get("kv_events_config"),
        kv_transfer_config=arguments.get("kv_transfer_config"),
        lora_config=None,
    )
    return replica_facts(
        settings, config, endpoint, cache_report=cache or CacheReport(events_understood=True)
    )


def stats(**changes: object) -> SchedulerStats:
    return SchedulerStats(**changes)


def step(elapsed_ms: float, *, is_dummy: bool = False, **changes: object) -> SchedulerStats:
    fields: dict[str, object] = {
        "iteration_index": 0,
        "num_ctx_requests": 0,
        "num_ctx_tokens": 0,
        "num_generation_requests": 1,
        "num_generation_tokens": 1,
    }
    details = SchedulerIterationDetails(
        **(fields | changes), elapsed_ms=elapsed_ms, is_dummy=is_dummy
    )
    return stats(iteration_details=details)


# ------------------------------------------------------------------ facts
def test_an_engine_says_where_others_find_it() -> None:
    assert facts(replace(SETTINGS, nixl=NIXL)).side_channel == "10.0.0.1:5600"
    assert facts(replace(SETTINGS, nixl=replace(NIXL, host="fd00::1"))).side_channel == (
        "[fd00::1]:5600"
    )
    assert facts(SETTINGS).side_channel == ""


def test_blocks_have_the_size_that_a_pull_of_one_moves() -> None:
    assert facts(SETTINGS).kv_block_bytes == 32 * 2 * 2 * 64 * 4 * 2


def test_the_hosts_memory_holds_as_many_blocks_as_fit_into_it() -> None:
    block_bytes = facts(SETTINGS).kv_block_bytes
    room = replace(SETTINGS, host_memory_bytes=7 * block_bytes + 1)
    assert facts(room).host_blocks == 7
    assert facts(SETTINGS).host_blocks == 0


def test_an_engine_tells_of_its_cache_unless_it_has_none_or_was_told_otherwise() -> None:
    assert facts(SETTINGS).cache_events
    assert not facts(SETTINGS, endpoint=None).cache_events
    assert not facts(SETTINGS, told={"enable_prefix_caching": False}).cache_events
    elsewhere = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}
    assert not facts(SETTINGS, told={"kv_events_config": elsewhere}).cache_events


def test_an_engines_report_of_its_cache_wins_over_the_models_shape() -> None:
    shape = CacheShape((CacheGroup(PrefixRequirement.TRAILING_BLOCKS, 32, 4),), alignment_tokens=32)
    room = replace(SETTINGS, host_memory_bytes=2500)
    found = facts(room, cache=CacheReport(events_understood=True, shape=shape, block_bytes=1000))
    assert (found.cache_shape, found.kv_block_bytes, found.host_blocks) == (shape, 1000, 2)
    assert found.cache_events


def test_events_of_which_it_is_not_known_what_they_mean_are_not_listened_to() -> None:
    assert not facts(SETTINGS, cache=CacheReport(events_understood=False)).cache_events


@pytest.mark.parametrize("host_memory_bytes", [None, 1 << 30])
def test_batons_connector_fetches_the_front_of_a_prompt_alone_or_beside_another(
    host_memory_bytes: int | None,
) -> None:
    settings = replace(SETTINGS, nixl=NIXL, host_memory_bytes=host_memory_bytes)
    assert facts(settings).supports_prefix_fetch
    theirs = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert not facts(settings, told={"kv_transfer_config": theirs}).supports_prefix_fetch


def test_engines_that_cannot_hand_off_share_a_layout_with_no_other() -> None:
    alone = facts(SETTINGS)
    offloading = facts(replace(SETTINGS, host_memory_bytes=1 << 30))
    assert alone.layout == offloading.layout == "unshared:p0"
    assert not alone.supports_prefix_fetch
    assert not offloading.supports_prefix_fetch


def test_a_tier_in_the_hosts_memory_does_not_change_what_engines_can_exchange() -> None:
    plain = facts(replace(SETTINGS, nixl=NIXL))
    offloading = facts(replace(SETTINGS, nixl=NIXL, host_memory_bytes=1 << 30))
    assert plain.layout == offloading.layout
    assert "NixlConnector" in plain.layout


async def test_a_side_channel_is_checked_in_its_own_protocol() -> None:
    asked: list[tuple[str, str, float]] = []

    async def check(source_id: str, address: str, deadline_s: float) -> None:
        asked.append((source_id, address, deadline_s))
        raise TransferFailed(source_id, "silent")

    engine = VllmEngine(replace(SETTINGS, nixl=NIXL), side_channel_check=check)
    with pytest.raises(TransferFailed, match="p1: silent"):
        await engine.check_side_channel("p1", "10.0.0.2:5600", 1.5)
    assert asked == [("p1", "10.0.0.2:5600", 1.5)]
    unable = VllmEngine(SETTINGS, side_channel_check=check)
    with pytest.raises(TransferFailed, match="p1: this engine has no NIXL"):
        await unable.check_side_channel("p1", "10.0.0.2:5600", 1.5)
    assert len(asked) == 1
    await engine.close()
    await unable.close()


async def test_a_kv_handle_that_fetches_nothing_costs_a_computation_not_the_request() -> None:
    engine = VllmEngine(replace(SETTINGS, nixl=NIXL))
    engine._facts = facts(replace(SETTINGS, nixl=NIXL))
    handle = KvHandle(tokens=3, blocks=1, params=b"garbage")
    leg = make_leg("leg-1", LegKind.DECODE, max_tokens=1, kv_handle=handle)
    assert await engine.submit(leg) is LegFailure.KV_LOAD_FAILED
    too_long = evolve(leg, kv_handle=KvHandle(tokens=4, blocks=1, params=b""))
    assert await engine.submit(too_long) is LegFailure.KV_LOAD_FAILED
    await engine.close()


async def test_a_kv_handle_for_the_front_of_a_prompt_is_refused_where_it_would_be_misread() -> None:
    engine = VllmEngine(replace(SETTINGS, nixl=NIXL))
    engine._facts = replace(facts(replace(SETTINGS, nixl=NIXL)), supports_prefix_fetch=False)
    handle = KvHandle(tokens=2, blocks=1, params=b"")
    leg = make_leg("leg-1", LegKind.DECODE, max_tokens=1, kv_handle=handle)
    assert await engine.submit(leg) is LegFailure.KV_LOAD_FAILED
    with pytest.raises(ValueError, match="fetches whole prompts only"):
        engine._check_leg(leg, engine._facts)
    whole = evolve(leg, kv_handle=KvHandle(tokens=3, blocks=1, params=b""))
    engine._check_leg(whole, engine._facts)
    engine._supports_resume = True
    with pytest.raises(ValueError, match="of which 1 were generated"):
        engine._check_leg(evolve(whole, resumed_tokens=1), engine._facts)
    await engine.close()


# ------------------------------------------------------------------ load
def test_a_prompt_is_queued_until_its_leg_has_started() -> None:
    meter = LoadMeter()
    meter.on_leg_submitted(100)
    meter.on_leg_submitted(50)
    assert meter.load(live_legs=2)[:3] == (2, 0, 150)
    meter.on_step(stats(num_running_reqs=1, kv_cache_usage=0.25))
    meter.on_leg_started(100)
    assert meter.load(live_legs=2)[:4] == (1, 1, 50, 0.25)


def test_an_engine_without_legs_reports_none_after_its_last_step() -> None:
    meter = LoadMeter()
    meter.on_step(stats(num_running_reqs=3))
    assert meter.load(live_legs=0) == Load()


def test_the_step_time_follows_the_steps_slowly_and_ignores_empty_ones() -> None:
    meter = LoadMeter()
    meter.on_step(step(20.0))
    assert meter.load(live_legs=0).step_s == pytest.approx(0.020)
    meter.on_step(step(0.0, is_dummy=True))
    meter.on_step(step(40.0))
    assert meter.load(live_legs=0).step_s == pytest.approx(0.022)


def test_transfers_add_up_over_steps() -> None:
    meter = LoadMeter()
    for _ in range(2):
        meter.on_step(
            stats(
                kv_connector_stats={
                    "transfer_duration": [0.5, 0.25],
                    "bytes_transferred": [100, 50],
                    "num_failed_transfers": [1],
                    "num_failed_handshakes": [1],
                    "num_kv_expired_reqs": [1],
                }
            )
        )
    totals = meter.load(live_legs=0).transfers
    assert totals == TransferTotals(
        pulls=4, moved_bytes=300, busy_s=1.5, failures=4, expired_leases=2
    )


def test_transfers_of_one_connector_among_several_count_alike() -> None:
    meter = LoadMeter()
    nixl = {"transfer_duration": [0.5], "bytes_transferred": [100]}
    meter.on_step(stats(kv_connector_stats={"NixlConnector": nixl, "OffloadingConnector": {}}))
    assert meter.load(live_legs=0).transfers == TransferTotals(1, 100, 0.5)


def test_steps_add_up_with_their_computed_tokens() -> None:
    meter = LoadMeter()
    meter.on_step(step(20.0, num_ctx_tokens=300, num_generation_requests=0))
    meter.on_step(stats())  # nothing was computed
    meter.on_step(step(0.0, is_dummy=True))
    # With speculation there are more tokens than requests.
    drafted = step(30.0, num_ctx_tokens=5, num_generation_requests=2, num_generation_tokens=6)
    meter.on_step(drafted, context_tokens=700)
    found = meter.load(live_legs=0).steps
    assert (found.steps, found.prefill_tokens, found.decode_tokens) == (2, 305, 2)
    assert found.context_tokens == 700
    assert found.busy_s == pytest.approx(0.050)


# ------------------------------------------------------------------ failures to start
def test_a_misspelt_engine_argument_is_named() -> None:
    error = TypeError("AsyncEngineArgs.__init__() got an unexpected keyword argument 'max_sequ'")
    failed = start_failure(SETTINGS, error)
    assert "replica p0" in str(failed)
    assert "'max_sequ'" in str(failed)
    assert failed.remedy == "correct the name under `engine.extra`"


def test_a_failure_in_the_engines_process_points_to_its_log() -> None:
    error = RuntimeError("Engine core initialization failed. See root cause above.\nFailed: {}")
    assert "its process ended while starting" in str(start_failure(SETTINGS, error))


def test_a_failure_is_one_line_for_every_error_of_vllm() -> None:
    error = ValueError("first\n  second\n\nthird")
    text = str(start_failure(SETTINGS, error))
    assert "ValueError: first second third" in text
    assert "\n" not in text


def test_a_failure_that_is_told_well_is_left_as_it_is() -> None:
    error = EngineStartFailed("port in use", "free it")
    assert start_failure(SETTINGS, error) is error
