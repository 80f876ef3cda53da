"""Why a request was taken from its replica and tried again elsewhere, and how often that was."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class RetryReason(StrEnum):
    """The failure that caused a retry (a metric label, hence an enum)."""

    REPLICA_LOST = "replica_lost"
    """Its replica is gone, or could not be reached."""
    UNRESPONSIVE = "unresponsive"
    """Nothing was heard of its replica, frozen or cut off, for as long as is borne."""
    ENGINE_STALLED = "engine_stalled"
    """Its replica says that it has work, and has not done a step of it."""
    ENGINE_ERROR = "engine_error"
    """The engine ended it."""
    OVERLOADED = "overloaded"
    """A bounded queue on the way to its replica was full."""
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - no secret
    """Its first token did not come in time."""
    TOKEN_TIMEOUT = "token_timeout"  # noqa: S105 - no secret
    """Its next token did not come in time."""
    HANDOFF_FAILED = "handoff_failed"
    """Its blocks did not get from one replica to the other."""
    HEDGED = "hedged"
    """Its first token was much later than predicted, and another replica had nothing to do."""
    DRAINING = "draining"
    """Its replica is about to stop; nothing has failed."""


class RetryTotals(NamedTuple):
    """Totals of one coordinator since it began."""

    retries: tuple[tuple[RetryReason, int], ...]
    """By trouble; of all kinds, those that never were among them."""
    denied: int
    """Retries that were not made, because too many were made recently."""
    circuit_openings: int
    """Times that a replica's circuit was opened."""
