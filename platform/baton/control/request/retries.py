"""Whether a request that cannot stay where it runs is retried elsewhere, or fails.

*Theory of operation.* A retry places the request again, with the generated tokens as part of its
prompt. Four bounds apply:

- `max_failures` failed legs of one request; a hedged leg, or the first refusal of a draining
  replica, is no failure;
- `_MAX_CRASHES` replicas in a row that die with a request that makes no progress;
- a request that cannot be resumed fails once its client has tokens;
- the *retry budget* (`policy.resilience.retry_budget`): a share of arrivals.

The budget is for failures that cause more failures. A retry is *free* when its cause lies outside
of the request: its replica was lost, hangs, or fails while others are well, or a handoff failed. So
all streams of one lost replica are resumed. It is free again only after progress, so a request that
kills its replicas pays. A drain costs nothing.

When the budget is spent, a client without output gets 503; a client with tokens gets an error in
its stream. `RetryPolicy` changes nothing but its budget; `RequestLifecycle` executes its decisions.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from baton.control.fleet.health import ReplicaHealth
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import RequestState
from baton.domain.errors import BatonError, EngineFailed, NotResumable, RetryBudgetExhausted
from baton.domain.events import LegFailed
from baton.domain.handoff import LegFailure, PlacementDecision
from baton.domain.names.words import count_text
from baton.domain.retry_reasons import RetryReason, RetryTotals
from baton.perf.fitting.lateness import LatenessHistogram
from baton.policy.resilience.hedging import OVERRUN_QUANTILE, hedge_after_s
from baton.policy.resilience.retry_budget import RetryBudget

_REPLICA_FAULTS = frozenset(
    {RetryReason.ENGINE_ERROR, RetryReason.FIRST_TOKEN_TIMEOUT, RetryReason.TOKEN_TIMEOUT}
)
"""Troubles that a replica's circuit counts; those of all its requests at once trip it."""
_EXTERNAL_CAUSES = frozenset(
    {
        RetryReason.REPLICA_LOST,
        RetryReason.UNRESPONSIVE,
        RetryReason.ENGINE_STALLED,
        RetryReason.HANDOFF_FAILED,
    }
)
"""Troubles whose cause is over when the request is elsewhere."""
_UNCHARGED = frozenset({RetryReason.DRAINING, RetryReason.HEDGED})
"""Nothing has failed where a replica drains, and a hedge has paid already."""
_POISON_REQUEST_THRESHOLD = 2
"""A request that has failed on this many replicas is more likely to blame than the next replica."""
_MAX_CRASHES = 3
"""Replicas that may die with a request that gets no further: it may be what ends them."""

_REASONS_OF_FAILURES = {
    LegFailure.KV_LOAD_FAILED: RetryReason.HANDOFF_FAILED,
    LegFailure.OVERLOADED: RetryReason.OVERLOADED,
    LegFailure.UNREACHABLE: RetryReason.REPLICA_LOST,
    LegFailure.DRAINING: RetryReason.DRAINING,
}
"""Failures of legs that are not the engine's own."""


class RetryCause(NamedTuple):
    """Why a request cannot stay on a replica."""

    replica_id: str
    reason: RetryReason
    detail: str

    @classmethod
    def of_failed_leg(cls, event: LegFailed) -> RetryCause:
        """The cause that a replica reports for a leg."""
        reason = _REASONS_OF_FAILURES.get(event.failure, RetryReason.ENGINE_ERROR)
        return cls(event.replica_id, reason, f"{event.failure} {event.reason}".strip())


class Retry(NamedTuple):
    """Place the request again."""

    reason: RetryReason
    detail: str
    is_free: bool = False
    """Whether the budget does not pay; once for each number of tokens."""


class Fail(NamedTuple):
    """End the request."""

    error: BatonError


class RetryPolicy:
    """The rules of retries, and the budget of one coordinator."""

    def __init__(self, limits: CoordinatorLimits, health: ReplicaHealth) -> None:
        self._limits = limits
        self._health = health
        self._budget = RetryBudget(limits.recovery.retry_budget)
        self._retry_counts: Counter[RetryReason] = Counter()

    def reconfigure(self, limits: CoordinatorLimits) -> None:
        """Go by other limits."""
        self._limits = limits
        self._budget.reconfigure(limits.recovery.retry_budget)

    def on_arrival(self, now_s: float) -> None:
        """A request is admitted; retries are limited to a share of these."""
        self._budget.record_arrival(now_s)

    def on_retry(self, retry: Retry) -> None:
        """A request is about to be placed again."""
        self._retry_counts[retry.reason] += 1

    def totals(self) -> RetryTotals:
        """The retries so far."""
        retry_counts = tuple((reason, self._retry_counts[reason]) for reason in RetryReason)
        return RetryTotals(retry_counts, self._budget.denied, self._health.openings)

    def check_integrity(self) -> None:
        """Raise AssertionError when the budget contradicts itself."""
        self._budget.check_integrity()

    # -------------------------------------------------------------- decisions

    def decide(self, state: RequestState, cause: RetryCause, now_s: float) -> Retry | Fail:
        """Whether to place a request again, whose failure is counted already."""
        where = f"{cause.replica_id}: {cause.detail}"
        if (error := self._given_up(state, cause, where)) is not None:
            return Fail(error)
        has_progressed = len(state.generated) > state.free_retry_at_tokens
        is_free = has_progressed and self._is_external(cause, now_s)
        if cause.reason in _UNCHARGED or is_free or self.spend(state, now_s):
            return Retry(cause.reason, where, is_free=is_free)
        reason = f"too many requests fail to try this one again ({where})"
        if state.generated:
            return Fail(EngineFailed(state.request_id, reason))
        return Fail(RetryBudgetExhausted(state.request_id, self._budget.retry_after_s(), reason))

    def _given_up(self, state: RequestState, cause: RetryCause, where: str) -> BatonError | None:
        """The error of a request that is not retried even within the budget; None: it may be."""
        if cause.reason is RetryReason.REPLICA_LOST and state.crashes >= _MAX_CRASHES:
            reason = f"{state.crashes} replicas in a row died while they ran it: {where}"
            return EngineFailed(state.request_id, reason)
        if state.failures > self._limits.max_failures:
            reason = f"gave up after {count_text(state.failures, 'failure')}, the last on {where}"
            return EngineFailed(state.request_id, reason)
        if is_unresumable(state):
            reason = (
                "its replica was lost after tokens had been sent, and it cannot be carried over"
            )
            return NotResumable(state.request_id, reason)
        return None

    def hedge_at_s(
        self, state: RequestState, decision: PlacementDecision, overruns: LatenessHistogram
    ) -> float:
        """When to look whether another replica would be quicker; inf: never.

        Not before some dozen first tokens have come: engines are slow to begin with, and their
        predictions are guesses.
        """
        if state.was_hedged or not overruns.is_known:
            return float("inf")
        overrun_s = overruns.quantile_s(OVERRUN_QUANTILE)
        delay_s = hedge_after_s(decision, overrun_s, self._limits.recovery.hedging)
        return float("inf") if delay_s is None else decision.at_s + delay_s

    def spend(self, state: RequestState, now_s: float) -> bool:
        """Have the budget pay for one more try; False when it is spent."""
        return self._budget.spend(now_s, has_output=bool(state.generated))

    def _is_external(self, cause: RetryCause, now_s: float) -> bool:
        """Whether the cause is over when the request is elsewhere."""
        return cause.reason in _EXTERNAL_CAUSES or (
            cause.reason in _REPLICA_FAULTS and self._health.is_outlier(cause.replica_id, now_s)
        )


def is_replica_at_fault(state: RequestState, cause: RetryCause) -> bool:
    """Whether a replica's circuit counts a failure; not where the request itself is suspect."""
    other_replicas = state.avoid - {cause.replica_id}
    return cause.reason in _REPLICA_FAULTS and len(other_replicas) < _POISON_REQUEST_THRESHOLD


def is_unresumable(state: RequestState) -> bool:
    """Whether it cannot go on elsewhere: its client has tokens, and others would not fit them."""
    return bool(state.generated) and not state.request.resumable


def is_failure(state: RequestState, cause: RetryCause) -> bool:
    """Whether a leg that is over counts towards `max_failures`; before its replica is avoided.

    A hedged leg may yet have gone well, and each request has one hedge. A draining replica's first
    refusal is no failure; a repeated one is, or it could refuse forever.
    """
    if cause.reason is RetryReason.DRAINING:
        return cause.replica_id in state.avoid
    return cause.reason is not RetryReason.HEDGED
