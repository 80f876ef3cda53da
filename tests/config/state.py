"""What an object of ours holds, as plain values: to see whether two are alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from random import Random

_MOMENTS = ("_at_s", "_offset_s")
"""How attributes end that no two processes have alike."""


def state(whole: object) -> dict[str, object]:
    """Everything that our objects hold, by the attributes that lead to it."""
    found: dict[str, object] = {}
    _look(whole, "", found, set())
    return found


def _look(value: object, at: str, found: dict[str, object], seen: set[int]) -> None:
    match value:
        case None | bool() | int() | float() | str() | bytes() | StrEnum():
            found[at] = value
        case Mapping():
            found[f"{at}.keys"] = sorted(map(str, value))
            for name, one in value.items():
                _look(one, f"{at}[{name}]", found, seen)
        case list() | tuple() | set() | frozenset() | deque():
            found[f"{at}.len"] = len(value)
            ordered = value if isinstance(value, list | tuple | deque) else sorted(value, key=str)
            for number, one in enumerate(ordered):
                _look(one, f"{at}[{number}]", found, seen)
        case Random():
            found[at] = value.getstate()
        case _ if type(value).__module__.startswith("baton.") and id(value) not in seen:
            if not _is_value(value):  # of values many may have the same one, and then another
                seen.add(id(value))
            _look_inside(value, at, found, seen)


def _look_inside(one: object, at: str, found: dict[str, object], seen: set[int]) -> None:
    names = {*getattr(one, "__dict__", {}), *_slots(type(one))} - {"_clock"}
    for name in sorted(names):
        if hasattr(one, name) and not name.endswith(_MOMENTS):
            _look(getattr(one, name), f"{at}.{name}", found, seen)


def _is_value(one: object) -> bool:
    """Whether nothing can change in it, so that it cannot lead back to itself."""
    made = getattr(type(one), "__dataclass_params__", None)
    return made is not None and bool(made.frozen)


def _slots(kind: type) -> set[str]:
    return {name for one in kind.__mro__ for name in getattr(one, "__slots__", ())}
