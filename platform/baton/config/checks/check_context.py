"""Input of checks between keys: built sections by path, and their origins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from baton.config.language.build import Builder
from baton.config.language.tree import DefaultOrigin, Finding, Origin, Path
from baton.config.schema.deployment import ModelConfig, PoolConfig

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Built sections by path, and their origins."""

    builder: Builder
    model_names: tuple[str, ...]
    pool_names: tuple[str, ...]
    tenant_names: tuple[str, ...]

    def origin(self, *path: str) -> Origin:
        """Origin of a key; for an implicit key, of its nearest explicit section."""
        for depth in range(len(path), 0, -1):
            found_origin = self.builder.origins.get(
                path[:depth]
            ) or self.builder.section_origins.get(path[:depth])
            if found_origin is not None and not isinstance(found_origin, DefaultOrigin):
                return found_origin
        return DefaultOrigin()

    def is_explicit(self, *path: str) -> bool:
        """Whether a file, variable or option sets this leaf."""
        return not isinstance(self.builder.origins.get(path, DefaultOrigin()), DefaultOrigin)

    def finding(self, path: Path, message: str) -> Finding:
        """A finding at a key."""
        return Finding(self.origin(*path), path, message)

    def get(self, schema: type[_T], *path: str) -> _T | None:
        """The section at `path`; None when it has an error."""
        section = self.builder.values.get(path)
        return section if isinstance(section, schema) else None

    def models(self) -> dict[str, ModelConfig]:
        """Models without errors."""
        built = {name: self.get(ModelConfig, "models", name) for name in self.model_names}
        return {name: model for name, model in built.items() if model is not None}

    def pools(self) -> dict[str, PoolConfig]:
        """Pools without errors."""
        built = {name: self.get(PoolConfig, "pools", name) for name in self.pool_names}
        return {name: pool for name, pool in built.items() if pool is not None}
