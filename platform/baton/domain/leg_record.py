"""The record of one leg of a request, as part of the request's record."""

from __future__ import annotations

from enum import StrEnum

from baton.domain.handoff import LegKind, LegTimes
from baton.domain.value import Value


class LegOutcome(StrEnum):
    """How a leg was over."""

    COMPLETED = "completed"
    """It did what it was for."""
    FAILED = "failed"
    """Its engine ended it, or its replica was lost."""
    REJECTED = "rejected"
    """Its engine found its request to be wrong; nothing has failed."""
    TIMED_OUT = "timed_out"
    """It took too long."""
    MIGRATED = "migrated"
    """Its replica drains."""
    CANCELLED = "cancelled"
    """Its client went away."""


class LegRecord(Value, kw_only=True):
    """One leg, as its coordinator saw it, and its engine's times."""

    leg_id: str
    kind: LegKind
    replica_id: str
    route_index: int
    """Which of the request's routes it belongs to, from 0."""
    started_at_s: float
    first_output_at_s: float | None
    last_output_at_s: float | None
    """Of tokens that went on to the client; None where there were none."""
    ended_at_s: float
    prompt_tokens: int
    """Those of a resume among them."""
    fetched_tokens: int
    """How many of them came as blocks of another replica, or were to."""
    cached_tokens: int | None
    """How many of them the engine did not compute; None where it did not say."""
    output_tokens: int
    """How many it gave to the client."""
    engine_times: LegTimes | None
    """The engine's times; None where they are missing or invalid."""
    outcome: LegOutcome
