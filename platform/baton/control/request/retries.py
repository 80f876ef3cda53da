"""What is done when a request can not stay where it runs: tried again elsewhere, or given up.

*Theory of operation.* A leg breaks, is given up by a deadline, or its replica is left as a whole.
The request is then placed again, with the tokens that its client has as part of its prompt. Four
things bound how often:

- no more than `max_failures` failed legs of one request; one that is hedged, or that a
  replica refuses for the first time because it drains, has not failed;
- no more than `_MAX_CRASHES` replicas in a row that die with a request that gets no further;
- a request that cannot be carried over ends once its client has tokens;
- the *retry budget* (`policy.retry_budget`): second tries are a share of what arrives.

The budget is there for failures that breed failures. One that has a cause outside of the request,
and is over once the request has left, breeds none: its replica was lost, frozen or is known to ail
while others are well, or a handoff failed and will not be tried for it again. Such a second try is
*free*, so that the many streams of one lost replica are all carried over; and free again for who
has got further since, as a long stream may well outlive two replicas. A request that gets nowhere
in between pays, so that one which kills its replicas is not carried from each to the next.
What drains has not failed and costs nothing.

When the budget is spent, a client that has got nothing is told to come back (503); one that has
tokens is told in its stream.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.health import ReplicaHealth
from baton.control.fleet.leg_table import LegTable
from baton.control.request.leg_recorder import LegRecorder
from baton.control.request.transfers import InFlightTransfers
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import RequestState
from baton.domain.commands import Command
from baton.domain.errors import BatonError, EngineFailed, NotResumable, RetryBudgetExhausted
from baton.domain.handoff import PlacementDecision
from baton.domain.leg_record import LegOutcome
from baton.domain.request import LocalOnlyReason, Phase
from baton.domain.retry_reasons import RetryReason, RetryTotals
from baton.domain.value import evolve
from baton.policy.placement.port import NoRoute, Placer
from baton.policy.resilience.hedging import OVERRUN_QUANTILE, hedge_after_s, is_better_alternative
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
_POISON_REQUEST_THRESHOLD = 2
"""A request that has failed on so many replicas is more likely to blame than the next one."""
_MAX_CRASHES = 3
"""Replicas that may die with a request that gets no further: it may be what ends them."""
_STALL_FRACTION = 0.9
"""Of a stall: reports of the last step come a little after it."""


class RetryContext(Protocol):
    """What is done with requests that are tried again."""

    limits: CoordinatorLimits
    requests: dict[str, RequestState]
    commands: list[Command]
    transfers: InFlightTransfers
    leg_recorder: LegRecorder
    placer: Placer

    def place(self, state: RequestState, now_s: float, *, delay_if_tried: bool = False) -> None:
        """Begin a route, or wait."""
        ...

    def end_lease(self, state: RequestState, now_s: float) -> None:
        """End its lease."""
        ...

    def set_deadline(self, state: RequestState, at_s: float) -> None:
        """Set the deadline of the phase that the entry is in."""
        ...

    def fail(self, state: RequestState, error: BatonError, now_s: float) -> None:
        """End a request in FAILED."""
        ...

    def end(
        self,
        state: RequestState,
        outcome: Phase,
        now_s: float,
        *,
        reason: str,
        error: BatonError | None = None,
    ) -> None:
        """Take the last edge."""
        ...


class RequestRetries:
    """Second tries of one coordinator's requests."""

    def __init__(
        self,
        lifecycle: RetryContext,
        *,
        health: ReplicaHealth,
        legs: LegTable,
        fleet_model: FleetModel,
    ) -> None:
        self._lifecycle = lifecycle
        self._health = health
        self._legs = legs
        self._fleet_model = fleet_model
        self.budget = RetryBudget(lifecycle.limits.recovery.retries)
        self._retry_counts: Counter[RetryReason] = Counter()

    def totals(self) -> RetryTotals:
        """What has been done so far."""
        retry_counts = tuple(
            (retry_reason, self._retry_counts[retry_reason]) for retry_reason in RetryReason
        )
        return RetryTotals(retry_counts, self.budget.denied, self._health.openings)

    # -------------------------------------------------------------- one leg

    def leg_failed(
        self,
        state: RequestState,
        replica_id: str,
        why: str,
        now_s: float,
        *,
        retry_reason: RetryReason,
    ) -> None:
        """The running leg is over without a result; there is nothing left to abort."""
        self._count_failure(state, replica_id, why, now_s, retry_reason)
        self._lifecycle.transfers.end(state, now_s, failure=why)
        self._lifecycle.leg_recorder.failed(state, now_s)
        self._retry_elsewhere(state, replica_id, why, now_s, retry_reason=retry_reason)

    def timed_out(self, state: RequestState, now_s: float) -> None:
        """Abort the running leg, because its time is over, and go on elsewhere.

        Where its engine has not done a step for about as long, whatever runs there goes, too.
        """
        replica_id, leg_id = state.running_leg.replica_id, state.leg_id
        if self._evacuate_stalled(replica_id, now_s) and state.leg_id != leg_id:
            return
        why, retry_reason = f"no progress in phase {state.phase}", RetryReason.TOKEN_TIMEOUT
        if state.phase is Phase.TRANSFER:
            state.local_only, retry_reason = (
                LocalOnlyReason.HANDOFF_FAILED,
                RetryReason.HANDOFF_FAILED,
            )
            self._lifecycle.transfers.end(state, now_s, failure=why)
        elif state.phase is Phase.PREFILL:
            retry_reason = RetryReason.FIRST_TOKEN_TIMEOUT
        self._count_failure(state, replica_id, why, now_s, retry_reason)
        self.abort(state, LegOutcome.TIMED_OUT, now_s)
        self._retry_elsewhere(state, replica_id, why, now_s, retry_reason=retry_reason)

    def migrate(self, state: RequestState, now_s: float) -> None:
        """Take a stream off its replica, which drains, and go on elsewhere; nothing has failed."""
        replica_id = self.abort(state, LegOutcome.MIGRATED, now_s)
        self.resume(state, f"{replica_id}: it drains", now_s, retry_reason=RetryReason.DRAINING)

    # -------------------------------------------------------------- all of a replica's

    def evacuate(self, replica_id: str, retry_reason: RetryReason, why: str, now_s: float) -> None:
        """Take everything off a replica that can go on elsewhere; streams first, they pause.

        All at once: each pauses anyway, and waits better in an engine that computes than here.
        """
        for state in self.requests_on(replica_id):
            if _is_unresumable(state):
                continue  # it would end; where it is it may go on
            self._lifecycle.transfers.end(state, now_s)
            self.abort(state, LegOutcome.TIMED_OUT, now_s)
            self._retry_elsewhere(state, replica_id, why, now_s, retry_reason=retry_reason)

    def evacuate_unresponsive(self, replica_id: str, now_s: float) -> None:
        """Nothing was heard of a replica for as long as is borne."""
        unresponsive_s = self._health.unresponsive_s(replica_id, now_s)
        why = f"watchdog: nothing was heard of it for {unresponsive_s:.1f} s"
        self.evacuate(replica_id, RetryReason.UNRESPONSIVE, why, now_s)

    def _evacuate_stalled(self, replica_id: str, now_s: float) -> bool:
        """Leave a replica whose engine hangs, if there is another; whether that was done."""
        stall_s = self._lifecycle.limits.stall_s
        if not self._health.is_stalled(replica_id, now_s, for_s=_STALL_FRACTION * stall_s):
            return False
        self._health.trip(
            replica_id, now_s, f"its engine did no step for {stall_s:g} s", with_pause=True
        )
        if not self._health.is_outlier(replica_id, now_s):
            return False
        why = f"watchdog: its engine did no step for {stall_s:g} s"
        self.evacuate(replica_id, RetryReason.ENGINE_STALLED, why, now_s)
        return True

    def requests_on(self, replica_id: str) -> list[RequestState]:
        """Requests that run there, those with tokens first, else the oldest; probes are none."""
        running, _ = self._legs.legs_on(replica_id)
        requests = self._lifecycle.requests
        matching = [requests[p.leg.request_id] for p in running if p.leg.request_id in requests]
        return sorted(matching, key=lambda entry: not entry.generated)

    # -------------------------------------------------------------- hedges

    def hedge_at_s(self, state: RequestState, decision: PlacementDecision) -> float:
        """When to look whether another replica would be quicker; inf: never.

        Not before some dozen first tokens have come: engines are slow to begin with, and what is
        predicted of them is a guess.
        """
        overruns = self._fleet_model.ttft_overruns
        if state.was_hedged or not overruns.is_known:
            return float("inf")
        options = self._lifecycle.limits.recovery.hedge
        delay_s = hedge_after_s(decision, overruns.quantile_s(OVERRUN_QUANTILE), options)
        return float("inf") if delay_s is None else decision.at_s + delay_s

    def hedge(self, state: RequestState, now_s: float) -> None:
        """Its first token is late: begin again where there is nothing to do, if that is better.

        Once for each request; otherwise it waits on until its deadline.
        """
        state.was_hedged = True
        slow_id, waited_s = state.running_leg.replica_id, now_s - state.running_leg.started_at_s
        query = self._fleet_model.placement_query(state, now_s)
        query = evolve(query, avoid=query.avoid | {slow_id})
        alternative = self._lifecycle.placer.place(
            query, self._fleet_model.placement_context(now_s)
        )
        options = self._lifecycle.limits.recovery.hedge
        if (
            isinstance(alternative, NoRoute)
            or not is_better_alternative(
                alternative, avoid=query.avoid, waited_s=waited_s, options=options
            )
            or not self.budget.spend(now_s, has_output=bool(state.generated))
        ):
            self._lifecycle.set_deadline(state, state.first_token_due_at_s)
            return
        why = f"hedge: no first token in {waited_s:.1f} s, another replica has nothing to do"
        self._health.on_slow_leg(slow_id, state.running_leg.leg.leg_id, now_s, why)
        self.abort(state, LegOutcome.TIMED_OUT, now_s)
        self._retry_elsewhere(state, slow_id, why, now_s, retry_reason=RetryReason.HEDGED)

    # -------------------------------------------------------------- trying again

    def resume(
        self, state: RequestState, why: str, now_s: float, *, retry_reason: RetryReason
    ) -> None:
        """Place again; what was delivered becomes part of the prompt."""
        if _is_unresumable(state):
            message = (
                "its replica was lost after tokens had been sent, and it cannot be carried over"
            )
            self._lifecycle.fail(state, NotResumable(state.request_id, message), now_s)
            return
        self._retry_counts[retry_reason] += 1
        state.resumes += 1
        state.resume_reasons.append(why)
        state.transition_to(Phase.RESUME)
        self._lifecycle.place(state, now_s, delay_if_tried=True)

    def _retry_elsewhere(
        self,
        state: RequestState,
        replica_id: str,
        why: str,
        now_s: float,
        *,
        retry_reason: RetryReason,
    ) -> None:
        self._lifecycle.end_lease(state, now_s)
        state.failures += _is_failure(state, replica_id, retry_reason)
        state.avoid |= {replica_id}
        if retry_reason is RetryReason.REPLICA_LOST and state.crashes >= _MAX_CRASHES:
            why = f"{state.crashes} replicas in a row died while they ran it: {replica_id}: {why}"
            self._lifecycle.fail(state, EngineFailed(state.request_id, why), now_s)
        elif state.failures > self._lifecycle.limits.max_failures:
            why = f"gave up after {state.failures} failures, the last on {replica_id}: {why}"
            self._lifecycle.fail(state, EngineFailed(state.request_id, why), now_s)
        elif self._may_retry(state, replica_id, now_s, retry_reason):
            self.resume(state, f"{replica_id}: {why}", now_s, retry_reason=retry_reason)
        else:
            self._fail_over_budget(state, f"{replica_id}: {why}", now_s)

    def _may_retry(
        self, state: RequestState, replica_id: str, now_s: float, retry_reason: RetryReason
    ) -> bool:
        """Whether it may be tried again; see the module for who pays.

        Nothing has failed where a replica drains, a hedge has paid already, and who cannot be
        carried over is told so (`resume`) and costs nothing.
        """
        if retry_reason in {RetryReason.DRAINING, RetryReason.HEDGED} or _is_unresumable(state):
            return True
        is_unhealthy = retry_reason in _REPLICA_FAULTS and self._health.is_outlier(
            replica_id, now_s
        )
        if (is_unhealthy or retry_reason in _EXTERNAL_CAUSES) and len(
            state.generated
        ) > state.free_retry_at_tokens:
            state.free_retry_at_tokens = len(state.generated)
            return True
        return self.budget.spend(now_s, has_output=bool(state.generated))

    def _fail_over_budget(self, state: RequestState, why: str, now_s: float) -> None:
        """The budget is spent: say so, before the fleet is asked for more than it can do."""
        message = f"too many requests fail to try this one again ({why})"
        if state.generated:
            self._lifecycle.fail(state, EngineFailed(state.request_id, message), now_s)
            return
        error = RetryBudgetExhausted(state.request_id, self.budget.retry_after_s(), message)
        self._lifecycle.fail(state, error, now_s)

    def _count_failure(
        self,
        state: RequestState,
        replica_id: str,
        why: str,
        now_s: float,
        retry_reason: RetryReason,
    ) -> None:
        """Have the replica's circuit count it, unless the request itself is under suspicion."""
        if (
            retry_reason in _REPLICA_FAULTS
            and len(state.avoid - {replica_id}) < _POISON_REQUEST_THRESHOLD
        ):
            self._health.on_leg_failed(replica_id, state.running_leg.leg.leg_id, now_s, why)

    def abort(self, state: RequestState, outcome: LegOutcome, now_s: float) -> str:
        """Begin to close the running leg. Returns its replica."""
        confirm_by_s = now_s + self._lifecycle.limits.abort_s
        command = self._lifecycle.leg_recorder.abort(
            state, outcome, now_s, confirm_by_s=confirm_by_s
        )
        self._lifecycle.commands.append(command)
        return command.replica_id


def _is_unresumable(state: RequestState) -> bool:
    """Whether it cannot go on elsewhere: its client has tokens, and others would not fit them."""
    return bool(state.generated) and not state.request.resumable


def _is_failure(state: RequestState, replica_id: str, retry_reason: RetryReason) -> bool:
    """Whether a leg that is over counts towards `max_failures`; before its replica is avoided.

    A hedge is for a leg that may yet go well, and there is one for each request. Who drains says so
    once: a replica that is asked again, since there is no other, may refuse for ever.
    """
    if retry_reason is RetryReason.DRAINING:
        return replica_id in state.avoid
    return retry_reason is not RetryReason.HEDGED
