"""The beginning, first output and end of each leg, for all that keep books of legs.

These are the request's own record, the leg table, the fleet model, the accounts, and the health of
the replica. Each hears of a leg once when it begins and once when it is over. They are called by
name: each needs other facts, and the order matters.
"""

from __future__ import annotations

from baton.control.accounting.accounts import Accounts
from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.health import ReplicaHealth
from baton.control.fleet.leg_table import DispatchedLeg, LegTable
from baton.control.state.request_state import RequestState
from baton.domain.commands import AbortLegs, SubmitLeg
from baton.domain.handoff import Leg, LegKind, LegOutput
from baton.domain.leg_record import LegOutcome
from baton.domain.value import evolve


class LegRecorder:
    """Begins legs and takes in how they go and end."""

    def __init__(
        self, *, legs: LegTable, fleet_model: FleetModel, accounts: Accounts, health: ReplicaHealth
    ) -> None:
        self._legs = legs
        self._fleet_model = fleet_model
        self._accounts = accounts
        self._health = health

    def begin(
        self, state: RequestState, leg: Leg, replica_id: str, now_s: float, *, tokens: int
    ) -> SubmitLeg:
        """Send a leg to a replica, which must compute so many tokens of its prompt."""
        leg = evolve(leg, uncached_tokens=tokens)
        state.on_leg_started(leg, replica_id, now_s)
        # First, for the table says of an adapter that is sent for that it is there.
        self._fleet_model.on_prefill_sent(leg, replica_id, tokens, now_s)
        self._legs.begin(leg, replica_id, tokens)
        self._health.on_leg_started(replica_id, leg.leg_id, now_s)
        self._accounts.on_leg_started(state, leg, replica_id)
        self._fleet_model.predict_cached(state, replica_id, len(leg.prompt_token_ids), now_s)
        return SubmitLeg(replica_id=replica_id, leg=leg)

    def record_cached(
        self, state: RequestState, dispatched: DispatchedLeg, tokens: int, now_s: float
    ) -> None:
        """Its engine need not compute so many tokens of its prompt."""
        self._accounts.on_cached_tokens(dispatched.leg.leg_id, tokens)
        state.running_leg.cached_tokens = tokens
        if dispatched.leg.kind is not LegKind.DECODE:  # there, fetched blocks count as cached too
            self._fleet_model.on_cached_tokens(state, dispatched.replica_id, tokens, now_s)

    def first_output(
        self, state: RequestState, dispatched: DispatchedLeg, output: LegOutput, now_s: float
    ) -> None:
        """It gave its first output: its prompt is computed."""
        self._fleet_model.pending_prefills.remove(output.leg_id, now_s)
        state.running_leg.first_output(now_s, output.times)
        self._health.on_first_output(dispatched.replica_id, output.leg_id, now_s)

    def finish(
        self, state: RequestState, dispatched: DispatchedLeg, output: LegOutput, now_s: float
    ) -> None:
        """It has done what it was for."""
        state.running_leg.note_times(output.times)
        self._legs.end(output.leg_id)
        self._on_ended(
            state, dispatched, LegOutcome.COMPLETED, now_s, has_output=output.kv_handle is not None
        )

    def failed(
        self, state: RequestState, now_s: float, outcome: LegOutcome = LegOutcome.FAILED
    ) -> None:
        """It is over without a result; its replica holds nothing for it any more."""
        assert state.leg_id is not None, "only an entry that runs a leg can drop it"
        dispatched = self._legs.end(state.leg_id)
        assert dispatched is not None, f"leg {state.leg_id} is not in the book"
        self._on_ended(state, dispatched, outcome, now_s)

    def abort(
        self, state: RequestState, outcome: LegOutcome, now_s: float, *, confirm_by_s: float
    ) -> AbortLegs:
        """Begin to close it, its lease with it; the abort should be confirmed until then."""
        assert state.leg_id is not None, "only a running leg is aborted"
        leg_id, lease = state.leg_id, state.lease
        state.lease = None
        dispatched = self._legs.begin_close(leg_id, lease=lease, confirm_by_s=confirm_by_s)
        assert dispatched is not None, f"leg {leg_id} is not in the book"
        self._on_ended(state, dispatched, outcome, now_s)
        return AbortLegs(replica_id=dispatched.replica_id, leg_ids=(leg_id,))

    def _on_ended(
        self,
        state: RequestState,
        dispatched: DispatchedLeg,
        outcome: LegOutcome,
        now_s: float,
        *,
        has_output: bool | None = None,
    ) -> None:
        self._fleet_model.pending_prefills.remove(dispatched.leg.leg_id, now_s)
        self._accounts.on_leg_ended(state, dispatched, has_output=has_output)
        self._health.on_leg_ended(
            dispatched.replica_id,
            dispatched.leg.leg_id,
            now_s,
            done=outcome is LegOutcome.COMPLETED,
        )
        state.on_leg_ended(outcome, now_s)
