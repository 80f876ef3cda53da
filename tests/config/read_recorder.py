"""A configuration that notes which of its keys are read, by whoever is given it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from baton.config import DeploymentConfig
from baton.config.language.fields import (
    Anything,
    Environment,
    Field,
    Labels,
    Named,
    Nested,
    fields_of,
)
from baton.config.language.tree import Path

_COMPARES = frozenset({"<string>", dataclasses.__file__})
"""Where code lies that dataclasses make: whoever compares or copies a section reads nothing."""


class Reads(set[Path]):
    """The keys that were read, as they stand in a file."""


class _Named(Mapping[str, object]):
    """What is given by names, of which those are read that are asked for; all by who lists them."""

    def __init__(self, keys: Mapping[str, Path], said: Mapping[str, object], reads: Reads) -> None:
        self._keys, self._said, self._reads = keys, said, reads

    def __getitem__(self, name: str) -> object:
        value = self._said[name]
        self._reads.add(self._keys[name])
        return value

    def __contains__(self, name: object) -> bool:
        if name in self._said:
            self._reads.add(self._keys[str(name)])
        return name in self._said

    def __iter__(self) -> Iterator[str]:
        self._reads.update(self._keys.values())
        return iter(self._said)

    def __len__(self) -> int:
        return len(self._said)


def recorded(config: DeploymentConfig) -> tuple[DeploymentConfig, Reads]:
    """The same configuration, and what is read of it from now on."""
    reads = Reads()
    made = _section(config, (), reads)
    assert isinstance(made, DeploymentConfig)
    return made, reads


def _section(section: object, at: Path, reads: Reads) -> object:
    kind = type(section)
    own = _watching(kind, at, reads)
    made = object.__new__(own)
    for key, field in fields_of(kind).items():
        value = getattr(section, field.attribute)
        object.__setattr__(made, field.attribute, _value(field, value, (*at, key), reads))
    return made


def _value(field: Field, value: object, at: Path, reads: Reads) -> object:
    match field.kind, value:
        case Nested(), None:
            return value
        case Nested(), _:
            return _section(value, at, reads)
        case Named(), Mapping():
            return {name: _section(one, (*at, name), reads) for name, one in value.items()}
        case _:
            return value


def _watching(kind: type, at: Path, reads: Reads) -> Any:  # noqa: ANN401 - a class made here
    """A section of this kind that notes what is read of it; its copies do so, too."""
    of_attribute = {field.attribute: (key, field) for key, field in fields_of(kind).items()}

    def read(self: object, name: str) -> object:
        value = object.__getattribute__(self, name)
        found = of_attribute.get(name)
        if found is not None and sys._getframe(1).f_code.co_filename not in _COMPARES:
            key, field = found
            match field.kind, value:
                case ((Nested() | Named()), _) if value is not None:
                    pass
                case ((Anything() | Environment() | Labels()), Mapping()):
                    return _Named({name: (*at, key, name) for name in value}, value, reads)
                case _:
                    reads.add((*at, key))
        return value

    return type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": read})
