"""A step of a simulated engine."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """What one step computes."""

    duration_s: float
    started_at_s: float
    prefill_tokens: int
    decode_requests: int
    context_tokens: int
    """What those decoding requests attend to."""
    loading_s: float = 0.0
    """Of its duration, what it took to load adapters."""

    @property
    def tokens(self) -> int:
        """All tokens that the step computes."""
        return self.prefill_tokens + self.decode_requests
