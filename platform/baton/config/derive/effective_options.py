"""What engines take where a configuration says nothing, and how that is known.

Only what follows from file and device is said. What an engine finds out for itself, such as its
attention backend, it chooses at its start; a running deployment's `baton status --output json` has
the sizes that came of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.config.schema.deployment import DeploymentConfig, EngineConfig, EngineKind, PoolConfig
from baton.domain.errors import UnknownAccelerator
from baton.perf.hardware.catalogue import accelerator
from baton.perf.model.engine_defaults import (
    BLOCK_TOKENS,
    MEMORY_SHARE,
    BatchDefaults,
    batch_defaults,
    batch_defaults_on_cpus,
)

_AT_START = "chosen by the engine at its start"


class Taken(NamedTuple):
    """What an engine takes for one option."""

    value: object
    """None where it is not known before its start."""
    origin: str
    said: bool = False
    """Whether the configuration says it."""


def taken_by_engines(
    config: DeploymentConfig, origins: Mapping[str, str]
) -> dict[str, dict[str, Taken]]:
    """For each pool of vLLM engines, by the option's key within the pool."""
    return {
        name: dict(_of_pool(f"pools.{name}", pool, origins))
        for name, pool in config.pools.items()
        if pool.engine.kind is EngineKind.VLLM
    }


def taken_lines(taken: Mapping[str, Mapping[str, Taken]]) -> Iterator[str]:
    """For a person: what each pool's engines take where the file is silent, as comments."""
    for pool, options in taken.items():
        for key, (value, origin, said) in options.items():
            if said:
                continue
            shown = "not known" if value is None else value
            yield f"# pools.{pool}.{key}: {shown} ({origin})"


def _of_pool(
    path: str, pool: PoolConfig, origins: Mapping[str, str]
) -> Iterator[tuple[str, Taken]]:
    engine = pool.engine
    said: dict[str, object] = {
        "engine.max_num_seqs": engine.max_num_seqs,
        "engine.max_num_batched_tokens": engine.max_num_batched_tokens,
        "engine.gpu_memory_utilization": engine.gpu_memory_utilization,
        "engine.block_size": engine.block_size_tokens,
        "engine.extra.attention_backend": engine.extra.get("attention_backend"),
    }
    silent = _where_silent(pool)
    for key, value in said.items():
        if value is not None:
            yield key, Taken(value, origins.get(f"{path}.{key}", "file"), said=True)
        elif key in silent:
            yield key, silent[key]


def _where_silent(pool: PoolConfig) -> dict[str, Taken]:
    engine = pool.engine
    found = {"engine.extra.attention_backend": Taken(None, _AT_START)}
    if pool.resources.gpus:
        found["engine.block_size"] = Taken(
            BLOCK_TOKENS, "vLLM's default; with some attention backends blocks are larger"
        )
        found["engine.gpu_memory_utilization"] = (
            Taken(MEMORY_SHARE, "vLLM's default")
            if engine.kv_cache_bytes is None
            else Taken(None, "has no say beside engine.kv_cache")
        )
    else:
        found["engine.block_size"] = Taken(None, _AT_START)
    return found | _batch(pool)


def _batch(pool: PoolConfig) -> dict[str, Taken]:
    defaults, device = _device_defaults(pool)
    engine = pool.engine
    if defaults is None or engine.extra.get("enable_chunked_prefill") is False:
        why = _AT_START if defaults is not None else f"{_AT_START}: {device}"
        unknown = Taken(None, why)
        return {"engine.max_num_seqs": unknown, "engine.max_num_batched_tokens": unknown}
    twice = 2 if engine.extra.get("performance_mode") == "throughput" else 1
    origin = f"vLLM's default on {device}"
    tokens = defaults.tokens * twice
    requests = min(defaults.requests * twice, engine.max_num_batched_tokens or tokens)
    return {
        "engine.max_num_seqs": Taken(requests, origin),
        "engine.max_num_batched_tokens": Taken(tokens, origin),
    }


def _device_defaults(pool: PoolConfig) -> tuple[BatchDefaults | None, str]:
    """What the device makes of it, and which one that is; or what is missing to know it."""
    if not pool.resources.gpus:
        return batch_defaults_on_cpus(pool.parallel.workers), "CPUs"
    named = pool.resources.accelerator
    if named is None:
        return None, "name resources.accelerator to know it before"
    try:
        return batch_defaults(accelerator(named)), named
    except UnknownAccelerator:
        return None, f"{named} is not among the accelerators known here"


def batch_limits(engine: EngineConfig, defaults: BatchDefaults) -> BatchDefaults:
    """Requests that run at a time and tokens of a step, where nothing is said as by default."""
    tokens = engine.max_num_batched_tokens or defaults.tokens
    return BatchDefaults(engine.max_num_seqs or min(defaults.requests, tokens), tokens)
