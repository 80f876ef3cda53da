"""Tenants: limits of their use, and their weights when there is not enough for all."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

DEFAULT_TENANT = "default"
"""The tenant of callers without a key, where that is allowed."""


class CacheSharing(StrEnum):
    """Whether a tenant's prompts may be found in others' prefix caches."""

    ISOLATED = "isolated"
    """Its cached prefixes are its own: no other tenant can tell from a fast answer what it
    asked."""
    SHARED = "shared"
    """Among all tenants that share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """How much may arrive, over the whole deployment; None for no limit."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    """Prompt tokens, and output tokens as they are asked for or expected; settled at the end."""
    burst_s: float = 10.0
    """A bucket holds what comes in this time."""

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "tokens_per_s", "burst_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"rate limit: {name} is {value}, expected more than 0, or no limit"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant."""

    name: str = DEFAULT_TENANT
    priority: int = 0
    """Added to that of its requests' class: higher priorities go first."""
    weight: float = 1.0
    """Its share of GPU-seconds among tenants of one priority that all want more than there is."""
    slo: str | None = None
    """The class of its requests unless they ask for another; None: as rules say, or `default`."""
    classes: tuple[str, ...] | None = None
    """Classes that its requests may ask for; None: those whose priority is not above its own
    class's."""
    rate: RateLimit = field(default_factory=RateLimit)
    max_in_flight: int | None = None
    """Requests at a time, over the whole deployment; None for no cap."""
    cache: CacheSharing = CacheSharing.SHARED

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tenant has no name")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"tenant {self.name!r}: weight is {self.weight}, expected more than 0")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ValueError(
                f"tenant {self.name!r}: max_in_flight is {self.max_in_flight}, expected at least 1"
            )


class QuotaShare(NamedTuple):
    """The part of a tenant's limits that one coordinator may admit."""

    requests_per_s: float | None = None
    """None: no limit."""
    tokens_per_s: float | None = None
    max_in_flight: int | None = None
