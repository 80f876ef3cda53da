"""Keys of LoRA adapters: the adapters of a model, and the slots of engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.config.language.bounds import Positive
from baton.config.language.scalars import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A LoRA adapter of a model; requests name its key as their `model`."""

    source: str
    """A hub id, or a path that exists on every node with an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeAdapters:
    """Adapters that administrator keys add while the model is served."""

    max: Annotated[int, Bounds(low=0, high=1000)] = 0
    """Number of them at a time; 0: none can be added."""
    max_per_tenant: Annotated[int | None, Positive] = None
    """Number of them that the keys of one tenant may add; null: `max`."""
    paths: tuple[str, ...] | None = None
    """Allowed folders, and allowed owners on the hub with a trailing slash (`acme/`). Required when
    `max` is above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """Slots of one engine for its model's adapters, when the model has any."""

    max_batched: Annotated[int, Positive] = 4
    """Different adapters that run at the same time; requests with further adapters wait
    (`max_loras`)."""
    max_loaded: Annotated[int, Positive] = 16
    """Adapters in host memory; the least recently used is replaced (`max_cpu_loras`)."""
    max_rank: Annotated[int, Positive] = 16
    """The highest rank of an adapter (`max_lora_rank`)."""
