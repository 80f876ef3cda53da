"""The keys that say when a replica is given up, and how often requests are tried again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.config.language.bounds import Positive
from baton.config.language.scalars import Bounds
from baton.control.state.limits import RecoveryOptions

_DEFAULTS = RecoveryOptions()

# A busy replica sends four heartbeats a second; a shorter timeout than two of them is none.
_HeartbeatTimeout = Bounds(low=0.5, high=86_400)
_OpenDuration = Bounds(low=0.001, high=_DEFAULTS.circuit_breaker.max_open_duration_s)
_LatencyMultiple = Bounds(low=1.1, high=1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreakerConfig:
    """When a replica that fails gets no requests for a while."""

    failure_threshold: Annotated[int, Positive] = _DEFAULTS.circuit_breaker.failure_threshold
    """Failures in a row that open a replica's circuit breaker."""
    open_duration_s: Annotated[float, _OpenDuration] = _DEFAULTS.circuit_breaker.open_duration_s
    """How long it is open at first; twice as long each time, half a minute at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudgetConfig:
    """How many retries there may be, besides a few."""

    ratio: Annotated[float, Bounds(low=0, high=10)] = _DEFAULTS.retry_budget.ratio
    """Retries per request that arrives, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgingConfig:
    """When a request with a late first token is started again on an idle replica."""

    latency_multiple: Annotated[float | None, _LatencyMultiple] = _DEFAULTS.hedging.latency_multiple
    """How many times the predicted time to the first token has passed; null: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """What is done about replicas that fail."""

    heartbeat_timeout_s: Annotated[float, _HeartbeatTimeout] = _DEFAULTS.heartbeat_timeout_s
    """How long a busy replica may send nothing before its requests are moved to others."""
    circuit_breaker: CircuitBreakerConfig = field(default_factory=CircuitBreakerConfig)
    retry_budget: RetryBudgetConfig = field(default_factory=RetryBudgetConfig)
    hedging: HedgingConfig = field(default_factory=HedgingConfig)
