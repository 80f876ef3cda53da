"""Values as text that does not change with their names: what recorded behaviour is compared by.

Every struct, tuple and enumeration is written with the names that it had when the digests were
made; `names.OLD_NAMES` has those that are called otherwise now. Left out is what is written for
people alone (`WORDS`). Numbers have twelve digits: libraries of other machines differ in the last.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum

import msgspec

from tests.recorded.names import OLD_NAMES

WORDS = frozenset(
    {"RequestRecord.reason", "RequestRecord.resume_reasons", "ScalingDecision.clipped_by"}
    | {"Tick.held", "why"}
)
"""Fields (by their old names, of one class or of all) that say in words what values say, too."""
_SHOWN_NUMBERS = 8
"""More numbers than these, such as the tokens of a prompt, are written as a digest."""


def canonical(value: object) -> str:  # noqa: C901, PLR0911 - a table of kinds
    """The value as text.

    Raises:
        TypeError: it is of a kind that has no such text.
    """
    match value:
        case Enum():
            return f"{_name(type(value).__name__)}.{_name(f'{type(value).__name__}.{value.name}')}"
        case float():
            return f"{value:.12g}"
        case None | bool() | int() | str():
            return repr(value)
        case bytes():
            return f"bytes:{_digest(value)}" if len(value) > _SHOWN_NUMBERS else repr(value)
        case BaseException():
            return _fields(type(value).__name__, _told(value))
        case msgspec.Struct():
            names = value.__struct_fields__
            return _fields(type(value).__name__, {name: getattr(value, name) for name in names})
        case tuple() if (own := getattr(value, "_fields", None)) is not None:
            return _fields(type(value).__name__, dict(zip(own, value, strict=True)))
        case Mapping():
            items = sorted((canonical(key), canonical(item)) for key, item in value.items())
            return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
        case AbstractSet():
            return "{" + ", ".join(sorted(map(canonical, value))) + "}"
    if dataclasses.is_dataclass(value):
        shown = (field.name for field in dataclasses.fields(value))
        return _fields(type(value).__name__, {name: getattr(value, name) for name in shown})
    if isinstance(value, Iterable):
        return _several(list(value))
    raise TypeError(f"a {type(value).__name__} has no canonical text; add its kind here")


def _several(values: list[object]) -> str:
    if len(values) > _SHOWN_NUMBERS and all(isinstance(value, int | float) for value in values):
        return f"{len(values)} numbers:{_digest(repr(values).encode())}"
    return "[" + ", ".join(map(canonical, values)) + "]"


def _fields(kind: str, values: Mapping[str, object]) -> str:
    old = _name(kind)
    named = {_name(f"{kind}.{name}"): value for name, value in values.items()}
    kept = sorted((n, v) for n, v in named.items() if not WORDS & {n, f"{old}.{n}"})
    return f"{old}({', '.join(f'{name}={canonical(value)}' for name, value in kept)})"


def _told(error: BaseException) -> dict[str, object]:
    """What an error holds beside its sentence."""
    return {name: value for name, value in vars(error).items() if not isinstance(value, str)}


def _name(name: str) -> str:
    """What was called by this name, or by the last part of it, when the digests were made."""
    return OLD_NAMES.get(name, name.rpartition(".")[2])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
