"""The coordinator's bounds: how much it holds and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.policy.resilience.circuit_breakers import BreakerOptions
from baton.policy.resilience.hedging import HedgeOptions
from baton.policy.resilience.retry_budget import RetryOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """When a replica is given up, and how often a request may be tried again."""

    heartbeat_timeout_s: float = 1.5
    """A replica with work that is not heard of for this time is left; the link sends a heartbeat
    four times a second. Longer than three lost segments in a row take (0.2 + 0.4 + 0.8 s, TCP's
    least timeout doubled twice), shorter than the link takes to break the session (2 s)."""
    circuit_breaker: BreakerOptions = field(default_factory=BreakerOptions)
    retry_budget: RetryOptions = field(default_factory=RetryOptions)
    hedging: HedgeOptions = field(default_factory=HedgeOptions)

    def __post_init__(self) -> None:
        if not self.heartbeat_timeout_s > 0:
            raise ValueError(
                f"recovery: heartbeat_timeout_s is {self.heartbeat_timeout_s}, expected more than 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLimits:
    """Every wait has a deadline and every store a bound."""

    max_requests: int = 4096
    """Requests in flight, of all phases."""
    max_queued_requests: int = 1024
    """Requests waiting for a replica."""
    max_prompt_tokens: int | None = None
    """Longer prompts are shed; None leaves it to the model's context."""
    queue_timeout_s: float = 2.0
    """How long a new request waits for a replica before it is evicted."""
    cold_start_timeout_s: float | None = None
    """The same where the fleet has no replica, and one is started because a request waits; None:
    none is."""
    resume_timeout_s: float = 60.0
    """How long a stream that lost its replica waits for another; as long as an engine starts."""
    first_token_timeout_s: float = 30.0
    """From placement to the end of the prefill, or to the first token where one replica runs both
    phases, before the replica is given up for this request."""
    transfer_deadline_s: float = 2.0
    """From handoff to the decode replica's first token; while that replica says that it has a
    queue, the time does not run, for its blocks do not move yet. Where only a prefix is fetched,
    what it is predicted to take to compute the rest comes on top."""
    stall_timeout_s: float = 10.0
    """Between two tokens of a stream, before its replica is given up."""
    total_timeout_s: float = 600.0
    """From arrival to the end."""
    max_pulls: int | None = 8
    """Pulls into one replica at a time, as its engine limits them; None: no limit."""
    early_first_token: bool = False
    """Give a client the token that ends its prefill, before its blocks are moved."""
    lease_s: float = 30.0
    """How long a prefill replica keeps blocks by itself; a lease older than that is void."""
    abort_s: float = 5.0
    """How long an abort may stay unconfirmed before the leg is forgotten."""
    retry_s: float = 0.2
    """The pause before a replica on which a request has just failed is tried again."""
    max_failures: int = 8
    """Failed legs of one request before it is given up."""
    drain_timeout_s: float = 60.0
    """How long streams may go on where a replica drains, before they are moved to others."""
    max_drain_migrations: int = 4
    """Streams that are being moved at a time."""
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
