"""Quantities such as `500ms`, `4MiB` or `10/s`, parsed and formatted exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType


class Unit(StrEnum):
    """Unit of a quantity; error messages show the value."""

    SECONDS = "a duration such as 500ms, 2s or 5m"
    BYTES = "a size such as 512KiB, 4MiB or 1GB"
    PER_SECOND = "a rate such as 10/s or 50k/min"
    BYTES_PER_SECOND = "a rate such as 500MB/s or 2GiB/s"


_SECONDS = MappingProxyType(
    {
        "s": Decimal(1),
        "ms": Decimal("1e-3"),
        "us": Decimal("1e-6"),
        "m": Decimal(60),
        "min": Decimal(60),
        "h": Decimal(3600),
        "d": Decimal(86400),
    }
)
_BYTES = MappingProxyType(
    {"B": Decimal(1)}
    | {f"{prefix}iB": Decimal(1024) ** power for power, prefix in enumerate("KMGT", start=1)}
    | {"kB": Decimal(1000), "KB": Decimal(1000)}
    | {f"{prefix}B": Decimal(1000) ** power for power, prefix in enumerate("MGT", start=2)}
)
_COUNTS = MappingProxyType({"": Decimal(1), "k": Decimal(1000), "M": Decimal(1000) ** 2})

_NUMBER = r"([0-9]{1,400}(?:\.[0-9]{1,400})?) ?"
_PER = r"/(s|m|min|h|d)"
PATTERNS = MappingProxyType(
    {
        Unit.SECONDS: f"^{_NUMBER}({'|'.join(_SECONDS)})$",
        Unit.BYTES: f"^{_NUMBER}({'|'.join(_BYTES)})$",
        Unit.PER_SECOND: f"^{_NUMBER}({'|'.join(_COUNTS)}){_PER}$",
        Unit.BYTES_PER_SECOND: f"^{_NUMBER}({'|'.join(_BYTES)}){_PER}$",
    }
)
"""Regular expressions: number, unit, and for rates the time."""


def parse_quantity(text: str, unit: Unit) -> float | None:
    """The number of base units (s, bytes, 1/s, bytes/s) in `text`; None when it is invalid.

    A unit is mandatory: `2` could be seconds or milliseconds.
    """
    match = re.fullmatch(PATTERNS[unit], text)
    if match is None:
        return None
    number, name, *per = match.groups()
    scale = (_SECONDS | _BYTES | _COUNTS)[name]
    return float(Decimal(number) * scale / (_SECONDS[per[0]] if per else 1))


def format_quantity(number: float, unit: Unit) -> str:
    """`number` base units in the largest unit without a fraction; parses back to `number`."""
    match unit:
        case Unit.SECONDS:
            return _in_units(number, ("s", "ms", "us"), _SECONDS)
        case Unit.BYTES:
            return _in_units(number, ("TiB", "GiB", "MiB", "KiB", "B"), _BYTES)
        case Unit.PER_SECOND:
            return _in_units(number, ("M", "k", ""), _COUNTS) + "/s"
        case Unit.BYTES_PER_SECOND:
            return _in_units(number, ("GiB", "GB", "MiB", "MB", "KiB", "kB", "B"), _BYTES) + "/s"


def _in_units(number: float, names: tuple[str, ...], factors: Mapping[str, Decimal]) -> str:
    # repr is the shortest decimal that parses to the same float.
    exact = Decimal(repr(number))
    for name in names:
        scaled = exact / factors[name]
        if scaled == scaled.to_integral_value() and (scaled or factors[name] == 1):
            return f"{int(scaled)}{name}"
    base = next(name for name in names if factors[name] == 1)
    return f"{exact:f}{base}"
