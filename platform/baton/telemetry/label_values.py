"""Values of labels that come from no other enumeration; see `telemetry.catalogue`."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

DESIRED: Final = "asked"
"""The input of a scaling decision that is what the policy wants, before any bound (`input`)."""
UNMET: Final = "unmet"
"""The input that says how many replicas a role lacks because its pools may have no more (`input`);
baton's own policy gives it."""


class PoolCount(StrEnum):
    """Which replicas of a pool are counted (`state`)."""

    DESIRED = "desired"
    READY = "ready"
    STARTING = "starting"
    DRAINING = "draining"


class PoolBound(StrEnum):
    """Which of a pool's bounds is meant (`bound`)."""

    MIN = "min"
    MAX = "max"


class EnginePhase(StrEnum):
    """What an engine's step did (`phase`); one that did both counts for both."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineRequestState(StrEnum):
    """Where a request is within an engine (`state`)."""

    RUNNING = "running"
    QUEUED = "queued"
    PULLING = "pulling"
    """Its KV blocks are on their way."""


class FrameOutcome(StrEnum):
    """What became of a frame of the fleet link (`state`)."""

    RECEIVED = "received"
    SENT = "sent"
    BAD = "bad"
    """It could not be read, or was out of place."""
    DROPPED = "dropped"
    """Its session was over, or there was no room left to send it."""


class ScalingAction(StrEnum):
    """What was done to replicas (`action`)."""

    START = "start"
    STOP = "stop"
    FLIP = "flip"


class TickOutcome(StrEnum):
    """How a turn of the scaling loop ended (`outcome`)."""

    DECIDED = "decided"
    PAUSED = "paused"
    """Something could not be seen, so nothing was changed."""
    FAILED = "failed"


class Window(StrEnum):
    """Over which time attainment is taken (`window`)."""

    RECENT = "recent"
    """The last half minute or so: what the autoscaler goes by."""
    TARGET = "target"
    """The time over which the class' target counts, as far as this controller has lived."""
