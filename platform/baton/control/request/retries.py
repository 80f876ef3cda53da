"""What is done when a request can not stay where it runs: tried again elsewhere, or given up.

*Theory of operation.* A leg breaks, is given up by a deadline, or its replica is left as a whole.
The request is then placed again, with the tokens that its client has as part of its prompt. Four
things bound how often:

- no more than `max_failures` failed legs of one request; one that is hedged, or that a
  replica refuses for the first time because it drains, has not failed;
- no more than `_MOST_CRASHES` replicas in a row that die with a request that gets no further;
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

from baton.control.fleet.fleet_model import Knowledge
from baton.control.fleet.health import Health
from baton.control.fleet.leg_table import LegBook
from baton.control.request.leg_recorder import LegRunning
from baton.control.request.transfers import Flows
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import Entry
from baton.domain.commands import Command
from baton.domain.errors import BatonError, EngineFailed, NotResumable, RetriesSpent
from baton.domain.handoff import Decision
from baton.domain.leg_record import LegEnd
from baton.domain.request import LocalOnly, Phase
from baton.domain.retry_reasons import Recoveries, Trouble
from baton.domain.value import evolve
from baton.policy.placement.port import NoRoute, Placer
from baton.policy.resilience.hedging import LATEST_OF_HUNDRED, is_better, late_after_s
from baton.policy.resilience.retry_budget import RetryBudget

_BLAMED = frozenset({Trouble.FAILED, Trouble.LATE, Trouble.STALLED})
"""Troubles that a replica's circuit counts; those of all its requests at once trip it."""
_OUTSIDE = frozenset({Trouble.LOST, Trouble.SILENT, Trouble.STILL, Trouble.HANDOFF})
"""Troubles whose cause is over when the request is elsewhere."""
_POISON = 2
"""A request that has failed on so many replicas is more likely to blame than the next one."""
_MOST_CRASHES = 3
"""Replicas that may die with a request that gets no further: it may be what ends them."""
_ALMOST = 0.9
"""Of a stall: reports of the last step come a little after it."""


class Recovering(Protocol):
    """What is done with requests that are tried again."""

    limits: CoordinatorLimits
    entries: dict[str, Entry]
    commands: list[Command]
    flows: Flows
    running: LegRunning
    placer: Placer

    def place(self, entry: Entry, now_s: float, *, hold_if_tried: bool = False) -> None:
        """Begin a route, or wait."""
        ...

    def release(self, entry: Entry, now_s: float) -> None:
        """End its lease."""
        ...

    def wait_until(self, entry: Entry, at_s: float) -> None:
        """Set the deadline of the phase that the entry is in."""
        ...

    def fail(self, entry: Entry, error: BatonError, now_s: float) -> None:
        """End a request in FAILED."""
        ...

    def end(
        self,
        entry: Entry,
        outcome: Phase,
        now_s: float,
        *,
        reason: str,
        error: BatonError | None = None,
    ) -> None:
        """Take the last edge."""
        ...


class Recovery:
    """Second tries of one coordinator's requests."""

    def __init__(
        self, journeys: Recovering, *, health: Health, legs: LegBook, knowledge: Knowledge
    ) -> None:
        self._journeys = journeys
        self._health = health
        self._legs = legs
        self._knowledge = knowledge
        self.budget = RetryBudget(journeys.limits.recovery.retries)
        self._tries: Counter[Trouble] = Counter()

    def totals(self) -> Recoveries:
        """What has been done so far."""
        tries = tuple((trouble, self._tries[trouble]) for trouble in Trouble)
        return Recoveries(tries, self.budget.refused, self._health.openings)

    # -------------------------------------------------------------- one leg

    def broken(
        self, entry: Entry, replica_id: str, why: str, now_s: float, *, trouble: Trouble
    ) -> None:
        """The running leg is over without a result; there is nothing left to abort."""
        self._blame(entry, replica_id, why, now_s, trouble)
        self._journeys.flows.end(entry, now_s, failed=why)
        self._journeys.running.drop(entry, now_s)
        self._try_elsewhere(entry, replica_id, why, now_s, trouble=trouble)

    def give_up(self, entry: Entry, now_s: float) -> None:
        """Abort the running leg, because its time is over, and go on elsewhere.

        Where its engine has not done a step for about as long, whatever runs there goes, too.
        """
        replica_id, leg_id = entry.running.replica_id, entry.leg_id
        if self._leave_still(replica_id, now_s) and entry.leg_id != leg_id:
            return
        why, trouble = f"no progress in phase {entry.phase}", Trouble.STALLED
        if entry.phase is Phase.TRANSFER:
            entry.local_only, trouble = LocalOnly.HANDOFF_FAILED, Trouble.HANDOFF
            self._journeys.flows.end(entry, now_s, failed=why)
        elif entry.phase is Phase.PREFILL:
            trouble = Trouble.LATE
        self._blame(entry, replica_id, why, now_s, trouble)
        self.abort(entry, LegEnd.GIVEN_UP, now_s)
        self._try_elsewhere(entry, replica_id, why, now_s, trouble=trouble)

    def move(self, entry: Entry, now_s: float) -> None:
        """Take a stream off its replica, which drains, and go on elsewhere; nothing has failed."""
        replica_id = self.abort(entry, LegEnd.MOVED, now_s)
        self.resume(entry, f"{replica_id}: it drains", now_s, trouble=Trouble.DRAINING)

    # -------------------------------------------------------------- all of a replica's

    def leave(self, replica_id: str, trouble: Trouble, why: str, now_s: float) -> None:
        """Take everything off a replica that can go on elsewhere; streams first, they pause.

        All at once: each pauses anyway, and waits better in an engine that computes than here.
        """
        for entry in self.on_replica(replica_id):
            if _is_stuck(entry):
                continue  # it would end; where it is it may go on
            self._journeys.flows.end(entry, now_s)
            self.abort(entry, LegEnd.GIVEN_UP, now_s)
            self._try_elsewhere(entry, replica_id, why, now_s, trouble=trouble)

    def leave_silent(self, replica_id: str, now_s: float) -> None:
        """Nothing was heard of a replica for as long as is borne."""
        silent_s = self._health.silent_s(replica_id, now_s)
        why = f"watchdog: nothing was heard of it for {silent_s:.1f} s"
        self.leave(replica_id, Trouble.SILENT, why, now_s)

    def _leave_still(self, replica_id: str, now_s: float) -> bool:
        """Leave a replica whose engine hangs, if there is another; whether that was done."""
        stall_s = self._journeys.limits.stall_s
        if not self._health.is_still(replica_id, now_s, for_s=_ALMOST * stall_s):
            return False
        self._health.trip(
            replica_id, now_s, f"its engine did no step for {stall_s:g} s", pauses=True
        )
        if not self._health.is_known_to_ail(replica_id, now_s):
            return False
        why = f"watchdog: its engine did no step for {stall_s:g} s"
        self.leave(replica_id, Trouble.STILL, why, now_s)
        return True

    def on_replica(self, replica_id: str) -> list[Entry]:
        """Requests that run there, those with tokens first, else the oldest; probes are none."""
        running, _ = self._legs.on_replica(replica_id)
        entries = self._journeys.entries
        found = [entries[p.leg.request_id] for p in running if p.leg.request_id in entries]
        return sorted(found, key=lambda entry: not entry.generated)

    # -------------------------------------------------------------- hedges

    def hedge_at_s(self, entry: Entry, decision: Decision) -> float:
        """When to look whether another replica would be quicker; inf: never.

        Not before some dozen first tokens have come: engines are slow to begin with, and what is
        predicted of them is a guess.
        """
        overruns = self._knowledge.overruns
        if entry.hedged or not overruns.is_known:
            return float("inf")
        options = self._journeys.limits.recovery.hedge
        after_s = late_after_s(decision, overruns.quantile_s(LATEST_OF_HUNDRED), options)
        return float("inf") if after_s is None else decision.at_s + after_s

    def hedge(self, entry: Entry, now_s: float) -> None:
        """Its first token is late: begin again where there is nothing to do, if that is better.

        Once for each request; otherwise it waits on until its deadline.
        """
        entry.hedged = True
        silent_id, waited_s = entry.running.replica_id, now_s - entry.running.began_at_s
        query = self._knowledge.query(entry, now_s)
        query = evolve(query, avoid=query.avoid | {silent_id})
        other = self._journeys.placer.place(query, self._knowledge.around(now_s))
        options = self._journeys.limits.recovery.hedge
        if (
            isinstance(other, NoRoute)
            or not is_better(other, avoid=query.avoid, waited_s=waited_s, options=options)
            or not self.budget.take(now_s, carries=bool(entry.generated))
        ):
            self._journeys.wait_until(entry, entry.first_token_due_at_s)
            return
        why = f"hedge: no first token in {waited_s:.1f} s, another replica has nothing to do"
        self._health.doubted(silent_id, entry.running.leg.leg_id, now_s, why)
        self.abort(entry, LegEnd.GIVEN_UP, now_s)
        self._try_elsewhere(entry, silent_id, why, now_s, trouble=Trouble.HEDGED)

    # -------------------------------------------------------------- trying again

    def resume(self, entry: Entry, why: str, now_s: float, *, trouble: Trouble) -> None:
        """Place again; what was delivered becomes part of the prompt."""
        if _is_stuck(entry):
            lost = "its replica was lost after tokens had been sent, and it cannot be carried over"
            self._journeys.fail(entry, NotResumable(entry.request_id, lost), now_s)
            return
        self._tries[trouble] += 1
        entry.resumes += 1
        entry.resume_reasons.append(why)
        entry.move(Phase.RESUME)
        self._journeys.place(entry, now_s, hold_if_tried=True)

    def _try_elsewhere(
        self, entry: Entry, replica_id: str, why: str, now_s: float, *, trouble: Trouble
    ) -> None:
        self._journeys.release(entry, now_s)
        entry.failures += _is_failure(entry, replica_id, trouble)
        entry.avoid |= {replica_id}
        if trouble is Trouble.LOST and entry.crashes >= _MOST_CRASHES:
            why = f"{entry.crashes} replicas in a row died while they ran it: {replica_id}: {why}"
            self._journeys.fail(entry, EngineFailed(entry.request_id, why), now_s)
        elif entry.failures > self._journeys.limits.max_failures:
            why = f"gave up after {entry.failures} failures, the last on {replica_id}: {why}"
            self._journeys.fail(entry, EngineFailed(entry.request_id, why), now_s)
        elif self._may_try(entry, replica_id, now_s, trouble):
            self.resume(entry, f"{replica_id}: {why}", now_s, trouble=trouble)
        else:
            self._refuse(entry, f"{replica_id}: {why}", now_s)

    def _may_try(self, entry: Entry, replica_id: str, now_s: float, trouble: Trouble) -> bool:
        """Whether it may be tried again; see the module for who pays.

        Nothing has failed where a replica drains, a hedge has paid already, and who cannot be
        carried over is told so (`resume`) and costs nothing.
        """
        if trouble in {Trouble.DRAINING, Trouble.HEDGED} or _is_stuck(entry):
            return True
        ails = trouble in _BLAMED and self._health.is_known_to_ail(replica_id, now_s)
        if (ails or trouble in _OUTSIDE) and len(entry.generated) > entry.excused_at_tokens:
            entry.excused_at_tokens = len(entry.generated)
            return True
        return self.budget.take(now_s, carries=bool(entry.generated))

    def _refuse(self, entry: Entry, why: str, now_s: float) -> None:
        """The budget is spent: say so, before the fleet is asked for more than it can do."""
        told = f"too many requests fail to try this one again ({why})"
        if entry.generated:
            self._journeys.fail(entry, EngineFailed(entry.request_id, told), now_s)
            return
        error = RetriesSpent(entry.request_id, self.budget.retry_after_s(), told)
        self._journeys.fail(entry, error, now_s)

    def _blame(
        self, entry: Entry, replica_id: str, why: str, now_s: float, trouble: Trouble
    ) -> None:
        """Have the replica's circuit count it, unless the request itself is under suspicion."""
        if trouble in _BLAMED and len(entry.avoid - {replica_id}) < _POISON:
            self._health.failed(replica_id, entry.running.leg.leg_id, now_s, why)

    def abort(self, entry: Entry, end: LegEnd, now_s: float) -> str:
        """Begin to close the running leg. Returns its replica."""
        until_s = now_s + self._journeys.limits.abort_s
        order = self._journeys.running.abort(entry, end, now_s, until_s=until_s)
        self._journeys.commands.append(order)
        return order.replica_id


def _is_stuck(entry: Entry) -> bool:
    """Whether it cannot go on elsewhere: its client has tokens, and others would not fit them."""
    return bool(entry.generated) and not entry.request.resumable


def _is_failure(entry: Entry, replica_id: str, trouble: Trouble) -> bool:
    """Whether a leg that is over counts towards `max_failures`; before its replica is avoided.

    A hedge is for a leg that may yet go well, and there is one for each request. Who drains says so
    once: a replica that is asked again, since there is no other, may refuse for ever.
    """
    if trouble is Trouble.DRAINING:
        return replica_id in entry.avoid
    return trouble is not Trouble.HEDGED
