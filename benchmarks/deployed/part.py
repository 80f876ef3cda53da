"""What a part of the benchmark returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of one part."""

    figures: Mapping[str, object]
    """Printed, and kept."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Kept in the result file only."""
    good: bool = True
    """False when a request was not served, or an answer was wrong."""
