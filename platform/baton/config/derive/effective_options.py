"""Engine options that a configuration leaves to the engine, and the origin of their values.

Values are derived only from the file and the device. An engine chooses others at its start, such as
its attention backend; `baton status --output json` shows resulting sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.config.schema.deployment import DeploymentConfig, EngineConfig, EngineKind, PoolConfig
from baton.domain.errors import UnknownAccelerator
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.engine_defaults import (
    BLOCK_SIZE_TOKENS,
    GPU_MEMORY_UTILIZATION,
    BatchDefaults,
    cpu_batch_defaults,
    gpu_batch_defaults,
)

_CHOSEN_AT_START = "chosen by the engine at its start"


class EffectiveOption(NamedTuple):
    """The value of one engine option."""

    value: object
    """None when it is unknown before the engine's start."""
    origin: str
    is_explicit: bool = False
    """Whether the configuration sets it."""


def effective_engine_options(
    config: DeploymentConfig, origins: Mapping[str, str]
) -> dict[str, dict[str, EffectiveOption]]:
    """Options of each pool with vLLM engines, by key within the pool."""
    return {
        name: dict(_pool_options(f"pools.{name}", pool, origins))
        for name, pool in config.pools.items()
        if pool.engine.kind is EngineKind.VLLM
    }


def engine_option_comments(
    options_by_pool: Mapping[str, Mapping[str, EffectiveOption]],
) -> Iterator[str]:
    """Options that the configuration does not set, as YAML comments."""
    for pool, options in options_by_pool.items():
        for key, (value, origin, is_explicit) in options.items():
            if is_explicit:
                continue
            shown = "not known" if value is None else value
            yield f"# pools.{pool}.{key}: {shown} ({origin})"


def _pool_options(
    path: str, pool: PoolConfig, origins: Mapping[str, str]
) -> Iterator[tuple[str, EffectiveOption]]:
    engine = pool.engine
    configured: dict[str, object] = {
        "engine.max_num_seqs": engine.max_num_seqs,
        "engine.max_num_batched_tokens": engine.max_num_batched_tokens,
        "engine.gpu_memory_utilization": engine.gpu_memory_utilization,
        "engine.block_size": engine.block_size_tokens,
        "engine.extra.attention_backend": engine.extra.get("attention_backend"),
    }
    defaults = _option_defaults(pool)
    for key, value in configured.items():
        if value is not None:
            yield (
                key,
                EffectiveOption(value, origins.get(f"{path}.{key}", "file"), is_explicit=True),
            )
        elif key in defaults:
            yield key, defaults[key]


def _option_defaults(pool: PoolConfig) -> dict[str, EffectiveOption]:
    engine = pool.engine
    defaults = {"engine.extra.attention_backend": EffectiveOption(None, _CHOSEN_AT_START)}
    if pool.resources.gpus:
        defaults["engine.block_size"] = EffectiveOption(
            BLOCK_SIZE_TOKENS, "vLLM's default; with some attention backends blocks are larger"
        )
        defaults["engine.gpu_memory_utilization"] = (
            EffectiveOption(GPU_MEMORY_UTILIZATION, "vLLM's default")
            if engine.kv_cache_bytes is None
            else EffectiveOption(None, "has no say beside engine.kv_cache")
        )
    else:
        defaults["engine.block_size"] = EffectiveOption(None, _CHOSEN_AT_START)
    return defaults | _batch_options(pool)


def _batch_options(pool: PoolConfig) -> dict[str, EffectiveOption]:
    defaults, device = _device_defaults(pool)
    engine = pool.engine
    if defaults is None or engine.extra.get("enable_chunked_prefill") is False:
        reason = _CHOSEN_AT_START if defaults is not None else f"{_CHOSEN_AT_START}: {device}"
        unknown = EffectiveOption(None, reason)
        return {"engine.max_num_seqs": unknown, "engine.max_num_batched_tokens": unknown}
    throughput_factor = 2 if engine.extra.get("performance_mode") == "throughput" else 1
    origin = f"vLLM's default on {device}"
    tokens = defaults.max_num_batched_tokens * throughput_factor
    requests = min(
        defaults.max_num_seqs * throughput_factor, engine.max_num_batched_tokens or tokens
    )
    return {
        "engine.max_num_seqs": EffectiveOption(requests, origin),
        "engine.max_num_batched_tokens": EffectiveOption(tokens, origin),
    }


def _device_defaults(pool: PoolConfig) -> tuple[BatchDefaults | None, str]:
    """Defaults and name of the device, or None and the reason why they are unknown."""
    if not pool.resources.gpus:
        return cpu_batch_defaults(pool.parallel.workers), "CPUs"
    accelerator_name = pool.resources.accelerator
    if accelerator_name is None:
        return None, "name resources.accelerator to know it before"
    try:
        return gpu_batch_defaults(find_accelerator(accelerator_name)), accelerator_name
    except UnknownAccelerator:
        return None, f"{accelerator_name} is not among the accelerators known here"


def batch_limits(engine: EngineConfig, defaults: BatchDefaults) -> BatchDefaults:
    """Requests and tokens of a step: configured values, else defaults."""
    tokens = engine.max_num_batched_tokens or defaults.max_num_batched_tokens
    return BatchDefaults(engine.max_num_seqs or min(defaults.max_num_seqs, tokens), tokens)
