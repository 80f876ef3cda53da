"""The keys that say when a replica is given up, and how often requests are tried again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.config.language.bounds import Positive
from baton.config.language.scalars import Bounds
from baton.control.state.limits import RecoveryOptions

_DEFAULTS = RecoveryOptions()

# Replicas say that they live four times a second; what is sooner than twice that is no silence.
_HeartbeatTimeout = Bounds(low=0.5, high=86_400)
_OpenDuration = Bounds(low=0.001, high=_DEFAULTS.breaker.max_open_duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """What is done about replicas that fail."""

    silence_s: Annotated[float, _HeartbeatTimeout] = _DEFAULTS.heartbeat_timeout_s
    """How long a replica on which something runs may say nothing, before all of it is taken
    elsewhere."""
    failures: Annotated[int, Positive] = _DEFAULTS.breaker.failure_threshold
    """Failures in a row after which a replica gets no work for a while."""
    pause_s: Annotated[float, _OpenDuration] = _DEFAULTS.breaker.open_duration_s
    """How long that is at first; twice as long each time, half a minute at most."""
    retries: Annotated[float, Bounds(low=0, high=10)] = _DEFAULTS.retries.budget_ratio
    """Second tries for each request that arrives, at most, besides a few."""
    hedge: Annotated[float | None, Bounds(low=1.1, high=1_000)] = _DEFAULTS.hedge.latency_multiple
    """How many times later than predicted a first token is, when an idle replica is tried instead;
    null: never."""
