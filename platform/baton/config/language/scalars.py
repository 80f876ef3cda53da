"""Types of single values: reading, writing, description and JSON Schema."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from baton.config.language.conditions import PATTERN, parse_condition
from baton.config.language.tree import ListNode, Node, Scalar
from baton.config.language.units import PATTERNS, Unit, format_quantity, parse_quantity

Json = dict[str, object]

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_IMPORT_PATH = rf"{_NAME}(?:\.{_NAME})*:{_NAME}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The inclusive range of a number."""

    low: float | None = None
    high: float | None = None
    typical: float | None = None
    """The order of magnitude of usual values; suggestions of a unit go by it."""

    def contains(self, number: float) -> bool:
        """Whether `number` is finite and in the range."""
        return (
            math.isfinite(number)
            and (self.low is None or number >= self.low)
            and (self.high is None or number <= self.high)
        )

    def describe(self, write: Callable[[float], str] = str) -> str:
        """The range in words, as a suffix."""
        if self.low is not None and self.low == self.high:
            return f", exactly {write(self.low)}"
        low = "" if self.low is None else f", at least {write(self.low)}"
        high = "" if self.high is None else f", at most {write(self.high)}"
        return low + high

    def json_schema(self) -> Json:
        """The range in JSON Schema."""
        limits = {"minimum": self.low, "maximum": self.high}
        return {name: end for name, end in limits.items() if end is not None}


def _scalar_value(node: Node) -> str | int | float | bool | None:
    return node.value if isinstance(node, Scalar) else None


class _PlainType:
    """A type whose values are plain JSON."""

    __slots__ = ()

    def write(self, value: object) -> object:
        """The value itself."""
        return value


@dataclass(frozen=True, slots=True)
class Text(_PlainType):
    """Text of at least one character, without control characters."""

    def read(self, node: Node) -> str | None:
        """The text; None when the node is something else."""
        text = _scalar_value(node)
        return text if isinstance(text, str) and text and not _UNPRINTABLE.search(text) else None

    def describe(self) -> str:
        """For error messages."""
        return "text (in quotes if it looks like something else)"

    def json_schema(self) -> Json:
        """For editors."""
        return {"type": "string", "minLength": 1}


_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_SELECTOR = re.compile(rf"!?{_LABEL}|!?in\({_LABEL}(?:, ?{_LABEL})*\)")


@dataclass(frozen=True, slots=True)
class Selector(_PlainType):
    """A selector of node labels in Ray's syntax: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""

    def read(self, node: Node) -> str | None:
        """The selector; None when the node is something else."""
        text = _scalar_value(node)
        return text if isinstance(text, str) and _SELECTOR.fullmatch(text) else None

    def describe(self) -> str:
        """For error messages."""
        return "what a label must be: 'a', '!a', 'in(a, b)' or '!in(a, b)'"

    def json_schema(self) -> Json:
        """For editors."""
        return {"type": "string", "pattern": f"^(?:{_SELECTOR.pattern})$"}


@dataclass(frozen=True, slots=True)
class Boolean(_PlainType):
    """True or false."""

    def read(self, node: Node) -> bool | None:
        """The flag; None when the node is something else."""
        flag = _scalar_value(node)
        return flag if isinstance(flag, bool) else None

    def describe(self) -> str:
        """For error messages."""
        return "true or false"

    def json_schema(self) -> Json:
        """For editors."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer(_PlainType):
    """A whole number."""

    bounds: Bounds

    def read(self, node: Node) -> int | None:
        """The number; None when the node is something else or out of bounds."""
        number = _scalar_value(node)
        if isinstance(number, bool) or not isinstance(number, int):
            return None
        return number if self.bounds.contains(number) else None

    def describe(self) -> str:
        """For error messages."""
        return f"a whole number{self.bounds.describe()}"

    def json_schema(self) -> Json:
        """For editors."""
        return {"type": "integer"} | self.bounds.json_schema()


@dataclass(frozen=True, slots=True)
class Float(_PlainType):
    """A number."""

    bounds: Bounds

    def read(self, node: Node) -> float | None:
        """The number; None when the node is something else or out of bounds."""
        number = _scalar_value(node)
        if isinstance(number, bool) or not isinstance(number, int | float):
            return None
        return float(number) if self.bounds.contains(number) else None

    def describe(self) -> str:
        """For error messages."""
        return f"a number{self.bounds.describe()}"

    def json_schema(self) -> Json:
        """For editors."""
        return {"type": "number"} | self.bounds.json_schema()


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with a unit."""

    unit: Unit
    bounds: Bounds
    is_integer: bool
    """Whether the number of base units must be an integer (bytes)."""

    def read(self, node: Node) -> float | int | None:
        """The number of base units; None when the node is something else or out of bounds."""
        text = _scalar_value(node)
        number = parse_quantity(text, self.unit) if isinstance(text, str) else None
        if number is None or not self.bounds.contains(number):
            return None
        if not self.is_integer:
            return number
        return int(number) if number.is_integer() else None

    def write(self, value: object) -> object:
        """The number with its unit."""
        if not isinstance(value, int | float):
            raise TypeError(f"{value!r} is not {self.unit}")
        return format_quantity(value, self.unit)

    def describe(self) -> str:
        """For error messages."""
        limits = self.bounds.describe(lambda number: format_quantity(number, self.unit))
        return f"{self.unit}{limits}"

    def json_schema(self) -> Json:
        """For editors, which cannot check the bounds."""
        return {"type": "string", "pattern": PATTERNS[self.unit], "description": self.describe()}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the values of an enum."""

    enum: type[StrEnum]

    def read(self, node: Node) -> StrEnum | None:
        """The member; None when the node is something else."""
        text = _scalar_value(node)
        return self.enum(text) if isinstance(text, str) and text in list(self.enum) else None

    def write(self, value: object) -> object:
        """The member as text."""
        return str(value)

    def describe(self) -> str:
        """For error messages."""
        *first, last = [f"'{member}'" for member in self.enum]
        return f"{', '.join(first)} or {last}" if first else last

    def json_schema(self) -> Json:
        """For editors."""
        return {"type": "string", "enum": [str(member) for member in self.enum]}


@dataclass(frozen=True, slots=True)
class Pluggable(_PlainType):
    """One of the values of an enum, or the user's own `module:function`."""

    enum: type[StrEnum]
    moved: Mapping[str, str] = field(default_factory=dict)
    """Former values of the enum, each with its current `module:function`."""

    def read(self, node: Node) -> str | None:
        """The text; None when the node is something else."""
        text = _scalar_value(node)
        if not isinstance(text, str):
            return None
        return text if text in list(self.enum) or re.fullmatch(_IMPORT_PATH, text) else None

    def describe(self) -> str:
        """For error messages."""
        names = ", ".join(f"'{member}'" for member in self.enum)
        return f"{names} or your own 'module:function'"

    def json_schema(self) -> Json:
        """For editors."""
        names = {"type": "string", "enum": [str(member) for member in self.enum]}
        return {"anyOf": [names, {"type": "string", "pattern": f"^(?:{_IMPORT_PATH})$"}]}


@dataclass(frozen=True, slots=True)
class Condition(_PlainType):
    """A condition on a request."""

    def read(self, node: Node) -> str | None:
        """The condition in its usual spelling; None when the node is something else."""
        text = _scalar_value(node)
        condition = parse_condition(text) if isinstance(text, str) else None
        return None if condition is None else str(condition)

    def describe(self) -> str:
        """For error messages."""
        return "a condition such as 'prompt_tokens > 8000', with >, >=, < or <="

    def json_schema(self) -> Json:
        """For editors."""
        return {"type": "string", "pattern": PATTERN}


@dataclass(frozen=True, slots=True)
class ListOf:
    """A non-empty list of distinct items."""

    item: Choice | Text

    def read(self, node: Node) -> tuple[str, ...] | None:
        """The items in order; None when the node or an item is something else."""
        if not isinstance(node, ListNode):
            return None
        items = tuple(item for item in map(self.item.read, node.items) if item is not None)
        return items if items and len(set(items)) == len(node.items) else None

    def write(self, value: object) -> object:
        """A list of texts."""
        if not isinstance(value, tuple):
            raise TypeError(f"{value!r} is not a tuple")
        return [str(member) for member in value]

    def describe(self) -> str:
        """For error messages."""
        return f"a list of at least one, each once, of {self.item.describe()}"

    def json_schema(self) -> Json:
        """For editors."""
        items = self.item.json_schema()
        return {"type": "array", "items": items, "minItems": 1, "uniqueItems": True}


ScalarType = (
    Text | Selector | Boolean | Integer | Float | Quantity | Choice | Pluggable | Condition | ListOf
)


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` for a close match among `known`, else empty."""
    matches = difflib.get_close_matches(text, list(known), n=1)
    return f", did you mean '{matches[0]}'?" if matches else ""


_UNIT_EXAMPLES = {
    Unit.SECONDS: "s",
    Unit.BYTES: "MiB",
    Unit.PER_SECOND: "/s",
    Unit.BYTES_PER_SECOND: "MiB/s",
}
_THOUSANDS = re.compile(r"([1-9][0-9]{0,5})[kK]")


def _closest_unit(number: float, typical_s: float) -> str:
    """`ms` or `s`, whichever makes the number more usual."""
    if number <= 0:
        return "s"
    units = {"ms": 0.001, "s": 1.0}
    return min(units, key=lambda unit: abs(math.log(number * units[unit] / typical_s)))


def suggest(scalar_type: ScalarType, node: Node) -> str:
    """A hint for a node of the wrong type; may be empty."""
    match scalar_type, node:
        case Pluggable(moved=moved), Scalar(value=str(text)) if text in moved:
            place = f"'{moved[text]}', with baton's repository on the PYTHONPATH"
            return f"; {text!r} is not built in any more: write {place}"
        case Choice(enum) | Pluggable(enum), Scalar(value=str(text)):
            return did_you_mean(text, [str(member) for member in enum])
        case Quantity(unit, bounds), Scalar(value=int(number) | float(number), text=text):
            example = _UNIT_EXAMPLES[unit]
            if unit is Unit.SECONDS and bounds.typical is not None:
                example = _closest_unit(number, bounds.typical)
            suggested = parse_quantity(f"{text}{example}", unit)
            if suggested is None or not bounds.contains(suggested):
                return ""
            return f", did you mean '{text}{example}'?"
        case Integer(), Scalar(value=str(text)) if matched := _THOUSANDS.fullmatch(text):
            return f", did you mean {int(matched[1]) * 1024}?"
        case _:
            return ""
