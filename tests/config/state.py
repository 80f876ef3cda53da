"""What an object of ours holds, as plain values: to see whether two are alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from random import Random

_TIME_SUFFIXES = ("_at_s", "_offset_s")
"""How attributes end that no two processes have alike."""


def state(root: object) -> dict[str, object]:
    """Everything that our objects hold, by the attributes that lead to it."""
    values: dict[str, object] = {}
    _collect(root, "", values, set())
    return values


def _collect(value: object, path: str, values: dict[str, object], visited: set[int]) -> None:
    match value:
        case None | bool() | int() | float() | str() | bytes() | StrEnum():
            values[path] = value
        case Mapping():
            values[f"{path}.keys"] = sorted(map(str, value))
            for name, other in value.items():
                _collect(other, f"{path}[{name}]", values, visited)
        case list() | tuple() | set() | frozenset() | deque():
            values[f"{path}.len"] = len(value)
            ordered = value if isinstance(value, list | tuple | deque) else sorted(value, key=str)
            for number, other in enumerate(ordered):
                _collect(other, f"{path}[{number}]", values, visited)
        case Random():
            values[path] = value.getstate()
        case _ if type(value).__module__.startswith("baton.") and id(value) not in visited:
            if not _is_value(value):  # of values many may have the same one, and then another
                visited.add(id(value))
            _collect_attributes(value, path, values, visited)


def _collect_attributes(
    owner: object, path: str, values: dict[str, object], visited: set[int]
) -> None:
    names = {*getattr(owner, "__dict__", {}), *_slots(type(owner))} - {"_clock"}
    for name in sorted(names):
        if hasattr(owner, name) and not name.endswith(_TIME_SUFFIXES):
            _collect(getattr(owner, name), f"{path}.{name}", values, visited)


def _is_value(candidate: object) -> bool:
    """Whether nothing can change in it, so that it cannot lead back to itself."""
    dataclass_params = getattr(type(candidate), "__dataclass_params__", None)
    return dataclass_params is not None and bool(dataclass_params.frozen)


def _slots(kind: type) -> set[str]:
    return {name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ())}
