"""The keys of LoRA adapters: which there are over a model, and how much room engines have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.config.language.bounds import Positive
from baton.config.language.scalars import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A LoRA adapter over a model; requests name it by its key, as they would name the model."""

    source: str
    """A hub id, or a path that every node with an engine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeAdapters:
    """Adapters that are added while the model is served, by keys that may administer."""

    max: Annotated[int, Bounds(low=0, high=1000)] = 0
    """At a time; 0: none can be added."""
    max_per_tenant: Annotated[int | None, Positive] = None
    """Of them, by the keys of one tenant; null: as many as `max`."""
    paths: tuple[str, ...] | None = None
    """Folders in which they must lie, and owners on the hub with a slash behind (`acme/`); to be
    said where `max` is above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """Room of one engine for its model's adapters, where the model has any."""

    max_batched: Annotated[int, Positive] = 4
    """Different ones that run at the same time; requests with others wait (`max_loras`)."""
    max_loaded: Annotated[int, Positive] = 16
    """In the host's memory; the longest unused goes for a new one (`max_cpu_loras`)."""
    max_rank: Annotated[int, Positive] = 16
    """The highest rank of any (`max_lora_rank`)."""
