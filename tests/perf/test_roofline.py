"""The roofline: what a step takes, and how that changes with what is in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.value import evolve
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.hardware.collectives import all_reduce, send_s
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY, Efficiency, engine_efficiency
from baton.perf.model.layer_work import Matrix, layer_kinds
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.kernels import compute_dtype, gemm_s
from baton.perf.steps.modelled import ModelledTiming
from baton.perf.steps.roofline import Roofline
from tests.perf.shapes import ALL, DEEPSEEK, H100, LLAMA_8B, LLAMA_70B, MIXTRAL, WINDOWED


def decode(requests: int, context: int) -> StepBatch:
    return StepBatch(decode_requests=requests, decode_context_tokens=requests * context)


def prefill(tokens: int, before: int = 0) -> StepBatch:
    return StepBatch(
        prefill_tokens=tokens,
        prefill_requests=1,
        prefill_pairs=attention_pairs(tokens, before),
        prefill_context_tokens=before,
        finished_prefills=1,
    )


@pytest.mark.parametrize("shape", ALL, ids=lambda shape: shape.name)
def test_the_products_of_all_layers_hold_all_their_weights(shape: ModelShape) -> None:
    held = 0
    for kind in layer_kinds(shape, 1):
        copies = shape.experts.count if shape.experts and kind.expert_matrices else 0
        held += kind.layers * sum(matrix.inputs * matrix.outputs for matrix in kind.matrices)
        held += (
            kind.layers
            * copies
            * sum(
                expert_matrix.inputs * expert_matrix.outputs
                for expert_matrix in kind.expert_matrices
            )
        )
    assert held == shape.layer_parameters


@pytest.mark.parametrize("shape", ALL, ids=lambda shape: shape.name)
def test_a_decode_takes_longer_than_reading_what_it_touches(shape: ModelShape) -> None:
    batch = decode(4, 1000)
    bytes_read = 2 * (shape.touched_parameters(4) + shape.output_parameters)
    least_s = bytes_read / H100.memory_bytes_per_s
    assert (
        least_s
        < Roofline(shape, H100).step_s(batch)
        < 2.2 * least_s + DEFAULT_EFFICIENCY.step_s + 5e-3
    )


BATCHES = st.builds(
    lambda chunk, before, decodes, context: StepBatch(
        prefill_tokens=chunk,
        prefill_requests=min(chunk, 1),
        prefill_pairs=attention_pairs(chunk, before),
        prefill_context_tokens=before * min(chunk, 1),
        decode_requests=decodes,
        decode_context_tokens=decodes * context,
        finished_prefills=min(chunk, 1),
    ),
    st.integers(0, 8192),
    st.integers(0, 30_000),
    st.integers(0, 300),
    st.integers(1, 30_000),
)
PARTS = st.sampled_from(
    [
        field
        for field in StepBatch.__struct_fields__
        if field not in {"prefill_requests", "decode_requests"}
    ]
)


@given(BATCHES, PARTS, st.integers(1, 10_000), st.sampled_from(ALL), st.sampled_from([1, 2, 8]))
def test_a_step_with_more_in_it_takes_no_less(
    batch: StepBatch, part: str, more: int, shape: ModelShape, tp: int
) -> None:
    timing = Roofline(shape, H100, tp=tp)
    larger = evolve(batch, **{part: getattr(batch, part) + more})
    assert timing.step_s(larger) >= timing.step_s(batch) * (1 - 1e-12) > 0


@given(st.integers(1, 256), st.integers(0, 256), st.integers(1, 20_000))
def test_more_decodes_take_longer(requests: int, more: int, context: int) -> None:
    timing = Roofline(LLAMA_8B, H100)
    one = StepBatch(decode_requests=requests, decode_context_tokens=requests * context)
    other = evolve(one, decode_requests=requests + more)
    assert timing.step_s(other) >= timing.step_s(one)


@given(st.integers(1, 256), st.integers(1, 20_000), st.integers(1, 500))
def test_the_mean_of_the_first_and_last_of_many_decodes_is_that_of_all(
    requests: int, context: int, steps: int
) -> None:
    timing = Roofline(LLAMA_70B, H100, tp=4)
    each = [timing.step_s(decode(requests, context + step)) for step in range(steps)]
    assert sum(each) / steps == pytest.approx((each[0] + each[-1]) / 2, rel=1e-9)


def test_only_what_ends_a_prompt_goes_through_the_output_layer() -> None:
    timing = Roofline(LLAMA_8B, H100)
    ends, goes_on = prefill(100), evolve(prefill(100), finished_prefills=0)
    output_s = 2 * 4096 * 128256 / H100.memory_bytes_per_s
    assert timing.step_s(ends) - timing.step_s(goes_on) == pytest.approx(output_s, rel=0.3)


def test_the_parts_add_up_to_the_step() -> None:
    timing = Roofline(LLAMA_70B, H100, tp=2)
    batch = evolve(prefill(500), decode_requests=8, decode_context_tokens=8000)
    parts = timing.parts(batch)
    assert timing.step_s(batch) == sum(parts)
    assert parts.fixed_s == DEFAULT_EFFICIENCY.step_s
    assert parts.requests_s == pytest.approx(9 * DEFAULT_EFFICIENCY.request_s)
    assert min(part for name, part in parts._asdict().items() if name != "experts_s") > 0
    assert Roofline(MIXTRAL, H100).parts(batch).experts_s > 0


@pytest.mark.parametrize(
    ("factor", "part"),
    [("gemm", "gemm_s"), ("attention", "attention_s"), ("communication", "wire_s")],
)
def test_a_factor_scales_its_part_and_no_other(factor: str, part: str) -> None:
    batch = evolve(prefill(700), decode_requests=3, decode_context_tokens=900)
    plain = Roofline(LLAMA_70B, H100, tp=2).parts(batch)
    doubled = replace(DEFAULT_EFFICIENCY, **{factor: 2 * getattr(DEFAULT_EFFICIENCY, factor)})
    scaled = Roofline(LLAMA_70B, H100, tp=2, efficiency=doubled).parts(batch)
    assert getattr(scaled, part) == pytest.approx(2 * getattr(plain, part))
    assert scaled._replace(**{part: 0.0}) == pytest.approx(plain._replace(**{part: 0.0}))


def test_more_devices_share_products_and_attention_and_have_to_talk() -> None:
    batch = evolve(prefill(4096), decode_requests=32, decode_context_tokens=64_000)
    one, four = (Roofline(LLAMA_70B, H100, tp=tp).parts(batch) for tp in (1, 4))
    assert one.wire_s == 0 < four.wire_s
    assert 3.0 < one.gemm_s / four.gemm_s < 4.0
    assert 3.0 < one.attention_s / four.attention_s < 4.0


def test_a_second_stage_costs_what_sending_to_it_costs() -> None:
    batch = prefill(1000)
    sent_s = send_s(1000 * 8192 * 2.0, 2, H100)
    staged = Roofline(LLAMA_70B, H100, pp=2).step_s(batch)
    assert staged == pytest.approx(Roofline(LLAMA_70B, H100).step_s(batch) + sent_s)


def test_narrow_keys_and_values_are_read_faster_and_prefilled_slower() -> None:
    wide, narrow = (Roofline(LLAMA_8B, H100, kv=kv) for kv in (Dtype.BF16, Dtype.FP8))
    assert narrow.step_s(decode(64, 8000)) < 0.75 * wide.step_s(decode(64, 8000))
    assert narrow.step_s(prefill(2000)) > wide.step_s(prefill(2000))


def test_layers_with_a_window_read_no_more_than_it() -> None:
    timing = Roofline(WINDOWED, H100)
    full = Roofline(replace(WINDOWED, window_tokens=None, windowed_layers=0), H100)
    assert timing.step_s(decode(8, 1024)) == full.step_s(decode(8, 1024))
    grown = timing.parts(decode(8, 5120)).attention_s - timing.parts(decode(8, 1024)).attention_s
    plain = full.parts(decode(8, 5120)).attention_s - full.parts(decode(8, 1024)).attention_s
    assert grown == pytest.approx(plain / 2)
    assert timing.step_s(prefill(8000)) < full.step_s(prefill(8000))


def test_reads_of_latent_attention_are_not_divided_among_devices() -> None:
    few = replace(DEEPSEEK, heads=64)
    one, eight = (Roofline(few, H100, tp=tp).parts(decode(16, 8000)) for tp in (1, 8))
    assert one.attention_s == pytest.approx(eight.attention_s)


def test_key_heads_are_copied_when_there_are_too_few() -> None:
    eight, sixteen = (Roofline(LLAMA_70B, H100, tp=tp).parts(decode(64, 4000)) for tp in (8, 16))
    assert eight.attention_s == pytest.approx(sixteen.attention_s)


def test_few_tokens_touch_few_experts() -> None:
    timing = Roofline(MIXTRAL, H100)
    one, many = (timing.parts(StepBatch(decode_requests=n)).experts_s for n in (1, 64))
    expert_s = 32 * 3 * 4096 * 14336 * 2 / H100.memory_bytes_per_s
    assert 5 * expert_s < many - one < 8.5 * expert_s


def test_all_devices_of_another_node_talk_over_the_network() -> None:
    near, far = (all_reduce(1e8, ranks, H100) for ranks in (8, 16))
    assert far.wire_s > 8 * near.wire_s
    assert sum(all_reduce(1e8, 1, H100)) == 0


@pytest.mark.parametrize(
    ("payload_bytes", "microseconds"), [(1024, 24.1), (32_768, 24.5), (262_144, 28.0)]
)
def test_devices_without_a_link_of_their_own_reduce_in_a_ring_over_pcie(
    payload_bytes: float, microseconds: float
) -> None:
    """Source: voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md, 8 devices."""
    device = find_accelerator("RTX PRO 6000")
    time = all_reduce(payload_bytes, 8, device)
    assert sum(time) * 1e6 == pytest.approx(microseconds, rel=0.3)
    large = all_reduce(1e9, 8, device)
    assert 1.75 * 1e9 / large.wire_s == pytest.approx(41e9, rel=0.05)
    pair, eight = (sum(all_reduce(1024, ranks, device)) for ranks in (2, 8))
    assert pair == pytest.approx(6.2e-6, rel=0.05)
    assert pair < eight
    assert sum(all_reduce(1024, 8, H100)) < 0.3 * eight


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(2, 8))
def test_larger_exchanges_take_no_less(one: float, other: float, ranks: int) -> None:
    less, more = sorted((one, other))
    assert all_reduce(less, ranks, H100).wire_s <= all_reduce(more, ranks, H100).wire_s


def test_a_small_exchange_takes_one_phase_and_a_large_one_two() -> None:
    small, large = (all_reduce(size, 8, H100).wire_s for size in (16e3, 64e6))
    assert small == pytest.approx(7 * 1.45 * 16e3 / 450e9)
    assert large == pytest.approx(3e-6 + 1.75 * 1.45 * 64e6 / 450e9)


def test_a_wide_product_reaches_the_arithmetic_and_a_narrow_one_the_bandwidth() -> None:
    matrix = Matrix(inputs=8192, outputs=10240)
    wide_s = gemm_s(H100, matrix, 16384, weights=Dtype.BF16, inputs=Dtype.BF16)
    narrow_s = gemm_s(H100, matrix, 1, weights=Dtype.BF16, inputs=Dtype.BF16)
    assert 0.75 < 2 * 16384 * 8192 * 10240 / 989e12 / wide_s < 0.87
    assert 0.7 < 2 * 8192 * 10240 / 3.35e12 / narrow_s < 0.82


def test_weights_that_a_device_cannot_multiply_are_unpacked() -> None:
    old = replace(H100, flops_by_dtype={Dtype.BF16: 312e12})
    assert compute_dtype(Dtype.FP8, H100) is Dtype.FP8
    assert compute_dtype(Dtype.FP8, old) is Dtype.BF16
    assert compute_dtype(Dtype.INT4, H100) is Dtype.BF16
    packed = Roofline(LLAMA_8B, old, weights=Dtype.INT4)
    plain = Roofline(LLAMA_8B, old)
    assert packed.step_s(decode(1, 100)) < 0.6 * plain.step_s(decode(1, 100))
    assert packed.step_s(prefill(8000)) == pytest.approx(plain.step_s(prefill(8000)), rel=0.05)


@pytest.mark.parametrize(("tp", "measured_ms"), [(2, 17.4), (4, 11.8), (8, 9.1)])
def test_a_decode_of_70b_in_fp8_takes_what_was_measured(tp: int, measured_ms: float) -> None:
    """InferenceX, vLLM on H100, four clients, 1k in and out; a prompt's share is below 2 %."""
    timing = Roofline(LLAMA_70B, find_accelerator("H100"), tp=tp, weights=Dtype.FP8)
    assert timing.step_s(decode(4, 1400)) * 1e3 == pytest.approx(measured_ms, rel=0.1)


def test_no_device_is_not_a_layout() -> None:
    with pytest.raises(ValueError, match=r"got tp 0, pp 1, dp 1, ep 1, expected 1 or more"):
        Roofline(LLAMA_8B, H100, tp=0)
    with pytest.raises(ValueError, match=r"got tp 2, pp 1, dp 2, ep 3, expected .* divides"):
        Roofline(MIXTRAL, H100, tp=2, dp=2, ep=3)


def test_an_efficiency_is_kept() -> None:
    efficiency = Efficiency(step_s=0.5)
    timing = Roofline(LLAMA_8B, H100, efficiency=efficiency)
    assert timing._efficiency is efficiency
    assert timing.step_s(decode(1, 1)) > 0.5


def test_quantising_inputs_is_not_quicker_where_memory_is() -> None:
    matrix = Matrix(inputs=8192, outputs=8192)

    def seconds(rows: int, bandwidth: float) -> float:
        device = replace(H100, memory_bytes_per_s=bandwidth * H100.memory_bytes_per_s)
        return gemm_s(device, matrix, rows, weights=Dtype.FP8, inputs=Dtype.FP8)

    quantising_s = 8192 * 8192 * 3030 / 1.979e15
    computing_s = 2 * 8192**3 / (0.73 * 1.979e15)
    assert seconds(8192, 1.43) / seconds(8192, 1.0) > 0.93
    assert seconds(8192, 1e6) == pytest.approx(quantising_s + computing_s, rel=0.02)


def test_narrow_products_have_a_factor_of_their_own() -> None:
    slower = replace(DEFAULT_EFFICIENCY, gemm_narrow=2 * DEFAULT_EFFICIENCY.gemm_narrow)
    batch = StepBatch(decode_requests=8, decode_context_tokens=800)
    for weights, changes in ((Dtype.BF16, False), (Dtype.FP8, True), (Dtype.INT4, False)):
        before, after = (
            Roofline(LLAMA_8B, H100, weights=weights, efficiency=efficiency).step_s(batch)
            for efficiency in (DEFAULT_EFFICIENCY, slower)
        )
        assert (after > before) is changes


def test_tiles_of_queries_bind_decodes_of_an_fp8_cache_but_not_of_xqa_kernels() -> None:
    h200 = find_accelerator("h200_sxm")
    batch = StepBatch(decode_requests=64, decode_context_tokens=64 * 8000)
    xqa, tiles = (
        Roofline(LLAMA_8B, h200, kv=Dtype.FP8, efficiency=engine_efficiency(engine)).parts(batch)
        for engine in ("trtllm", "vllm")
    )
    read_s = 64 * 8000 * 2 * 8 * 128 * 32 / (4.8e12 * DEFAULT_EFFICIENCY.decode_memory)
    assert xqa.attention_s == pytest.approx(DEFAULT_EFFICIENCY.attention * read_s, rel=0.15)
    assert tiles.attention_s > 1.2 * xqa.attention_s
    assert engine_efficiency("anything else") == DEFAULT_EFFICIENCY


# ---------- the timing that decisions ask, over a model of steps
STEPS = Roofline(LLAMA_8B, H100)
TIMING = ModelledTiming(steps=STEPS, max_batched_tokens=2048, host_block_s=1e-4)


@given(st.integers(1, 30_000), st.integers(0, 300), st.integers(1, 2000))
def test_a_prompt_takes_as_long_as_all_its_chunks(tokens: int, running: int, context: int) -> None:
    done, expected = 0, 0.0
    while done < tokens:
        chunk = min(2048 - running, tokens - done)
        expected += STEPS.step_s(
            StepBatch(
                prefill_tokens=chunk,
                prefill_requests=1,
                prefill_pairs=attention_pairs(chunk, done),
                prefill_context_tokens=done,
                decode_requests=running,
                decode_context_tokens=running * context,
                finished_prefills=int(done + chunk == tokens),
            )
        )
        done += chunk
    asked = TIMING.prefill_s(tokens, running=running, context_tokens=running * context)
    assert asked == pytest.approx(expected, rel=1e-9)


def test_a_prompt_of_twice_the_length_takes_more_than_twice_as_long() -> None:
    assert TIMING.prefill_s(65_536) > 2.3 * TIMING.prefill_s(32_768)


def test_prompts_beside_decodes_come_in_pieces_of_the_smaller_budget() -> None:
    two = replace(TIMING, max_batched_tokens_while_decoding=512)
    small = replace(TIMING, max_batched_tokens=512)
    beside = {"running": 8, "context_tokens": 8000}
    assert two.prefill_s(5000, **beside) == small.prefill_s(5000, **beside)
    assert two.prefill_s(5000) == TIMING.prefill_s(5000) < small.prefill_s(5000)
    larger = replace(small, max_batched_tokens_while_decoding=8192)
    assert larger.prefill_s(5000, **beside) == small.prefill_s(5000, **beside)


def test_nothing_takes_no_time() -> None:
    assert TIMING.prefill_s(0) == 0
    assert TIMING.host_load_s(0) == 0
    assert TIMING.host_load_s(-1) == 0
    assert TIMING.host_load_s(30) == pytest.approx(3e-3)


def test_decodes_that_fill_the_budget_leave_room_for_one_token() -> None:
    assert TIMING.prefill_s(2, running=4000) > TIMING.prefill_s(1, running=4000) > 0


@given(st.integers(1, 200), st.integers(0, 100_000), st.integers(0, 50_000))
def test_one_more_decode_adds_what_a_step_with_it_takes_more(
    running: int, context: int, more: int
) -> None:
    before = TIMING.step_s(running=running, context_tokens=context)
    after = TIMING.step_s(running=running + 1, context_tokens=context + more)
    assert TIMING.decode_request_s(context_tokens=more) == pytest.approx(
        after - before, rel=0.6, abs=1.5e-4
    )


# ------------------------------------------------------------------ queues of prompts


@given(st.integers(1, 40), st.integers(64, 1500), st.integers(0, 300))
def test_a_queue_of_prompts_takes_about_as_long_as_its_steps_one_by_one(
    prompts: int, length: int, running: int
) -> None:
    """The slow twin: full steps are filled with prompts in order, each from where it was left."""
    room, expected, left = 2048 - running, 0.0, [(length, 0)] * prompts
    while left:
        budget, batch, todo = room, [], []
        for missing, before in left:
            chunk = min(budget, missing)
            budget -= chunk
            if chunk:
                batch.append((chunk, before))
            if missing > chunk:
                todo.append((missing - chunk, before + chunk))
        left = todo
        expected += STEPS.step_s(
            StepBatch(
                prefill_tokens=sum(chunk for chunk, _ in batch),
                prefill_requests=len(batch),
                prefill_pairs=sum(attention_pairs(*item) for item in batch),
                prefill_context_tokens=sum(before for _, before in batch),
                decode_requests=running,
                decode_context_tokens=running * 1000,
                finished_prefills=len(batch),
            )
        )
    asked = TIMING.prefill_s(
        prompts * length, running=running, context_tokens=running * 1000, length_tokens=length
    )
    assert asked == pytest.approx(expected, rel=0.05)


def test_many_short_prompts_take_less_than_one_as_long_as_all_of_them() -> None:
    one, many = TIMING.prefill_s(65_536), TIMING.prefill_s(65_536, length_tokens=1024)
    assert many < 0.9 * one


@given(st.integers(1, 5000), st.integers(0, 10_000))
def test_a_queue_of_one_prompt_is_that_prompt(tokens: int, more: int) -> None:
    assert TIMING.prefill_s(tokens, length_tokens=tokens + more) == TIMING.prefill_s(tokens)


class OnlyPairs:
    """Steps that take as long as their pairs of tokens alone need."""

    def step_s(self, batch: StepBatch) -> float:
        return 1e-9 * batch.prefill_pairs


@given(st.integers(2, 40), st.integers(1, 6000))
def test_tokens_of_a_queue_attend_to_their_own_prompts_only(prompts: int, length: int) -> None:
    timing = ModelledTiming(steps=OnlyPairs(), max_batched_tokens=2048, host_block_s=0.0)
    asked = timing.prefill_s(prompts * length, length_tokens=length)
    assert asked == pytest.approx(1e-9 * prompts * attention_pairs(length, 0))


def test_each_rank_of_a_group_has_a_host_process_of_its_own() -> None:
    alone = Roofline(MIXTRAL, H100).parts(decode(32, 1000))
    group = Roofline(MIXTRAL, H100, dp=8, ep=8).parts(decode(8 * 32, 1000))
    assert group.requests_s == alone.requests_s
