"""How long an engine may take to start: as said, else by the bytes that it has to read."""

from __future__ import annotations

from pathlib import Path

from baton.config.schema.deployment import DeploymentConfig, EngineKind, ModelConfig, PoolConfig
from baton.domain.errors import UnknownModel
from baton.domain.names.model_sources import TINY, hub_id
from baton.perf.hardware.accelerators import BYTES, Dtype
from baton.perf.model.known_models import dtype_hint, shape_of

_LEAST_S = 600.0
"""To import vLLM, compile, measure memory and capture graphs. Source: minutes, for 70B models."""
_BYTES_PER_S = 40e6
"""What is taken for a slow way to the weights: a hub at 320 Mbit/s."""
_UNKNOWN_BYTES = 40e9
"""Of a model that is neither here nor known by name."""
_FILES = ("*.safetensors", "*.bin", "*.pt")


def start_deadline_s(pool: PoolConfig, model: ModelConfig) -> float:
    """Until an engine of a pool must be ready, in seconds."""
    if pool.engine.start_deadline_s is not None:
        return pool.engine.start_deadline_s
    if pool.engine.kind is EngineKind.SIM:
        return _LEAST_S
    known_bytes = weights_bytes(model.source)
    return _LEAST_S + (_UNKNOWN_BYTES if known_bytes is None else known_bytes) / _BYTES_PER_S


def deployment_deadline_s(config: DeploymentConfig) -> float:
    """Until all that a deployment starts with must be ready: as its slowest engine."""
    each = [start_deadline_s(pool, config.models[pool.model]) for pool in config.pools.values()]
    return max(_LEAST_S, *each)


def weights_bytes(source: str) -> float | None:
    """Size of a model's weights: of its files where they are here, else of its published shape.

    None where nobody knows.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        found = (file for pattern in _FILES for file in folder.glob(pattern))
        return float(sum(file.stat().st_size for file in found))
    if source == TINY:
        return 0.0
    try:
        source = hub_id(source)
        return shape_of(source).parameters * BYTES[dtype_hint(source) or Dtype.BF16]
    except UnknownModel:
        return None
