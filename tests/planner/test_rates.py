"""Rates in closed form: the field's worked table, and what must be so for any engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.perf.step_timing import StepBatch
from baton.planner.rates.closed_form import (
    MeanRequest,
    ServiceTime,
    decode_rate,
    decode_s,
    max_batch,
    max_concurrent_requests,
    mixed_rate,
    prefill_rate,
    prefill_s,
)
from baton.simulator.v1.settings import V1Settings

WEIGHTS_BYTES = 70.6e9
KV_TOKEN_BYTES = 327_680
LAYERS, WIDTH, TP = 80, 8192, 4


@dataclass(frozen=True)
class Worked:
    """A 70B model in FP8 on four devices, as the worked table has it: one efficiency for each of
    memory (0.8) and compute (0.55), 4 ms a step, 10 us an all-reduce."""

    bytes_per_s: float
    flops: float = 1979e12

    def step_s(self, batch: StepBatch) -> float:
        memory, compute = TP * self.bytes_per_s * 0.8, TP * self.flops * 0.55
        products_s = max(WEIGHTS_BYTES / memory, 2 * WEIGHTS_BYTES * batch.tokens / compute)
        # four operations for each pair, layer and width: 2 L d n^2 for a causal prompt
        attention_s = (
            4 * LAYERS * WIDTH * batch.prefill_pairs / compute
            + KV_TOKEN_BYTES * batch.decode_context_tokens / memory
        )
        return products_s + attention_s + 2 * LAYERS * 10e-6 + 4e-3


GPUS = {"H100": (80e9, 3.35e12), "H200": (141e9, 4.8e12)}


def settings_on(gpu: str) -> V1Settings:
    memory, bandwidth = GPUS[gpu]
    room = 0.9 * TP * memory - WEIGHTS_BYTES - TP * 3.5e9
    return V1Settings(
        timing=Worked(bandwidth),
        kv_blocks=int(room / KV_TOKEN_BYTES / 16),
        kv_block_bytes=16 * KV_TOKEN_BYTES,
        max_running_requests=1024,
        max_batched_tokens=32_768,
    )


# workload, device, prompt, output, share cached -> prefill replicas per decode replica at a TPOT of
# 30 and of 50 ms. Source: SCIENCE of the field, appendix B.
Row = tuple[str, str, int, int, float, float, float]
TABLE: list[Row] = [
    ("code", "H100", 2048, 28, 0.0, 21.6, 22.4),
    ("conversation", "H100", 1155, 211, 0.0, 2.26, 2.39),
    ("servegen", "H100", 914, 155, 0.0, 2.82, 3.04),
    ("mooncake", "H100", 12035, 343, 0.37, 1.33, 1.37),
    ("mooncake synthetic", "H100", 15325, 149, 0.65, 1.84, 1.90),
    ("sharegpt", "H100", 857, 653, 0.0, 0.55, 0.57),
    ("reasoning", "H100", 1268, 1527, 0.0, 0.25, 0.25),
    ("conversation", "H200", 1155, 211, 0.0, 2.68, 2.92),
    ("mooncake", "H200", 12035, 343, 0.37, 2.12, 2.35),
    ("reasoning", "H200", 1268, 1527, 0.0, 0.32, 0.34),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]} on {row[1]}")
def test_the_fields_table_of_balanced_ratios_comes_out(row: Row) -> None:
    _, gpu, prompt, output, hit, at_30, at_50 = row
    mix = MeanRequest(prompt_tokens=prompt, output_tokens=output, cached_tokens=hit * prompt)
    engine = settings_on(gpu)

    assert prefill_decode_ratio(engine, mix, 0.030) == pytest.approx(at_30, rel=0.3)
    assert prefill_decode_ratio(engine, mix, 0.050) == pytest.approx(at_50, rel=0.3)


def prefill_decode_ratio(engine: V1Settings, mix: MeanRequest, tpot_s: float) -> float:
    """Prefill replicas per decode replica that keep both busy."""
    return decode_rate(engine, mix, tpot_s) / prefill_rate(engine, mix)


def test_one_split_cannot_suit_both_code_and_reasoning() -> None:
    engine = settings_on("H100")
    code = prefill_decode_ratio(engine, MeanRequest(prompt_tokens=2048, output_tokens=28), 0.03)
    reasoning = prefill_decode_ratio(
        engine, MeanRequest(prompt_tokens=1268, output_tokens=1527), 0.03
    )

    assert code / reasoning > 60


mixes = st.builds(
    MeanRequest,
    prompt_tokens=st.integers(2, 20_000).map(float),
    output_tokens=st.integers(1, 3_000).map(float),
)
tpots = st.floats(0.012, 0.3)


@given(mixes, tpots, tpots)
def test_a_looser_objective_never_lowers_a_rate(mix: MeanRequest, one: float, other: float) -> None:
    engine, (tight, loose) = settings_on("H100"), sorted((one, other))

    assert decode_rate(engine, mix, tight) <= decode_rate(engine, mix, loose) * 1.05
    assert mixed_rate(engine, mix, tight) <= mixed_rate(engine, mix, loose) * 1.05


@given(mixes, tpots)
def test_the_largest_batch_is_in_time_and_one_more_is_not(mix: MeanRequest, tpot_s: float) -> None:
    engine = settings_on("H100")
    most = min(200, max_concurrent_requests(engine, mix))
    batch = max_batch(engine.timing, context_tokens=mix.context_tokens, tpot_s=tpot_s, limit=most)

    twin = [
        n for n in range(1, most + 1) if decode_s(engine.timing, n, mix.context_tokens) <= tpot_s
    ]
    assert batch == max(twin, default=0)


@given(mixes, tpots)
def test_doing_both_never_carries_more_than_either_alone(mix: MeanRequest, tpot_s: float) -> None:
    engine = settings_on("H100")
    both = mixed_rate(engine, mix, tpot_s)

    # a step with many prompts shares what one prompt alone pays in full: the fixed 5.6 ms
    alone = 1 / (prefill_s(engine.timing, int(mix.prompt_tokens)) - 5.6e-3 - 6.6e-3 + 1e-9)
    assert both <= max(alone, prefill_rate(engine, mix)) * 1.35 or alone < 0
    assert both <= decode_rate(engine, mix, tpot_s) * 1.1 + 1e-9


def test_a_prompt_in_chunks_attends_to_what_was_computed_before() -> None:
    engine = settings_on("H100")
    whole = prefill_s(engine.timing, 16_384, budget_tokens=16_384)
    halves = prefill_s(engine.timing, 16_384, budget_tokens=8_192)
    cached = prefill_s(engine.timing, 16_384, cached_tokens=8_192, budget_tokens=16_384)

    assert halves == pytest.approx(whole + 4e-3 + 160 * 10e-6, rel=1e-3)
    assert cached > prefill_s(engine.timing, 8_192, budget_tokens=16_384)


@given(st.integers(1, 5_000), st.integers(0, 5_000), st.integers(1, 3_000))
def test_every_token_that_is_not_cached_is_computed_once(
    tokens: int, cached: int, budget: int
) -> None:
    seen: list[StepBatch] = []

    class Noted:
        def step_s(self, batch: StepBatch) -> float:
            seen.append(batch)
            return 1.0

    took_s = prefill_s(Noted(), tokens, cached_tokens=cached, budget_tokens=budget)
    computed = max(1, tokens - cached)

    assert sum(step_batch.prefill_tokens for step_batch in seen) == computed
    assert took_s == len(seen) == -(-computed // budget)
    assert [step_batch.finished_prefills for step_batch in seen] == [0] * (len(seen) - 1) + [1]
    # each token attends to all before it and to itself
    pairs = tokens * (tokens + 1) / 2 - (tokens - computed) * (tokens - computed + 1) / 2
    assert sum(step_batch.prefill_pairs for step_batch in seen) == pairs


def test_a_cached_prompt_still_has_its_last_token_computed() -> None:
    engine = settings_on("H100")

    assert prefill_s(engine.timing, 1_000, cached_tokens=1_000) > 0
    assert MeanRequest(prompt_tokens=100, output_tokens=1, cached_tokens=100).computed_tokens == 1


def test_pipeline_stages_work_at_the_same_time() -> None:
    one = settings_on("H100")
    two = replace(one, pipeline_stages=2)
    mix = MeanRequest(prompt_tokens=1000, output_tokens=100)

    assert prefill_rate(two, mix) == pytest.approx(2 * prefill_rate(one, mix))
    assert decode_rate(two, mix, 0.015) == pytest.approx(2 * decode_rate(one, mix, 0.015))


def test_memory_bounds_how_many_streams_there_are() -> None:
    engine = settings_on("H100")
    mix = MeanRequest(prompt_tokens=100_000, output_tokens=100)
    kept = engine.kv_blocks * 16 // 100_100

    assert max_concurrent_requests(engine, mix) == kept
    assert max_concurrent_requests(replace(engine, max_running_requests=1), mix) == 1


def test_nobody_decodes_when_one_step_is_too_slow() -> None:
    engine = settings_on("H100")
    mix = MeanRequest(prompt_tokens=1000, output_tokens=100)

    assert decode_rate(engine, mix, 0.001) == 0
    assert mixed_rate(engine, mix, 0.001) == 0


def test_a_queue_is_short_enough_only_below_full_load() -> None:
    steady, bursty = ServiceTime.from_times([0.1]), ServiceTime.from_times([0.01, 0.19])

    assert 0 < bursty.rate_within(0.3, 0.9) < steady.rate_within(0.3, 0.9) < 10
    assert steady.rate_within(0.3, 0.99) < steady.rate_within(0.3, 0.9)
    assert steady.rate_within(0.0, 0.9) == 0
    assert steady.rate_within(1e6, 0.9) == pytest.approx(10, rel=1e-3)


def test_the_tail_of_the_wait_is_kingmans() -> None:
    # at rho = 0.5 and no spread: P(W > t) = 0.5 exp(-t / S) = 0.1 at t = S ln 5
    service = ServiceTime.from_times([0.2, 0.2])

    assert service.rate_within(0.2 * 1.6094, 0.9) == pytest.approx(0.5 / 0.2, rel=1e-3)
