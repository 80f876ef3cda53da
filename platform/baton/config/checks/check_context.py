"""What cross checks look at: the sections that were built, by path, and where each stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from baton.config.language.build import Builder
from baton.config.language.tree import DefaultOrigin, Finding, Origin, Path
from baton.config.schema.deployment import ModelConfig, PoolConfig

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What was built, by path, and where each thing stands."""

    builder: Builder
    model_names: tuple[str, ...]
    pool_names: tuple[str, ...]
    tenant_names: tuple[str, ...]

    def origin(self, *path: str) -> Origin:
        """The place of a key; when nobody wrote it, of the nearest section that somebody wrote."""
        for depth in range(len(path), 0, -1):
            found_origin = self.builder.origins.get(
                path[:depth]
            ) or self.builder.section_origins.get(path[:depth])
            if found_origin is not None and not isinstance(found_origin, DefaultOrigin):
                return found_origin
        return DefaultOrigin()

    def is_explicit(self, *path: str) -> bool:
        """Whether somebody wrote a leaf."""
        return not isinstance(self.builder.origins.get(path, DefaultOrigin()), DefaultOrigin)

    def finding(self, path: Path, message: str) -> Finding:
        """A finding at a key."""
        return Finding(self.origin(*path), path, message)

    def get(self, schema: type[_T], *path: str) -> _T | None:
        """The section at `path`; None when something in it is wrong."""
        section = self.builder.values.get(path)
        return section if isinstance(section, schema) else None

    def models(self) -> dict[str, ModelConfig]:
        """Those in which nothing is wrong."""
        built = {name: self.get(ModelConfig, "models", name) for name in self.model_names}
        return {name: model for name, model in built.items() if model is not None}

    def pools(self) -> dict[str, PoolConfig]:
        """Those in which nothing is wrong."""
        built = {name: self.get(PoolConfig, "pools", name) for name in self.pool_names}
        return {name: pool for name, pool in built.items() if pool is not None}
