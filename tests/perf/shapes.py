"""Models and a device for tests of the roofline; figures are public, nothing is looked up."""

from __future__ import annotations

from dataclasses import replace

from baton.perf.hardware.accelerators import Accelerator, Dtype
from baton.perf.model.layers import Experts, LatentAttention
from baton.perf.model.shape import ModelShape

H100 = Accelerator(
    name="h100",
    memory_bytes=80 * 2.0**30,
    memory_bytes_per_s=3.35e12,
    flops_by_dtype={Dtype.BF16: 989e12, Dtype.FP8: 1979e12},
    peer_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
)
LLAMA_70B = ModelShape(
    name="llama 70b",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn_width=28672,
    vocab=128256,
)
LLAMA_8B = ModelShape(
    name="llama 8b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn_width=14336,
    vocab=128256,
)
OPT_13B = ModelShape(
    name="opt 13b",
    layers=40,
    hidden=5120,
    heads=40,
    kv_heads=40,
    head_dim=128,
    ffn_width=20480,
    vocab=50272,
    gated_ffn=False,
)
MIXTRAL = replace(
    LLAMA_8B, name="mixtral", vocab=32000, experts=Experts(count=8, active=2, width=14336)
)
DEEPSEEK = ModelShape(
    name="deepseek",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=1,
    head_dim=128,
    ffn_width=18432,
    vocab=129280,
    latent=LatentAttention(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=1536),
    experts=Experts(count=256, active=8, width=2048, shared=1, dense_layers=3),
)
WINDOWED = replace(LLAMA_8B, name="windowed", vocab=32000, window_tokens=1024, windowed_layers=16)
ALL = (LLAMA_70B, LLAMA_8B, OPT_13B, MIXTRAL, DEEPSEEK, WINDOWED)
