"""Keys of replica failures and retries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.config.language.bounds import Positive
from baton.config.language.scalars import Bounds
from baton.control.state.limits import RecoveryOptions

_DEFAULTS = RecoveryOptions()

# A busy replica sends four heartbeats a second; the timeout covers at least two.
_HeartbeatTimeout = Bounds(low=0.5, high=86_400)
_OpenDuration = Bounds(low=0.001, high=_DEFAULTS.circuit_breaker.max_open_duration_s)
_LatencyMultiple = Bounds(low=1.1, high=1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreakerConfig:
    """Circuit breakers, which stop requests to a failing replica for a while."""

    failure_threshold: Annotated[int, Positive] = _DEFAULTS.circuit_breaker.failure_threshold
    """Consecutive failures that open a replica's circuit breaker."""
    open_duration_s: Annotated[float, _OpenDuration] = _DEFAULTS.circuit_breaker.open_duration_s
    """First duration of the open state; it doubles each time, up to half a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudgetConfig:
    """The retry budget, in addition to a few retries."""

    ratio: Annotated[float, Bounds(low=0, high=10)] = _DEFAULTS.retry_budget.ratio
    """Maximum retries per arriving request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgingConfig:
    """Restarts of requests with a late first token on an idle replica."""

    latency_multiple: Annotated[float | None, _LatencyMultiple] = _DEFAULTS.hedging.latency_multiple
    """Multiple of the predicted time to first token after which a request is restarted; null:
    never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """Recovery from replica failures."""

    heartbeat_timeout_s: Annotated[float, _HeartbeatTimeout] = _DEFAULTS.heartbeat_timeout_s
    """Time without a message from a busy replica until its requests move to others."""
    circuit_breaker: CircuitBreakerConfig = field(default_factory=CircuitBreakerConfig)
    retry_budget: RetryBudgetConfig = field(default_factory=RetryBudgetConfig)
    hedging: HedgingConfig = field(default_factory=HedgingConfig)
