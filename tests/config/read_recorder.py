"""A configuration that notes which of its keys are read, by whoever is given it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from baton.config import DeploymentConfig
from baton.config.language.fields import (
    EnvVariables,
    Field,
    NamedSections,
    NestedSection,
    NodeLabels,
    RawMapping,
    fields_of,
)
from baton.config.language.tree import Path

_DATACLASS_FILES = frozenset({"<string>", dataclasses.__file__})
"""Where code lies that dataclasses make: whoever compares or copies a section reads nothing."""


class ReadKeys(set[Path]):
    """The keys that were read, as they stand in a file."""


class _RecordingMapping(Mapping[str, object]):
    """What is given by names, of which those are read that are asked for; all by who lists them."""

    def __init__(
        self, keys: Mapping[str, Path], values: Mapping[str, object], reads: ReadKeys
    ) -> None:
        self._keys, self._values, self._reads = keys, values, reads

    def __getitem__(self, name: str) -> object:
        value = self._values[name]
        self._reads.add(self._keys[name])
        return value

    def __contains__(self, name: object) -> bool:
        if name in self._values:
            self._reads.add(self._keys[str(name)])
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        self._reads.update(self._keys.values())
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def record_reads(config: DeploymentConfig) -> tuple[DeploymentConfig, ReadKeys]:
    """The same configuration, and what is read of it from now on."""
    reads = ReadKeys()
    recording = _recording_section(config, (), reads)
    assert isinstance(recording, DeploymentConfig)
    return recording, reads


def _recording_section(section: object, path: Path, reads: ReadKeys) -> object:
    kind = type(section)
    recording_class = _recording_class(kind, path, reads)
    copy = object.__new__(recording_class)
    for key, field in fields_of(kind).items():
        value = getattr(section, field.attribute)
        object.__setattr__(
            copy, field.attribute, _recording_value(field, value, (*path, key), reads)
        )
    return copy


def _recording_value(field: Field, value: object, path: Path, reads: ReadKeys) -> object:
    match field.kind, value:
        case NestedSection(), None:
            return value
        case NestedSection(), _:
            return _recording_section(value, path, reads)
        case NamedSections(), Mapping():
            return {
                name: _recording_section(other, (*path, name), reads)
                for name, other in value.items()
            }
        case _:
            return value


def _recording_class(kind: type, path: Path, reads: ReadKeys) -> Any:  # noqa: ANN401 - a class made here
    """A section of this kind that notes what is read of it; its copies do so, too."""
    fields_by_attribute = {field.attribute: (key, field) for key, field in fields_of(kind).items()}

    def read(self: object, name: str) -> object:
        value = object.__getattribute__(self, name)
        key_and_field = fields_by_attribute.get(name)
        if (
            key_and_field is not None
            and sys._getframe(1).f_code.co_filename not in _DATACLASS_FILES
        ):
            key, field = key_and_field
            match field.kind, value:
                case ((NestedSection() | NamedSections()), _) if value is not None:
                    pass
                case ((RawMapping() | EnvVariables() | NodeLabels()), Mapping()):
                    return _RecordingMapping(
                        {name: (*path, key, name) for name in value}, value, reads
                    )
                case _:
                    reads.add((*path, key))
        return value

    return type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": read})
