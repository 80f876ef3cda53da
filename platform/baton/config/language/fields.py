"""Keys of a section, from its dataclass: name, type, bounds and default of each field.

Theory of operation: the schema is plain frozen dataclasses. The suffix of an attribute with a unit
(`deadline_s`, `max_body_bytes`) is not part of its key; the value has a unit instead (`deadline:
2s`, `max_body: 4MiB`). `Annotated` markers add other facts.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from enum import StrEnum

from baton.config.language.scalars import (
    Boolean,
    Bounds,
    Choice,
    Condition,
    Float,
    Integer,
    ListOf,
    Pluggable,
    Quantity,
    ScalarType,
    Text,
)
from baton.config.language.tree import Path
from baton.config.language.units import Unit


@dataclass(frozen=True, slots=True)
class Key:
    """Marker: the key in the file, if it is not the attribute's name."""

    name: str


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Marker: pattern of a mapping's keys."""

    pattern: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    """Reference to a secret: either an environment variable or a file, read at use."""

    env: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        if (self.env is None) == (self.file is None):
            raise ValueError("expected exactly one of 'env' and 'file'")


@dataclass(frozen=True, slots=True)
class NestedSection:
    """One section."""

    schema: type


@dataclass(frozen=True, slots=True)
class NamedSections:
    """Sections under names of the user's choice."""

    schema: type
    names: NamePattern


@dataclass(frozen=True, slots=True)
class RawMapping:
    """A mapping that is passed on without checks."""

    names: NamePattern


@dataclass(frozen=True, slots=True)
class EnvVariables:
    """Environment variables: text, or a `SecretRef`."""

    names: NamePattern


@dataclass(frozen=True, slots=True)
class NodeLabels:
    """Selectors of node labels, by label."""

    names: NamePattern


Free = RawMapping | EnvVariables | NodeLabels
"""A mapping from names of the user's choice to values."""
Mapped = NestedSection | NamedSections | Free
"""Types that are mappings in the file."""
FieldType = ScalarType | Mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of a section."""

    attribute: str
    key: str
    kind: FieldType
    optional: bool
    """Whether `null` is valid."""
    required: bool
    default: object
    """Of optional leaves; sections are built from an empty mapping instead."""


NOT_YET = "NOT_YET"
"""Name of a class attribute: a section's planned keys, each with its replacement until then."""


MAIN_KEY = "MAIN_KEY"
"""Name of a class attribute: the key that a value in place of the section most likely means."""


def fields_of(schema: type) -> Mapping[str, Field]:
    """The keys of a section, in the order of the dataclass."""
    return _fields_of(schema)


@functools.cache  # private, because mypy does not accept `type(value)` as an argument of a cache
def _fields_of(schema: type) -> Mapping[str, Field]:
    hints = typing.get_type_hints(schema, include_extras=True)
    fields = [_field(field, hints[field.name]) for field in dataclasses.fields(schema)]
    return types.MappingProxyType({field.key: field for field in fields})


def each(section: object, at: Path = ()) -> Iterator[tuple[Path, Field, object]]:
    """Each key of a section and its nested sections, as path, field and value.

    In a mapping to values each name is a key. Empty mappings and absent sections have none.
    """
    for key, field in fields_of(type(section)).items():
        path, value = (*at, key), getattr(section, field.attribute)
        match field.kind, value:
            case NestedSection(), None:
                pass
            case NestedSection(), _:
                yield from each(value, path)
            case NamedSections(), Mapping():
                for name, inner in value.items():
                    yield from each(inner, (*path, name))
            case ((RawMapping() | EnvVariables() | NodeLabels()), Mapping()):
                for name, inner in value.items():
                    yield (*path, name), field, inner
            case _:
                yield path, field, value


def main_field(schema: type) -> Field | None:
    """The field that a value in place of the section most likely means."""
    key: str | None = getattr(schema, MAIN_KEY, None)
    return None if key is None else fields_of(schema)[key]


def planned_keys(schema: type) -> Mapping[str, str]:
    """The section's planned keys, each with its replacement until then."""
    planned: Mapping[str, str] = getattr(schema, NOT_YET, {})
    return planned


def _field(field: dataclasses.Field[object], hint: object) -> Field:
    markers: tuple[object, ...] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *annotations = typing.get_args(hint)
        markers = tuple(annotations)
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in hint.__args__ if part is not types.NoneType)
        optional = True
    unit = _unit(field.name)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return Field(
        attribute=field.name,
        key=_marker(markers, Key(_without_unit(field.name, unit))).name,
        kind=_kind(hint, markers, unit),
        optional=optional,
        required=default is MISSING,
        default=None if default is MISSING else default,
    )


def _unit(attribute: str) -> Unit | None:
    if attribute.endswith("_bytes_per_s"):
        return Unit.BYTES_PER_SECOND
    if attribute.endswith("_per_s"):
        return Unit.PER_SECOND
    if attribute.endswith("_s"):
        return Unit.SECONDS
    return Unit.BYTES if attribute.endswith("_bytes") else None


def _without_unit(attribute: str, unit: Unit | None) -> str:
    return attribute if unit is None else attribute.rpartition("_")[0]


def _kind(hint: object, markers: tuple[object, ...], unit: Unit | None) -> FieldType:
    bounds = _marker(markers, Bounds())
    names = _marker(markers, NamePattern(r"[\s\S]+", "a name"))
    arguments = typing.get_args(hint)
    for marker in markers:
        if isinstance(marker, Pluggable | Condition):
            return marker
    if typing.get_origin(hint) is tuple:
        return ListOf(Text() if arguments[0] is str else _choice(arguments[0]))
    if typing.get_origin(hint) is Mapping:
        return _mapping(arguments[1], names)
    if hint in {int, float} and unit is not None:
        return Quantity(unit, bounds, is_integer=hint is int)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return NestedSection(hint)
    scalars: dict[object, FieldType] = {
        str: Text(),
        bool: Boolean(),
        int: Integer(bounds),
        float: Float(bounds),
    }
    return scalars.get(hint) or _choice(hint)


def _mapping(hint: object, names: NamePattern) -> FieldType:
    if hint is object:
        return RawMapping(names)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return NamedSections(hint, names)
    return NodeLabels(names) if hint is str else EnvVariables(names)


def _choice(hint: object) -> Choice:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Choice(hint)
    raise TypeError(f"the schema has a field of type {hint}, which no kind of value stands for")


_Marker = typing.TypeVar("_Marker", Key, Bounds, NamePattern)


def _marker(markers: tuple[object, ...], default: _Marker) -> _Marker:
    return next((marker for marker in markers if isinstance(marker, type(default))), default)
