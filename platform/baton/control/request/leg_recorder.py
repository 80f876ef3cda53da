"""What the beginning and every end of a leg means for all that keep books of legs.

The book of legs, the accounts, what is known of prompts on their way, its replica's circuit, and
the request's own story hear of each leg once when it begins and once when it is over.
"""

from __future__ import annotations

from baton.control.accounting.accounts import Accounts
from baton.control.fleet.fleet_model import Knowledge
from baton.control.fleet.health import Health
from baton.control.fleet.leg_table import LegBook, PlacedLeg
from baton.control.state.request_state import Entry
from baton.domain.commands import AbortLegs, SubmitLeg
from baton.domain.handoff import Leg, LegKind, LegOutput
from baton.domain.leg_record import LegEnd
from baton.domain.value import evolve


class LegRunning:
    """Begins legs and takes in how they go and end."""

    def __init__(
        self, *, legs: LegBook, knowledge: Knowledge, accounts: Accounts, health: Health
    ) -> None:
        self._legs = legs
        self._knowledge = knowledge
        self._accounts = accounts
        self._health = health

    def begin(
        self, entry: Entry, leg: Leg, *, replica_id: str, tokens: int, now_s: float
    ) -> SubmitLeg:
        """Send a leg to a replica, which must compute so many tokens of its prompt."""
        leg = evolve(leg, uncached_tokens=tokens)
        entry.leg_began(leg, replica_id, now_s)
        # First, for the table says of an adapter that is sent for that it is there.
        self._knowledge.prompt_sent(leg, replica_id, tokens, now_s)
        self._legs.begin(leg, replica_id, tokens)
        self._health.began(replica_id, leg.leg_id, now_s)
        self._accounts.begun(entry, leg, replica_id)
        return SubmitLeg(replica_id=replica_id, leg=leg)

    def cached(self, entry: Entry, placed: PlacedLeg, tokens: int, now_s: float) -> None:
        """Its engine need not compute so many tokens of its prompt."""
        self._accounts.cached(placed.leg.leg_id, tokens)
        entry.running.cached_tokens = tokens
        if placed.leg.kind is not LegKind.DECODE:  # there, fetched blocks count as cached too
            self._knowledge.computed(entry, placed.replica_id, tokens, now_s)

    def spoke(self, entry: Entry, placed: PlacedLeg, output: LegOutput, now_s: float) -> None:
        """It gave its first output."""
        entry.running.spoke(now_s, output.times)
        self._health.spoke(placed.replica_id, output.leg_id, now_s)

    def finish(self, entry: Entry, placed: PlacedLeg, output: LegOutput, now_s: float) -> None:
        """It has done what it was for."""
        entry.running.said(output.times)
        self._legs.end(output.leg_id)
        self._over(entry, placed, LegEnd.DONE, now_s, produced=output.ticket is not None)

    def drop(self, entry: Entry, now_s: float, end: LegEnd = LegEnd.BROKEN) -> None:
        """It is over without a result; its replica holds nothing for it any more."""
        assert entry.leg_id is not None, "only an entry that runs a leg can drop it"
        placed = self._legs.end(entry.leg_id)
        assert placed is not None, f"leg {entry.leg_id} is not in the book"
        self._over(entry, placed, end, now_s)

    def abort(self, entry: Entry, end: LegEnd, now_s: float, *, until_s: float) -> AbortLegs:
        """Begin to close it, its lease with it; the abort should be confirmed until then."""
        assert entry.leg_id is not None, "only a running leg is aborted"
        leg_id, lease = entry.leg_id, entry.lease
        entry.lease = None
        placed = self._legs.close(leg_id, lease=lease, until_s=until_s)
        assert placed is not None, f"leg {leg_id} is not in the book"
        self._over(entry, placed, end, now_s)
        return AbortLegs(replica_id=placed.replica_id, leg_ids=(leg_id,))

    def _over(
        self,
        entry: Entry,
        placed: PlacedLeg,
        end: LegEnd,
        now_s: float,
        *,
        produced: bool | None = None,
    ) -> None:
        self._knowledge.prompts.computed(placed.leg.leg_id, now_s)
        self._accounts.leg_over(entry, placed, produced=produced)
        self._health.over(placed.replica_id, placed.leg.leg_id, now_s, done=end is LegEnd.DONE)
        entry.leg_over(end, now_s)
