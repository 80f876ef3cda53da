"""Start deadlines of engines: configured, or from the bytes to read."""

from __future__ import annotations

from pathlib import Path

from baton.config.schema.deployment import DeploymentConfig, EngineKind, ModelConfig, PoolConfig
from baton.domain.errors import UnknownModel
from baton.domain.names.model_sources import TINY, hub_id
from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype
from baton.perf.model.known_models import dtype_hint, find_shape

_MIN_DEADLINE_S = 600.0
"""To import vLLM, compile, measure memory and capture graphs. Source: minutes, for 70B models."""
_DOWNLOAD_BYTES_PER_S = 40e6
"""A slow download: a hub at 320 Mbit/s."""
_DEFAULT_WEIGHTS_BYTES = 40e9
"""Of a model that is neither local nor known by name."""
_WEIGHT_FILE_PATTERNS = ("*.safetensors", "*.bin", "*.pt")


def start_deadline_s(pool: PoolConfig, model: ModelConfig) -> float:
    """Seconds until an engine of a pool must be ready."""
    if pool.engine.start_deadline_s is not None:
        return pool.engine.start_deadline_s
    if pool.engine.kind is EngineKind.SIM:
        return _MIN_DEADLINE_S
    known_bytes = weights_bytes(model.source)
    return (
        _MIN_DEADLINE_S
        + (_DEFAULT_WEIGHTS_BYTES if known_bytes is None else known_bytes) / _DOWNLOAD_BYTES_PER_S
    )


def deployment_deadline_s(config: DeploymentConfig) -> float:
    """Seconds until the initial replicas must be ready, as for the slowest engine."""
    deadlines_s = [
        start_deadline_s(pool, config.models[pool.model]) for pool in config.pools.values()
    ]
    return max(_MIN_DEADLINE_S, *deadlines_s)


def weights_bytes(source: str) -> float | None:
    """Bytes of a model's weights: of local files, else from its published shape; None: unknown."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        files = (file for pattern in _WEIGHT_FILE_PATTERNS for file in folder.glob(pattern))
        return float(sum(file.stat().st_size for file in files))
    if source == TINY:
        return 0.0
    try:
        source = hub_id(source)
        return find_shape(source).parameters * DTYPE_BYTES[dtype_hint(source) or Dtype.BF16]
    except UnknownModel:
        return None
