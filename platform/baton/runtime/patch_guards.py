"""Guards of patches: whether private names are as they were when a patch was written.

A place is written as `module:name.attribute`. Each guard imports its module when it is called.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import reduce
from types import CodeType
from typing import TypeAlias

Guard: TypeAlias = Callable[[], str | None]


def resolve(place: str) -> object:
    """The object at a place.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such name.
    """
    module, _, names = place.partition(":")
    found: object = importlib.import_module(module)
    return reduce(getattr, names.split("."), found) if names else found


def has(*places: str) -> Guard:
    """Every place exists."""

    def check() -> str | None:
        for place in places:
            resolve(place)
        return None

    return check


def takes(place: str, *parameters: str) -> Guard:
    """A function has at least these parameters."""

    def check() -> str | None:
        present = inspect.signature(_function_at(place)).parameters
        missing = [name for name in parameters if name not in present]
        return f"{_label(place)} without parameters {', '.join(missing)}" if missing else None

    return check


def takes_only(place: str, *parameters: str) -> Guard:
    """A function has only these parameters, so that a replacement can take its place."""

    def check() -> str | None:
        present = inspect.signature(_function_at(place)).parameters
        unknown = [name for name in present if name not in parameters]
        return f"{_label(place)} with parameters {', '.join(unknown)}" if unknown else None

    return check


def takes_exactly(place: str, *parameters: str) -> Guard:
    """A function has these parameters, in this order."""

    def check() -> str | None:
        present = tuple(inspect.signature(_function_at(place)).parameters)
        return None if present == parameters else f"{_label(place)} takes {', '.join(present)}"

    return check


def uses(place: str, *names: str) -> Guard:
    """The code of a function reads or writes these attributes and globals."""

    def check() -> str | None:
        missing = _unused_names(_function_at(place), names)
        return f"{_label(place)} does not use {', '.join(missing)}" if missing else None

    return check


def has_fields(place: str, *fields: str) -> Guard:
    """A struct or dataclass has at least these fields."""

    def check() -> str | None:
        owner = resolve(place)
        present = (
            *getattr(owner, "__struct_fields__", ()),
            *getattr(owner, "__dataclass_fields__", ()),
            *getattr(owner, "model_fields", ()),
        )
        missing = [name for name in fields if name not in present]
        return f"{_label(place)} without fields {', '.join(missing)}" if missing else None

    return check


def contains_text(module: str, text: str) -> Guard:
    """The source of a module has this text."""

    def check() -> str | None:
        source = inspect.getsource(importlib.import_module(module))
        return None if text in source else f"{module} without {text!r}"

    return check


def all_of(*guards: Guard) -> Guard:
    """The first guard that does not hold."""

    def check() -> str | None:
        problems = (guard() for guard in guards)
        return next((reason for reason in problems if reason is not None), None)

    return check


def first_incompatibility(*requirements: tuple[type, str, tuple[str, ...]]) -> str | None:
    """The first method that is gone, or no longer uses its names."""
    for owner, method, names in requirements:
        function = getattr(owner, method, None)
        if function is None:
            return f"{owner.__name__} has no {method}"
        missing = _unused_names(function, names)
        if missing:
            return f"{owner.__name__}.{method} does not use {', '.join(missing)}"
    return None


def _unused_names(function: Callable[..., object], names: tuple[str, ...]) -> list[str]:
    code: CodeType = inspect.unwrap(function).__code__
    return [name for name in names if name not in code.co_names]


def _function_at(place: str) -> Callable[..., object]:
    found = resolve(place)
    if not callable(found):
        raise TypeError(f"{_label(place)} cannot be called")
    return found


def _label(place: str) -> str:
    return place.partition(":")[2] or place
