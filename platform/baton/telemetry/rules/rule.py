"""What a file of rules is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """Who is to hear of an alert, and when."""

    PAGE = "page"
    """Somebody, now: clients get less than they were promised, or nothing."""
    TICKET = "ticket"
    """Somebody, on the next working day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A series that Prometheus computes from others and keeps."""

    name: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that somebody is told of, and can do something about."""

    name: str
    severity: Severity
    expr: str
    for_: str
    """How long it must hold, as Prometheus writes durations."""
    summary: str
    description: str
    """With the numbers."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.startswith("Baton"):
            raise ValueError(f"alert {self.name!r}: expected a name that starts with 'Baton'")


Rule = Record | Alert


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rules that are evaluated one after the other: later ones see what earlier ones recorded."""

    name: str
    interval: str
    """Written out, so that nothing here depends on Prometheus' own `evaluation_interval`."""
    rules: tuple[Rule, ...]
