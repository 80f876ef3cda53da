"""Efficiency of kernels, and curves for those that were not measured.

The curves depend only on a device's rated bandwidth and operations per second. They serve devices
without tables, and scale the tables of a GPU's relative.

Source: fits to kernel times under vLLM on A100 and H100, from the kernel tables of NVIDIA
AIConfigurator (Apache-2.0, vllm 0.14.0 and 0.24.0), which `bench/accuracy/kernel_tables.py` reads.
H200 took no part in the fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.perf.hardware.accelerators import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Time of one matrix product (m x k) by (k x n).

        launch + depth * k + activations' bytes / (bandwidth * io) + m * k * quantising / rate
            + p-norm(operations / (rate * compute), weights' bytes / (bandwidth * memory))

    The p-norm rounds the roofline's knee. `depth` is the walk along k that no width can shorten.
    """

    launch_s: float
    depth_s: float
    compute_fraction: float
    """Share of the rated operations per second that large products reach."""
    memory_fraction: float
    """Share of the rated bandwidth that narrow products reach."""
    norm_exponent: float
    """The p of the norm; infinity gives a sharp corner."""
    io_fraction: float
    """Share of the bandwidth at which activations are read, written and quantised."""
    activation_bytes: float
    """Moved per element of the input."""
    quantization_ops: float = 0.0
    """Operations per input element for its scale and division, beside moving its bytes."""


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
weights and more, 1 to 16,384 rows. `io_fraction` exceeds 1 because inputs partly stay in the
device's cache."""

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
"""Includes quantisation of the input (read 2 bytes, write and read 1 each). Fitted to H100 alone:
mean error 11 %, bias -2 %; on H200 13 % and -6 %. Moving the bytes takes at most the time at 0.8 of
the bandwidth (`Efficiency.elementwise`); the rest of quantisation is arithmetic. Evidence: charged
to bandwidth alone, products of 8,192 rows would be 13 % faster on H200; measured are 5 %."""


def gemm_curve(dtype: Dtype) -> GemmCurve:
    """The curve of products with inputs of this type."""
    match dtype:
        case Dtype.FP32 | Dtype.BF16 | Dtype.FP16:
            return BF16_GEMM
        case Dtype.FP8 | Dtype.INT8 | Dtype.FP4 | Dtype.INT4:
            return FP8_GEMM


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Costs of a step that data sheets do not contain; calibration scales the first eight.

    Kernels take what was measured: the fit below moves their factors by less than 5 %. Costs of the
    host are vLLM's, which prepares a step while the last one computes. Source: fit to the rows of
    three engines on H100 among the measurements that AIConfigurator collects (Llama-3.1 8B and 70B,
    Qwen3 32B and 235B, gpt-oss-120b, MiniMax-M2.5), together.
    """

    gemm: float = 1.0
    """Factor on measured seconds of products."""
    gemm_narrow: float = 1.0
    """The same, for inputs narrower than 16 bits."""
    experts: float = 1.0
    """The same, of experts' grouped products."""
    attention: float = 1.0
    communication: float = 1.0
    """On the bytes of all-reduces, not their launches."""
    step_s: float = 0.7e-3
    """Fixed cost per step: scheduling, preparing inputs, launching, sampling."""
    request_s: float = 15.0e-6
    """Per request in the step: its sampler, output and block table."""
    prefill_layer_s: float = 140e-6
    """Per layer of a step that prefills: it is launched kernel by kernel, not as a graph."""
    layer_s: float = 6.0e-6
    """Per layer: small kernels (two norms, rotation, activation) in a graph, 1.5 us each. Source:
    latency of small kernels in the tables above (all-reduce of 128 bytes: 4 us)."""
    elementwise: float = 0.8
    """Share of the bandwidth that those kernels reach on many tokens. Source: AIConfigurator's
    systems/*.yaml, mem_bw_empirical_scaling_factor."""
    prefill_attention: float = 0.66
    """Share of the rated operations per second at 16,384 tokens; `prefill_extra_pairs` describes
    the approach to it. Source: tables above; A100 0.60, H100 and H200 0.70."""
    prefill_extra_pairs: float = 500.0
    """Per computed token, in addition to its pairs: tiles on the diagonal, loading queries, writing
    the cache. Source: tables above; A100 457, H100 528 (32 heads, 1k to 8k tokens)."""
    prefill_extra_pairs_fp8: float = 850.0
    """The same with an FP8 cache."""
    attention_launch_s: float = 11.5e-6
    """Per layer that attends. Source: tables above; 11.4 to 13 us on A100, H100 and H200."""
    attention_pair_s: float = 25e-9
    """Per layer, decoding request and key head on the device. Source: tables above; 38 us for 128
    requests of 2 tokens with 8 key heads."""
    decode_memory: float = 0.95
    """Share of the bandwidth at which keys and values are read. Source: tables above."""
    decode_compute: float = 0.43
    """Share of the rated operations per second of decode attention. Its tiles hold 64 queries of
    one key head, mostly unused. Source: tables above; the limit of FP8 caches on H200."""
    first_token_s: float = 13e-3
    """From an engine's first token to its client, outside all steps; later tokens come as much
    later. A calibration fits it anew."""
    decode_tile: int = 64
    """Source: FlashAttention-3 (2407.08608) §3: a warpgroup's matrix instruction takes 64 rows."""


DEFAULT_EFFICIENCY = Efficiency()


def engine_efficiency(engine: str) -> Efficiency:
    """The efficiency of an engine's kernels without measurements.

    TensorRT-LLM decodes with XQA kernels, whose tiles hold exactly the queries that share a key
    head: bytes limit these. Source: TensorRT-LLM, gpt-attention "XQA Optimization" and
    blogs/XQA-kernel.
    """
    return replace(DEFAULT_EFFICIENCY, decode_tile=1) if engine == "trtllm" else DEFAULT_EFFICIENCY
