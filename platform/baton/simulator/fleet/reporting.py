"""When virtual replicas say how they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """When a replica says how it is."""

    beat_s: float = 0.25
    """Between two load reports; as the fleet link does it."""
    stale_s: float = 0.0
    """How much later than anything else load reports arrive."""
    cache_every_s: float = 0.02
    """How long cache changes are gathered before they are sent."""
    always: bool = True
    """Report even if nothing has happened since the last time; the fleet link does now and then."""
    silence_s: float = float("inf")
    """Without `always`: the longest that a replica says nothing."""
    cached: bool = True
    """Say what is cached."""
    patience_s: float = 1.0
    """The longest jump of an engine: so old may the tokens be that a client has not been sent."""
