"""The objectives of a class of requests, and whether a request met them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_WINDOW_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """One class's objectives; None for a missing objective."""

    name: str = "default"
    ttft_s: float | None = None
    """From arrival to the first token."""
    tpot_s: float | None = None
    """(last token - first token) / (output tokens - 1)."""
    itl_p99_s: float | None = None
    """At most one in a hundred gaps between two tokens of a request may be longer."""
    attainment_target: float = 0.99
    """The share of arrived requests that are to meet all of them."""
    window_s: float = _WINDOW_S
    """Over which the target counts."""
    priority: int = 0
    """Rank when not all can be served: higher numbers go first."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "itl_p99_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"slo {self.name!r}: {name} is {value}, expected more than 0")
        if not 0 < self.attainment_target <= 1:
            raise ValueError(
                f"slo {self.name!r}: attainment_target is {self.attainment_target},"
                " expected more than 0 and at most 1"
            )

    @property
    def has_objectives(self) -> bool:
        """Whether there is an objective at all."""
        return (self.ttft_s, self.tpot_s, self.itl_p99_s) != (None, None, None)


NO_SLO = Slo()
"""No objectives: every finished request is good."""


class SloResult(NamedTuple):
    """Whether one request met the objectives of its class; made once, when it ends."""

    was_served: bool
    """It was not shed, evicted or failed."""
    ttft_met: bool
    tpot_met: bool
    itl_met: bool

    @property
    def is_good(self) -> bool:
        """It counts for goodput."""
        return self.was_served and self.ttft_met and self.tpot_met and self.itl_met


ALL_MET = SloResult(was_served=True, ttft_met=True, tpot_met=True, itl_met=True)
