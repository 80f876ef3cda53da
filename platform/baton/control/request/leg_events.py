"""What replicas say of legs: outputs, failures, and aborts that are done.

Each is for a leg of a request, for one of a probe, or for one that is closing or was forgotten.
"""

from __future__ import annotations

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.health import Health
from baton.control.fleet.leg_table import ClosingLeg, LegBook
from baton.control.probing.prober import PairProber
from baton.control.request.lifecycle import BROKEN, REFUSALS, Journeys
from baton.control.state.request_state import request_of
from baton.domain.commands import Deliver, Delivery
from baton.domain.events import LegFailed, StepProduced
from baton.domain.handoff import LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason, LocalOnly, Phase
from baton.domain.retry_reasons import Trouble

NOT_THE_LINK = frozenset({LegFailure.OVERLOADED, LegFailure.UNREACHABLE, LegFailure.DRAINING})
"""Failures of a decode leg that say nothing of the way its blocks would have taken."""

_REFUSALS = frozenset({LegFailure.REFUSED, LegFailure.INVALID})

_TROUBLES = {
    LegFailure.KV_LOAD_FAILED: Trouble.HANDOFF,
    LegFailure.OVERLOADED: Trouble.FULL,
    LegFailure.UNREACHABLE: Trouble.LOST,
    LegFailure.DRAINING: Trouble.DRAINING,
}
"""What others than the engine's own failures mean."""


class LegEvents:
    """Takes them to whom they are for."""

    def __init__(
        self,
        *,
        journeys: Journeys,
        legs: LegBook,
        fleet: FleetTable,
        prober: PairProber,
        health: Health,
    ) -> None:
        self.ignored = 0
        """Those that belong to nothing known; late frames mostly."""
        self._journeys = journeys
        self._legs = legs
        self._fleet = fleet
        self._prober = prober
        self._health = health

    def step(self, event: StepProduced, now_s: float) -> None:
        """An engine step produced something for legs."""
        deliveries: list[Delivery] = []
        journeys, replica_id, running = self._journeys, event.replica_id, self._legs.running
        entry_of = journeys.entries.get
        for output in event.outputs:
            placed = running(output.leg_id)
            if placed is None or placed.replica_id != replica_id:
                self._late_output(output, replica_id, now_s)
                continue
            leg = placed.leg
            entry = entry_of(leg.request_id)
            if entry is None:  # what runs and is of no request is a probe's
                journeys.commands.extend(self._prober.output(output, now_s))
            elif output.finish in REFUSALS:
                why, own = str(output.stop_reason or ""), output.finish is FinishReason.INVALID
                journeys.refuse(entry, replica_id, why, now_s, own=own)
            elif leg.kind is LegKind.PREFILL:
                early = journeys.take_prefill(entry, output, placed, now_s)
                if early is not None:
                    deliveries.append(early)
            elif output.finish in BROKEN:
                why, trouble = f"the engine ended it in {output.finish}", Trouble.FAILED
                if entry.phase is Phase.TRANSFER:
                    entry.local_only, trouble = LocalOnly.HANDOFF_FAILED, Trouble.HANDOFF
                journeys.recovery.broken(entry, replica_id, why, now_s, trouble=trouble)
            else:
                deliveries.append(journeys.take_tokens(entry, output, placed, now_s))
        if deliveries:
            # First, so that a client has its last token before its request is recorded as ended.
            journeys.commands.insert(0, Deliver(deliveries=tuple(deliveries)))

    def _late_output(self, output: LegOutput, replica_id: str, now_s: float) -> None:
        """An output of a leg that is closing, or was forgotten; nobody waits for its blocks."""
        if output.ticket is not None:
            request_id = request_of(output.leg_id)
            lease = self._journeys.lease(
                request_id, output.leg_id, replica_id, output.ticket, now_s
            )
            self._journeys.release_lease(lease, now_s)
        elif output.finish in BROKEN or output.finish in REFUSALS:
            self._late_failure(output.leg_id, now_s)
        elif self._legs.closing(output.leg_id) is None:
            self.ignored += 1

    def failed(self, event: LegFailed, now_s: float) -> None:
        """A leg ended without its engine finishing it."""
        if not event.sent:
            self._fleet.unsent(event.replica_id, event.leg_id)
        placed = self._legs.running(event.leg_id)
        if placed is None or placed.replica_id != event.replica_id:
            self._late_failure(event.leg_id, now_s)
            return
        if self._prober.owns(event.leg_id):
            self._journeys.commands.extend(self._prober.leg_failed(event, now_s))
            return
        entry = self._journeys.entries[placed.leg.request_id]
        if event.failure in _REFUSALS:
            own = event.failure is LegFailure.INVALID
            self._journeys.refuse(entry, event.replica_id, event.why, now_s, own=own)
            return
        if event.failure is LegFailure.KV_LOAD_FAILED:
            entry.local_only = LocalOnly.HANDOFF_FAILED
        if event.failure in NOT_THE_LINK:
            self._journeys.flows.end(entry, now_s)
        why = f"{event.failure} {event.why}".strip()
        trouble = _TROUBLES.get(event.failure, Trouble.FAILED)
        self._journeys.recovery.broken(entry, event.replica_id, why, now_s, trouble=trouble)

    def _late_failure(self, leg_id: str, now_s: float) -> None:
        # Unlike a confirmed abort, a failure says nothing about the blocks the leg was to pull.
        if (closing := self._legs.confirm(leg_id)) is None:
            self.ignored += 1
        else:
            self.release_orphan(closing, now_s)

    def aborted(self, leg_ids: tuple[str, ...]) -> None:
        """Replicas confirm that these legs are gone."""
        # A confirmed abort of a decode leg has ended its lease too: engines see to that.
        for leg_id in leg_ids:
            if self._legs.confirm(leg_id) is None:
                self.ignored += 1

    def unconfirmed(self, closing: ClosingLeg, now_s: float) -> None:
        """A replica did not say in time that a leg is gone: that counts against it."""
        placed = closing.placed
        why = "an abort was not confirmed"
        self._health.failed(placed.replica_id, placed.leg.leg_id, now_s, why)
        self.release_orphan(closing, now_s)

    def release_orphan(self, closing: ClosingLeg, now_s: float) -> None:
        """A leg is gone that was closing: its lease, if it had one, ends with it."""
        if closing.lease is not None:
            self._journeys.release_lease(closing.lease, now_s)
