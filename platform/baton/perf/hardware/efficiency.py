"""How much of a data sheet's figures kernels reach: one set of curves for all accelerators.

The forms and constants are fits to kernel times under vLLM on A100 and H100 (Source: kernel tables
of NVIDIA AIConfigurator, Apache-2.0, vllm 0.14.0 and 0.24.0); `bench.kernel_tables` reads such
tables, and the errors on H200's, which took no part in the fits, are in the notes on fidelity.
Nothing here depends on which device it is: only on its rated bandwidth and operations per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.perf.hardware.accelerators import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """The time of one matrix product (m x k) by (k x n).

    launch + depth * k + activations' bytes / (bandwidth * io) + m * k * quantising / rate
        + p-norm(operations / (rate * compute), weights' bytes / (bandwidth * memory))

    The p-norm rounds the roofline's knee; `depth` is the walk along k that no width can shorten.
    """

    launch_s: float
    depth_s: float
    compute_fraction: float
    """Share of the rated operations per second that large products reach."""
    memory_fraction: float
    """Share of the rated bandwidth that narrow products reach."""
    norm_exponent: float
    """The p of the norm: infinite would be a sharp corner."""
    io_fraction: float
    """Share of the bandwidth at which activations are read, written and, if need be, quantised."""
    activation_bytes: float
    """Moved per element of the input."""
    quantization_ops: float = 0.0
    """Of the rated operations, what finding a scale for one element of the input and dividing by
    it keeps the device from, beside moving its bytes."""


BF16_GEMM = GemmCurve(
    launch_s=3.9e-6,
    depth_s=0.19e-9,
    compute_fraction=0.87,
    memory_fraction=0.82,
    norm_exponent=1.53,
    io_fraction=1.9,
    activation_bytes=2.0,
)
"""Mean error 11 % on A100 and H100 (bias -8 % and +8 %), 10 % on H200, for products of 2 million
weights and more, 1 to 16,384 rows. `io_fraction` above 1: inputs partly stay in the cache of the
device."""

FP8_GEMM = GemmCurve(
    launch_s=5.1e-6,
    depth_s=0.47e-9,
    compute_fraction=0.73,
    memory_fraction=0.95,
    norm_exponent=1.33,
    io_fraction=0.8,
    activation_bytes=4.0,
    quantization_ops=3030.0,
)
"""With the quantisation of the input (read 2 bytes, write and read 1 each). Fitted to H100 alone:
mean error 11 %, bias -2 %; on H200 13 % and -6 %. Nothing of quantising can take longer for want of
bandwidth than moving its bytes at the share that other element-wise kernels reach (`Efficiency`,
0.8): what takes longer is the arithmetic's. Two devices that differ in bandwidth only bear it out:
charged to bandwidth alone, products of 8,192 rows would be 13 % faster on H200; they are 5 %."""


def gemm_curve(dtype: Dtype) -> GemmCurve:
    """The curve of products whose inputs are of this type."""
    match dtype:
        case Dtype.FP32 | Dtype.BF16 | Dtype.FP16:
            return BF16_GEMM
        case Dtype.FP8 | Dtype.INT8 | Dtype.FP4 | Dtype.INT4:
            return FP8_GEMM


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What a step costs beside the data sheet; calibration scales the first six.

    Those are vLLM's of 2025, with asynchronous scheduling. Source: fit to its rows on H100 among
    the measurements that AIConfigurator collects (InferenceX, Llama-3.1-70B in FP8).
    """

    gemm: float = 0.97
    """Factors on the seconds that the curves say."""
    gemm_narrow: float = 0.97
    """Of products whose inputs are narrower than 16 bits: other kernels, and another curve."""
    attention: float = 1.11
    communication: float = 0.72
    """On the bytes of all-reduces, not on their launches: vLLM fuses large ones with norms."""
    step_s: float = 1.05e-3
    """Per step, whatever is in it: scheduling, preparing inputs, launching, sampling."""
    request_s: float = 5.0e-6
    """Per request in the step: its sampler, its output, its block table."""
    layer_s: float = 6.0e-6
    """Per layer: the small kernels (two norms, rotation, activation) as a graph runs them, 1.5 us
    each. Source: latency of small kernels in the tables above (all-reduce of 128 bytes: 4 us)."""
    elementwise: float = 0.8
    """Share of the bandwidth that those kernels reach on many tokens.
    Source: AIConfigurator's systems/*.yaml, mem_bw_empirical_scaling_factor."""
    prefill_attention: float = 0.66
    """Share of the rated operations per second. Source: tables above; A100 0.60, H100 and H200 0.70
    at 16,384 tokens, which shorter prompts near as `prefill_extra_pairs` says."""
    prefill_extra_pairs: float = 500.0
    """Per token computed, on top of the pairs that count: tiles on the diagonal, loading queries,
    writing the cache. Source: tables above; A100 457, H100 528 (32 heads, 1k to 8k tokens)."""
    prefill_extra_pairs_fp8: float = 850.0
    """The same, writing and reading an FP8 cache."""
    attention_launch_s: float = 11.5e-6
    """Per layer that attends. Source: tables above; 11.4 to 13 us on A100, H100 and H200."""
    attention_pair_s: float = 25e-9
    """Per layer, decoding request and key head on the device. Source: tables above; 38 us for 128
    requests of 2 tokens with 8 key heads."""
    decode_memory: float = 0.95
    """Share of the bandwidth at which keys and values are read. Source: tables above."""
    decode_compute: float = 0.43
    """Share of the rated operations per second of decode attention, whose tiles hold 64 queries of
    one key head though there are few. Source: tables above; what FP8 caches run into on H200."""
    decode_tile: int = 64
    """Source: FlashAttention-3 (2407.08608) §3: a warpgroup's matrix instruction takes 64 rows."""


DEFAULT_EFFICIENCY = Efficiency()


def engine_efficiency(engine: str) -> Efficiency:
    """What is known of an engine's kernels without any measurement of it.

    TensorRT-LLM decodes with XQA kernels, whose tiles hold as many queries as share a key head:
    bytes bound them. Source: TensorRT-LLM, gpt-attention "XQA Optimization" and blogs/XQA-kernel.
    """
    return replace(DEFAULT_EFFICIENCY, decode_tile=1) if engine == "trtllm" else DEFAULT_EFFICIENCY
