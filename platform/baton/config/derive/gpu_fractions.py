"""Replicas that take a part of a GPU, and what each may have of its memory."""

from __future__ import annotations

from baton.config.schema.deployment import PoolConfig

_USABLE_FRACTION = 0.9
"""Of a replica's part; the rest is for what vLLM does not count: contexts, graphs, fragments."""


def shares_gpu(pool: PoolConfig) -> bool:
    """Whether a replica shares its GPU with others."""
    return 0 < pool.resources.gpus < 1


def gpu_memory_fraction(pool: PoolConfig) -> float | None:
    """The part of a GPU's memory that an engine takes; None leaves it to vLLM.

    As configured, else what the part of a GPU allows, so that replicas on one GPU fit beside each
    other.
    """
    configured = pool.engine.gpu_memory_utilization
    if configured is not None or not shares_gpu(pool):
        return configured
    return round(pool.resources.gpus * _USABLE_FRACTION, 4)
