"""What cross checks look at: the sections that were built, by path, and where each stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from baton.config.language.build import Builder
from baton.config.language.tree import DefaultOrigin, Finding, Origin, Path
from baton.config.schema.deployment import ModelConfig, PoolConfig

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Seen:
    """What was built, by path, and where each thing stands."""

    builder: Builder
    model_names: tuple[str, ...]
    pool_names: tuple[str, ...]
    tenant_names: tuple[str, ...]

    def at(self, *path: str) -> Origin:
        """The place of a key; when nobody wrote it, of the nearest section that somebody wrote."""
        for depth in range(len(path), 0, -1):
            place = self.builder.origins.get(path[:depth]) or self.builder.sections.get(
                path[:depth]
            )
            if place is not None and not isinstance(place, DefaultOrigin):
                return place
        return DefaultOrigin()

    def said(self, *path: str) -> bool:
        """Whether somebody wrote a leaf."""
        return not isinstance(self.builder.origins.get(path, DefaultOrigin()), DefaultOrigin)

    def wrong(self, path: Path, what: str) -> Finding:
        """A finding at a key."""
        return Finding(self.at(*path), path, what)

    def get(self, schema: type[_T], *path: str) -> _T | None:
        """The section at `path`; None when something in it is wrong."""
        made = self.builder.built.get(path)
        return made if isinstance(made, schema) else None

    def models(self) -> dict[str, ModelConfig]:
        """Those in which nothing is wrong."""
        made = {name: self.get(ModelConfig, "models", name) for name in self.model_names}
        return {name: model for name, model in made.items() if model is not None}

    def pools(self) -> dict[str, PoolConfig]:
        """Those in which nothing is wrong."""
        made = {name: self.get(PoolConfig, "pools", name) for name in self.pool_names}
        return {name: pool for name, pool in made.items() if pool is not None}
