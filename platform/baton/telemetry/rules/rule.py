"""The content of a rule file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """How urgent an alert is."""

    PAGE = "page"
    """Now: clients miss their objectives, or get nothing."""
    TICKET = "ticket"
    """On the next working day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A series that Prometheus computes from others and keeps."""

    name: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert on a problem that an operator can act on."""

    name: str
    severity: Severity
    expr: str
    for_: str
    """How long it must hold, as Prometheus writes durations."""
    summary: str
    description: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.startswith("Baton"):
            raise ValueError(f"alert {self.name!r}: expected a name that starts with 'Baton'")


Rule = Record | Alert


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rules that are evaluated in order: later rules see earlier records."""

    name: str
    interval: str
    """Explicit, so that Prometheus' `evaluation_interval` does not matter."""
    rules: tuple[Rule, ...]
