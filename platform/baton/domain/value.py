"""Values that are made for each request, leg or step: frozen, equal and hashed by their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, dataclass_transform

import msgspec

if TYPE_CHECKING:
    # A type checker takes a Value for a dataclass, and so checks names and types of changed fields.
    from dataclasses import replace as evolve
else:
    from msgspec.structs import replace as evolve

__all__ = ["MutableValue", "Value", "evolve"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Value(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A frozen dataclass with slots, made in a fraction of its time.

    It is declared as `class Leg(Value, kw_only=True)`: frozen is inherited, keywords alone are not;
    `kw_only=False` where many are made in one place, in order. `evolve(leg, max_tokens=3)` is
    another, checked as any that is made.

    The collector of cycles does not look at values, so none may be part of a cycle. A value that
    may lead back to its holder (an exception, by its frames) adds `gc=True`.
    """


@dataclass_transform(kw_only_default=True)
class MutableValue(msgspec.Struct, kw_only=True, gc=False):
    """The same where fields are filled in later: equal by its fields, not hashed."""
