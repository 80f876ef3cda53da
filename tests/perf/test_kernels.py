"""Measured kernels: grids, their neighbours, and layouts that share experts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.perf.hardware import kernel_fits
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.hardware.collectives import network_dispatch_s
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY, Efficiency
from baton.perf.hardware.kernel_fits import ExpertWidths, LogGrid
from baton.perf.model.known_models import find_shape
from baton.perf.model.layer_work import Matrix, attention_matrices
from baton.perf.model.layers import Attention, StateMixer
from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.attention import context_s
from baton.perf.steps.kernels import EngineKernels
from baton.perf.steps.roofline import Roofline, StepParts
from tests.perf.shapes import H100, LLAMA_70B

GPU = find_accelerator("H100")
GPT_OSS = find_shape("openai/gpt-oss-120b")


def kernels_of(
    gpu: str,
    *,
    weights: Dtype = Dtype.BF16,
    tp: int = 1,
    dp: int = 1,
    ep: int = 1,
    engine: str = "vllm",
) -> EngineKernels:
    return EngineKernels(
        find_accelerator(gpu),
        DEFAULT_EFFICIENCY,
        engine=engine,
        tp=tp,
        dp=dp,
        ep=ep,
        weights=weights,
        experts=weights,
        kv=Dtype.BF16,
    )


def test_a_grid_is_a_straight_line_in_logarithms_and_grows_beyond_its_end() -> None:
    grid = LogGrid([[1, 4], [1, 16]], [0.0, 4.0, 2.0, 6.0], (1, 0))
    assert [grid.at(1, 1), grid.at(4, 16)] == [1.0, 64.0]
    assert grid.at(2, 4) == pytest.approx(8.0)
    assert grid.at(16, 16) == pytest.approx(4 * 64.0)
    assert grid.at(4, 64) == pytest.approx(64.0)
    assert grid.at(0.5, 1) == 1.0


@given(
    st.lists(st.floats(-40.0, 10.0), min_size=12, max_size=12),
    st.floats(0.0, 1e6),
    st.floats(0.0, 1e6),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_a_grid_of_two_axes_is_read_alike_in_both_ways(
    values: list[float], first: float, second: float, growth: tuple[int, int]
) -> None:
    grid = LogGrid([[1, 4, 9], [1, 16, 64, 100]], values, growth)
    for sizes in ((first, second), (4, second), (first, 64), (9, 100)):
        assert grid.at_two(*sizes) == pytest.approx(grid.at(*sizes), rel=1e-12)


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 3), st.integers(0, 2)), max_size=6))
def test_a_steps_time_does_not_depend_on_the_steps_before_it(
    batches: list[tuple[int, int, int]],
) -> None:
    used = Roofline(LLAMA_70B, H100, tp=2)
    for tokens, decodes, prompts in batches:
        pairs = attention_pairs(tokens, 0) if prompts else 0.0
        batch = StepBatch(tokens if prompts else 0, prompts, pairs, 0, decodes, 900 * decodes)
        fresh = Roofline(LLAMA_70B, H100, tp=2)
        assert used.step_s(batch) == fresh.step_s(batch) == pytest.approx(sum(fresh.parts(batch)))


def test_a_decode_curve_is_a_straight_line_between_its_contexts() -> None:
    curve = (1.0, 2.0, 6.0)
    assert [context_s(curve, context) for context in (2, 3, 4, 6, 16)] == [1, 1.5, 2, 4, 14]
    assert context_s(curve, 1) == 0.5


def test_no_grid_is_further_off_than_a_quarter_on_rows_that_it_never_saw() -> None:
    fits = json.loads((Path(kernel_fits.__file__).parent / "kernel_fits.json").read_text())
    errors = [
        grid["held_back_mape"]
        for name, kernels in fits.items()
        if name != "source"
        for grid in kernels.values()
    ]
    assert len(errors) > 200
    assert max(errors) <= 0.25
    assert sorted(errors)[len(errors) // 2] < 0.07


def test_a_gpu_without_tables_is_as_its_relative_but_for_its_data_sheet() -> None:
    matrix = Matrix(inputs=8192, outputs=8192)

    def seconds(gpu: str, rows: int, weights: Dtype = Dtype.BF16) -> float:
        return kernels_of(gpu, weights=weights).gemm_s(matrix, rows)

    assert seconds("B300", 4096) == pytest.approx(seconds("B200", 4096), rel=0.01)
    assert seconds("B300", 8192, Dtype.FP4) < 0.8 * seconds("B200", 8192, Dtype.FP4)
    assert seconds("L40S", 8192) > 2 * seconds("H100", 8192)


def test_a_device_without_relatives_has_times_by_its_data_sheet() -> None:
    assert kernel_fits.kernel_fits("mi300x", "vllm") is None
    assert kernels_of("MI300X").gemm_s(Matrix(inputs=8192, outputs=8192), 4096) > 0


@pytest.mark.parametrize(
    ("rows", "microseconds"), [(64, 44.5), (128, 44.1), (256, 54.4), (512, 94.3), (513, 197.4)]
)
def test_products_that_fill_their_tiles_take_what_was_measured(
    rows: int, microseconds: float
) -> None:
    """vLLM 0.24 on H200, 16,384 outputs of 8,192 inputs."""
    seconds = kernels_of("H200", weights=Dtype.FP8).gemm_s(Matrix(inputs=8192, outputs=16384), rows)
    assert 1e6 * seconds == pytest.approx(microseconds, rel=0.15)


def test_experts_in_the_tables_take_what_was_measured() -> None:
    """Source: AIConfigurator, moe table of vLLM 0.24 on H100: 64 and 8,192 tokens."""
    experts = GPT_OSS.experts
    assert experts is not None
    kernels = kernels_of("H100", weights=Dtype.FP4, tp=2)
    for tokens, milliseconds in ((64, 0.308653), (8192, 2.174010)):
        seconds = kernels.experts_s(experts, GPT_OSS.hidden, tokens)
        assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_products_whose_inputs_come_quantized_take_a_pass_less() -> None:
    """Source: AIConfigurator, scale_matrix table of vLLM 0.24 on H100, 8,192 wide."""
    matrix, parts = Matrix(inputs=8192, outputs=10240), {}
    for fuses in (False, True):
        kernels = EngineKernels(
            GPU,
            DEFAULT_EFFICIENCY,
            engine="trtllm",
            tp=1,
            dp=1,
            ep=1,
            weights=Dtype.FP8,
            experts=Dtype.FP8,
            kv=Dtype.FP8,
            fuses_quantization=fuses,
        )
        parts[fuses] = [kernels.gemm_s(matrix, rows) for rows in (1, 4096, 8192)]
    saved_us = [(a - b) * 1e6 for a, b in zip(parts[False], parts[True], strict=True)]
    assert saved_us == pytest.approx([2.39, 35.87, 68.52], rel=0.15)


def test_experts_in_4_bit_integers_are_unpacked_even_where_others_are_nearer() -> None:
    """Marlin kernels read as fast or faster, and multiply at about half the rate."""
    experts = GPT_OSS.experts
    assert experts is not None
    unpacked, packed = (
        kernels_of("H100", weights=weights, tp=8) for weights in (Dtype.INT4, Dtype.FP4)
    )
    ratios = [
        unpacked.experts_s(experts, GPT_OSS.hidden, tokens)
        / packed.experts_s(experts, GPT_OSS.hidden, tokens)
        for tokens in (32, 8192)
    ]
    assert ratios[0] < 0.9
    assert 1.5 < ratios[1] < 2.2


def test_experts_in_four_bits_are_multiplied_so_where_the_gpu_can() -> None:
    shape = find_shape("nvidia/DeepSeek-R1-0528-FP4")
    fits = kernel_fits.kernel_fits("b200_sxm", "sglang")
    table = fits.experts("fp4") if fits else None
    assert table is not None
    assert shape.experts is not None
    kernels = EngineKernels(
        find_accelerator("B200"),
        DEFAULT_EFFICIENCY,
        engine="sglang",
        tp=8,
        dp=1,
        ep=1,
        weights=Dtype.BF16,
        experts=Dtype.FP4,
        kv=Dtype.BF16,
    )
    widths, grid = table.nearest(ExpertWidths(7168, 2048, 8, 256, 8, 1))
    assert widths.experts == 256
    assert kernels.experts_s(shape.experts, shape.hidden, 512) == grid.at(512)


def test_experts_of_other_widths_are_scaled_from_the_nearest() -> None:
    fits = kernel_fits.kernel_fits("h100_sxm", "vllm")
    table = fits.experts("mxfp4") if fits else None
    assert table is not None
    near = ExpertWidths(2880, 2880, 4, 128, 2, 1)
    assert table.nearest(near._replace(hidden=3000))[0] == near
    experts = GPT_OSS.experts
    assert experts is not None
    kernels = kernels_of("H100", weights=Dtype.FP4, tp=2)
    wider = replace(experts, width=2 * experts.width)
    ratio = kernels.experts_s(wider, 2880, 8192) / kernels.experts_s(experts, 2880, 8192)
    assert 1.4 < ratio < 2.2


def test_prompts_of_twice_the_length_take_up_to_four_times_the_attention() -> None:
    attention = Attention(heads=32, kv_heads=8, head_dim=128)
    kernels = kernels_of("H100")

    def seconds(tokens: int) -> float:
        return kernels.prefill_attention_s(attention, tokens, attention_pairs(tokens, 0))

    assert 2.5 < seconds(16_384) / seconds(8_192) < 4.0
    assert seconds(65_536) / seconds(32_768) == pytest.approx(4.0, rel=0.02)


def gated_delta_net(heads: int) -> StateMixer:
    """With states in 32 bits."""
    return StateMixer(
        name="gated delta net",
        matrices=(),
        state_bytes=4 * heads * 128 * 128,
        heads=heads,
        key_dim=128,
        value_dim=128,
    )


@pytest.mark.parametrize(
    ("heads", "tokens", "milliseconds"),
    [(8, 1024, 0.0626), (8, 8192, 0.4306), (48, 8192, 0.5443), (48, 32_768, 2.1159)],
)
def test_a_prompts_pass_through_states_takes_what_was_measured(
    heads: int, tokens: int, milliseconds: float
) -> None:
    """Source: AIConfigurator, gdn table of vLLM 0.24 on H100: convolution and rule."""
    seconds = kernels_of("H100").state_prefill_s(
        gated_delta_net(heads), tokens, attention_pairs(tokens, 0)
    )
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.1)


def test_a_long_prompt_passes_through_few_states_no_faster_than_many_short_ones() -> None:
    state, kernels = gated_delta_net(8), kernels_of("H100")
    alone = kernels.state_prefill_s(state, 8192, attention_pairs(8192, 0))
    many = kernels.state_prefill_s(state, 8192, 8 * attention_pairs(1024, 0))
    assert alone > 3 * many


@pytest.mark.parametrize(("requests", "milliseconds"), [(1, 0.00754), (64, 0.18927)])
def test_states_of_decodes_take_what_was_measured(requests: int, milliseconds: float) -> None:
    """Source: as above, 64 heads."""
    seconds = kernels_of("H100").state_decode_s(gated_delta_net(64), requests)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.1)


GLM_5 = find_shape("zai-org/GLM-5")


def sparse_attention() -> Attention:
    """Of GLM-5."""
    layers = (layer.attention for layer in GLM_5.layer_counts())
    return next(attention for attention in layers if attention and attention.indexer)


def products_s(kernels: EngineKernels, rows: int) -> float:
    """Of a layer's attention, over 8 devices."""
    matrices = attention_matrices(sparse_attention(), GLM_5.hidden, 8)
    return sum(kernels.gemm_s(matrix, rows) for matrix in matrices)


@pytest.mark.parametrize(
    ("engine", "milliseconds"),
    [("vllm", {8192: 6.0687, 16_384: 13.0683}), ("sglang", {8192: 5.4135})],
)
def test_sparse_attention_of_prompts_takes_what_was_measured(
    engine: str, milliseconds: dict[int, float]
) -> None:
    """Source: AIConfigurator, dsa_context_module tables on H100: GLM-5, 8 heads, in BF16."""
    kernels = kernels_of("H100", tp=8, engine=engine)
    for tokens, measured_ms in milliseconds.items():
        seconds = kernels.prefill_attention_s(
            sparse_attention(), tokens, attention_pairs(tokens, 0)
        ) + products_s(kernels, tokens)
        assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.15)


@pytest.mark.parametrize(
    ("engine", "milliseconds"),
    [
        ("vllm", {4096: 0.2919, 8192: 0.3, 32_768: 0.3184}),
        ("sglang", {4096: 0.114, 8192: 0.1181}),
    ],
)
def test_sparse_attention_of_decodes_takes_what_was_measured(
    engine: str, milliseconds: dict[int, float]
) -> None:
    """Source: as above, dsa_generation_module: 16 requests."""
    kernels = kernels_of("H100", tp=8, engine=engine)
    curve = kernels.decode_curve(sparse_attention(), 16)
    for context, measured_ms in milliseconds.items():
        seconds = context_s(curve, context) + products_s(kernels, 16)
        assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.12)


@pytest.mark.parametrize("gpu", ["H100", "B300", "MI300X"])
def test_contexts_cost_layers_with_an_indexer_less_than_all_their_tokens(gpu: str) -> None:
    full = replace(sparse_attention(), indexer=None)
    kernels = kernels_of(gpu, tp=8)

    def growth(attention: Attention) -> float:
        curve = kernels.decode_curve(attention, 128)
        return context_s(curve, 65_536) - context_s(curve, 4096)

    assert 0 < growth(sparse_attention()) < 0.5 * growth(full)
    follower = replace(full, shares_indexer=True)
    assert growth(follower) <= 0.05 * growth(full)


MODELS = (
    ("zai-org/GLM-5", Dtype.FP8, 8),
    ("Qwen/Qwen3.5-397B-A17B", Dtype.FP8, 8),
    ("deepseek-ai/DeepSeek-R1", Dtype.FP8, 8),
    ("openai/gpt-oss-120b", Dtype.FP4, 2),
    ("Qwen/Qwen3-32B", Dtype.FP8, 2),
    ("MiniMaxAI/MiniMax-M2.5", Dtype.FP8, 4),
)
DECODES = [
    StepBatch(decode_requests=requests, decode_context_tokens=requests * context)
    for context in (1024, 8192, 65_536)
    for requests in (1, 4, 16, 64, 256)
]
PROMPTS = [
    StepBatch(
        prefill_tokens=prompts * tokens,
        prefill_requests=prompts,
        prefill_pairs=prompts * attention_pairs(tokens, 0),
        finished_prefills=prompts,
    )
    for prompts in (1, 4)
    for tokens in (256, 1024, 4096, 16_384, 65_536)
]


def step_times(model: str, gpu: str, engine: str, dtype: Dtype, tp: int) -> tuple[list[float], ...]:
    """Seconds of the decodes and of the prompts above."""
    timing = Roofline(find_shape(model), find_accelerator(gpu), tp=tp, weights=dtype, engine=engine)
    return [timing.step_s(batch) for batch in DECODES], [timing.step_s(batch) for batch in PROMPTS]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(("model", "dtype", "tp"), MODELS)
def test_steps_are_no_slower_on_a_newer_gpu_and_grow_with_batch_and_length(
    model: str, dtype: Dtype, tp: int, engine: str
) -> None:
    """On B200 steps of one request may take 20 % more: its collectives take longer to start."""
    times = {
        gpu: step_times(model, gpu, engine, dtype, tp)
        for gpu in ("H100", "H200", "B200", "GB200", "B300", "GB300")
    }
    for older, newer, slack in (
        ("H100", "H200", 1.0001),
        ("H200", "B200", 1.2),
        ("B200", "B300", 1.001),
        ("GB200", "GB300", 1.001),
    ):
        for before, after in zip(times[older], times[newer], strict=True):
            assert all(new <= slack * old for old, new in zip(before, after, strict=True))
    for decodes, prompts in times.values():
        for start in range(0, len(decodes), 5):
            assert decodes[start : start + 5] == sorted(decodes[start : start + 5])
        for requests in range(5):
            assert decodes[requests::5] == sorted(decodes[requests::5])
        assert prompts[:5] == sorted(prompts[:5])
        assert prompts[5:] == sorted(prompts[5:])
        assert all(
            alone < together for alone, together in zip(prompts[:5], prompts[5:], strict=True)
        )


def test_a_window_bounds_prompts_and_decodes() -> None:
    full = Attention(heads=64, kv_heads=8, head_dim=64)
    windowed = replace(full, window_tokens=128)
    kernels, pairs = kernels_of("H100"), attention_pairs(8192, 0)
    full_s = kernels.prefill_attention_s(full, 8192, pairs)
    assert kernels.prefill_attention_s(windowed, 8192, pairs) < 0.3 * full_s


def test_ranks_that_share_experts_read_fewer_keys_and_all_experts() -> None:
    batch = StepBatch(decode_requests=64, decode_context_tokens=64 * 8000)
    alone = Roofline(GPT_OSS, GPU, weights=Dtype.FP4).parts(batch)
    ranks = Roofline(GPT_OSS, GPU, weights=Dtype.FP4, dp=8, ep=8).parts(batch)
    assert ranks.attention_s < 0.4 * alone.attention_s
    assert ranks.experts_s < 0.5 * alone.experts_s
    assert alone.wire_s == 0 < ranks.wire_s


def test_one_prompt_is_computed_by_one_rank_and_many_by_all() -> None:
    timing = Roofline(GPT_OSS, GPU, weights=Dtype.FP4, dp=8, ep=8)

    def parts(prompts: int) -> StepParts:
        pairs = 8192 / 8 * (8192 / 8 + 1) / 2 * 8
        return timing.parts(
            StepBatch(prefill_tokens=8192, prefill_requests=prompts, prefill_pairs=pairs)
        )

    assert parts(1).gemm_s > 4 * parts(8).gemm_s
    assert parts(1).attention_s > 3 * parts(8).attention_s
    assert parts(1).experts_s == parts(8).experts_s
    batch = StepBatch(prefill_tokens=8192, prefill_requests=2, prefill_pairs=1e7)
    assert timing.step_s(batch) == sum(timing.parts(batch))


def test_a_step_with_prompts_costs_the_host_more() -> None:
    efficiency = Efficiency(prefill_layer_s=1e-3)
    timing = Roofline(LLAMA_70B, H100, tp=2, efficiency=efficiency)
    prefill = StepBatch(prefill_tokens=1, prefill_requests=1, prefill_pairs=1.0)
    assert timing.parts(prefill).prefill_s == pytest.approx(80e-3)
    assert timing.parts(StepBatch(decode_requests=1)).prefill_s == 0


R1 = find_shape("deepseek-ai/DeepSeek-R1")


@pytest.mark.parametrize(("tokens", "microseconds"), [(1, 27.6), (64, 64.3), (8192, 2811)])
def test_a_dispatch_to_experts_and_back_takes_what_was_measured(
    tokens: int, microseconds: float
) -> None:
    """Source: AIConfigurator, deepep tables of SGLang 0.5.12 on 8 H100: the faster mode."""
    assert R1.experts is not None
    time = kernels_of("H100", dp=8, ep=8).dispatch_time(R1.experts, R1.hidden, tokens)
    assert time is not None
    assert sum(time) * 1e6 == pytest.approx(microseconds, rel=0.15)


@pytest.mark.parametrize(("devices", "microseconds"), [(16, 118), (32, 155), (64, 173), (256, 194)])
def test_a_network_carries_a_dispatch_as_fast_as_published(
    devices: int, microseconds: float
) -> None:
    """Source: DeepEP, README, low-latency kernels: 128 tokens, a byte of each number."""
    copies = 128 * 8 * (1 - 8 / devices)
    seconds = network_dispatch_s(copies, 7168, find_accelerator("H100")) / 3
    assert (13e-6 + seconds) * 1e6 == pytest.approx(microseconds, rel=0.1)


@pytest.mark.parametrize("gpu", ["H200", "GB200", "GB300"])
def test_wide_experts_exchange_their_tokens_and_not_all_tokens(gpu: str) -> None:
    """32 ranks with 64 requests each."""
    batch = StepBatch(decode_requests=2048, decode_context_tokens=2048 * 2000)

    def parts(ep: int) -> StepParts:
        device = find_accelerator(gpu)
        return Roofline(R1, device, dp=32, ep=ep, weights=Dtype.FP8, engine="sglang").parts(batch)

    wide, gathered = parts(32), parts(1)
    assert wide.wire_s < 0.5 * gathered.wire_s
    assert wide.experts_s < 15e-3


def test_wide_experts_take_what_was_measured_behind_a_dispatch() -> None:
    """Source: AIConfigurator, wideep_generation_moe table of GB200: 1,024 and 4,096 tokens."""
    assert R1.experts is not None
    kernels = kernels_of("GB200", weights=Dtype.FP8, dp=32, ep=32)
    for tokens, milliseconds in ((1024, 0.1), (4096, 0.159)):
        seconds = kernels.experts_s(R1.experts, R1.hidden, tokens)
        assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.15)
    narrow = kernels_of("GB200", weights=Dtype.FP4, dp=32, ep=32)
    fp4_s = narrow.experts_s(R1.experts, R1.hidden, 4096)
    assert fp4_s < kernels.experts_s(R1.experts, R1.hidden, 4096)


def test_each_rank_has_a_process_for_its_requests() -> None:
    batch = StepBatch(decode_requests=64, decode_context_tokens=64)
    efficiency = Efficiency(request_s=1e-3)
    ranks = Roofline(GPT_OSS, GPU, weights=Dtype.FP4, dp=8, ep=8, efficiency=efficiency)
    assert ranks.parts(batch).requests_s == pytest.approx(8e-3)


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200", "GB200"])
def test_latents_in_eight_bits_take_no_longer_than_in_sixteen(gpu: str) -> None:
    fits = kernel_fits.kernel_fits(find_accelerator(gpu).name, "vllm")
    assert fits is not None
    narrow, wide = fits.latent_decode(Dtype.FP8), fits.latent_decode(Dtype.BF16)
    assert narrow is not None
    assert wide is not None
    assert all(narrow.at(n, 8192, 128) <= wide.at(n, 8192, 128) for n in (16, 64, 256))


@pytest.mark.data
def test_the_grids_are_those_that_the_tables_give() -> None:
    folder = os.environ.get("BATON_TRACES")
    tables = Path(folder or "../shared/data") / "perf" / "aiconfigurator" / "h100_sxm"
    if not tables.is_dir():
        pytest.skip(f"there are no kernel tables in {tables}")
    pytest.importorskip("pyarrow")
    from benchmarks.kernel_fits import fit_kernels

    fits = json.loads((Path(kernel_fits.__file__).parent / "kernel_fits.json").read_text())
    assert fit_kernels(tables, "vllm_0.24.0") == fits["h100_sxm/vllm"]


@pytest.mark.parametrize("gpu", ["rtx_4090", "rtx_pro_6000", "l40s"])
def test_gpus_with_flash_attention_2_take_the_attention_of_a100(gpu: str) -> None:
    attention = Attention(heads=32, kv_heads=8, head_dim=128)
    own, a100 = kernels_of(gpu), kernels_of("A100")
    devices = find_accelerator(gpu), find_accelerator("A100")
    bytes_ratio = devices[1].memory_bytes_per_s / devices[0].memory_bytes_per_s
    pairs = zip(own.decode_curve(attention, 32), a100.decode_curve(attention, 32), strict=True)
    ratios = [mine / theirs for mine, theirs in pairs]
    assert ratios[-1] == pytest.approx(bytes_ratio, rel=0.05)
    products = Matrix(inputs=4096, outputs=14_336)
    read_s = 2 * 4096 * 14_336 / devices[0].memory_bytes_per_s
    assert read_s < own.gemm_s(products, 1) < 1.25 * read_s


@pytest.mark.parametrize("gpu", ["H100", "H200"])
@pytest.mark.parametrize("requests", [8, 24, 64, 256])
def test_experts_on_eight_devices_are_no_slower_than_on_four(gpu: str, requests: int) -> None:
    """Their width is no multiple of a block then, and tables have them with one scale only."""
    experts = find_shape("Qwen/Qwen3-235B-A22B-FP8").experts
    assert experts is not None
    four_s, eight_s = (
        kernels_of(gpu, weights=Dtype.FP8, tp=tp).experts_s(experts, 4096, requests)
        for tp in (4, 8)
    )
    assert eight_s < four_s
