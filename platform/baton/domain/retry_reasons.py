"""Why a request was taken from its replica and tried again elsewhere, and how often that was."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Trouble(StrEnum):
    """What was wrong where a request ran (a metric label, hence an enum)."""

    LOST = "lost"
    """Its replica is gone, or could not be reached."""
    SILENT = "silent"
    """Nothing was heard of its replica, frozen or cut off, for as long as is borne."""
    STILL = "still"
    """Its replica says that it has work, and has not done a step of it."""
    FAILED = "failed"
    """The engine ended it."""
    FULL = "full"
    """A bounded queue on the way to its replica was full."""
    LATE = "late"
    """Its first token did not come in time."""
    STALLED = "stalled"
    """Its next token did not come in time."""
    HANDOFF = "handoff"
    """Its blocks did not get from one replica to the other."""
    HEDGED = "hedged"
    """Its first token was much later than predicted, and another replica had nothing to do."""
    DRAINING = "draining"
    """Its replica is about to stop; nothing has failed."""


class Recoveries(NamedTuple):
    """Totals of one coordinator since it began."""

    second_tries: tuple[tuple[Trouble, int], ...]
    """By trouble; of all kinds, those that never were among them."""
    refused: int
    """Second tries that were not made, because too many were lately."""
    openings: int
    """Times that a replica's circuit was opened."""
