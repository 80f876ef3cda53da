"""Admission: let a request through, hold it for a moment, or say no before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AdmissionRule(StrEnum):
    """How it is decided who is let in."""

    PREDICTED = "predicted"
    """By the time to first token and the pace that a request is predicted to get."""
    BOUNDED = "bounded"
    """Everyone, as long as the bounded queue has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """What admission aims at. Requests to whom nothing is promised are only bounded."""

    rule: AdmissionRule = AdmissionRule.PREDICTED
    engine_queue_s: float = 0.05
    """How much predicted prompt work may wait inside an engine, where nobody's priority or share
    counts any more; what is beyond waits at the coordinator."""
    margin_fraction: float = 0.1
    """Of an objective: kept free, since predictions err."""

    def __post_init__(self) -> None:
        if self.engine_queue_s < 0:
            raise ValueError(f"admission: engine_queue_s is {self.engine_queue_s}, wanted >= 0")
        if not 0 <= self.margin_fraction < 1:
            raise ValueError(
                f"admission: margin_fraction is {self.margin_fraction}, wanted from 0 to below 1"
            )
