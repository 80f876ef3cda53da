"""The book of legs: which run where, which are being aborted, and the leases tied to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.deadlines import Deadlines
from baton.domain.handoff import Lease, Leg, LegKind
from baton.domain.value import Value


class DispatchedLeg(Value, kw_only=True):
    """A leg on a replica, and the tokens that were charged to the replica for it."""

    leg: Leg
    replica_id: str
    tokens: int


class ClosingLeg(Value, kw_only=True):
    """A leg whose abort is not confirmed yet, and the lease that its abort is to end."""

    dispatched: DispatchedLeg
    lease: Lease | None


class LegTable:
    """Owns the charge of every running leg: a leg is charged once and discharged once."""

    def __init__(self, fleet: FleetTable) -> None:
        self._fleet = fleet
        self.ended_count = 0
        """How many have ended: growth shows that resources are free."""
        self._running: dict[str, DispatchedLeg] = {}
        self.get_running: Callable[[str], DispatchedLeg | None] = self._running.get
        """The running leg with this id; None when it has ended, is closing, or never was. It is
        asked for each output of each step, so it is the dictionary's own method."""
        self._closing: dict[str, ClosingLeg] = {}
        self._by_replica: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._abort_deadlines = Deadlines()

    def get_closing(self, leg_id: str) -> ClosingLeg | None:
        """The closing leg with this id, or None."""
        return self._closing.get(leg_id)

    def begin(self, leg: Leg, replica_id: str, tokens: int) -> None:
        """Note that `leg` runs on `replica_id`, which must compute `tokens` of its prompt."""
        self._running[leg.leg_id] = DispatchedLeg(leg=leg, replica_id=replica_id, tokens=tokens)
        self._by_replica[replica_id][leg.leg_id] = None
        decodes = leg.kind is not LegKind.PREFILL
        self._fleet.on_leg_sent(
            replica_id, leg.leg_id, tokens, decodes=decodes, adapter=leg.adapter
        )

    def end(self, leg_id: str) -> DispatchedLeg | None:
        """Take a running leg out, and discharge it; None when it is not running."""
        dispatched = self._running.pop(leg_id, None)
        if dispatched is not None:
            self.ended_count += 1
            self._unindex(dispatched)
            self._fleet.on_leg_ended(dispatched.replica_id, leg_id, dispatched.tokens)
        return dispatched

    def begin_close(
        self, leg_id: str, *, lease: Lease | None, confirm_by_s: float
    ) -> DispatchedLeg | None:
        """Turn a running leg into a closing one; None when it is not running."""
        dispatched = self.end(leg_id)
        if dispatched is not None:
            self._closing[leg_id] = ClosingLeg(dispatched=dispatched, lease=lease)
            self._by_replica[dispatched.replica_id][leg_id] = None
            self._abort_deadlines.arm(leg_id, confirm_by_s)
        return dispatched

    def confirm_closed(self, leg_id: str) -> ClosingLeg | None:
        """Take a closing leg out: its replica holds nothing for it any more."""
        closing = self._closing.pop(leg_id, None)
        if closing is not None:
            self._unindex(closing.dispatched)
            self._abort_deadlines.disarm(leg_id)
        return closing

    def legs_on(self, replica_id: str) -> tuple[list[DispatchedLeg], list[ClosingLeg]]:
        """The running and the closing legs on a replica, oldest first."""
        leg_ids = self._by_replica.get(replica_id, {})
        return (
            [self._running[leg_id] for leg_id in leg_ids if leg_id in self._running],
            [self._closing[leg_id] for leg_id in leg_ids if leg_id in self._closing],
        )

    def pop_overdue(self, now_s: float) -> Iterator[ClosingLeg]:
        """Take out the closing legs that no replica confirmed in time."""
        for leg_id in self._abort_deadlines.pop_due(now_s):
            if (closing := self.confirm_closed(leg_id)) is not None:
                yield closing

    def next_deadline_at_s(self) -> float | None:
        """When an unconfirmed abort is given up next."""
        return self._abort_deadlines.next_at_s()

    def check_integrity(self) -> None:
        """Raise AssertionError when charges, indexes and deadlines disagree."""
        both = self._running.keys() & self._closing.keys()
        assert not both, f"legs both running and closing: {sorted(both)}"
        indexed = {leg_id for legs in self._by_replica.values() for leg_id in legs}
        known = self._running.keys() | self._closing.keys()
        assert indexed == known, f"index and legs differ: {sorted(indexed ^ known)}"
        for leg_id in self._closing:
            assert leg_id in self._abort_deadlines, f"closing leg {leg_id} has no deadline"
        for replica_id, view in self._fleet.view(0.0).replicas.items():
            legs = [p for p in self._running.values() if p.replica_id == replica_id]
            charged = (view.inflight_legs, view.inflight_tokens)
            expected = (len(legs), sum(dispatched.tokens for dispatched in legs))
            assert charged == expected, (
                f"replica {replica_id} is charged {charged}, owes {expected}"
            )
        self._fleet.check_integrity()

    def closing_count(self) -> int:
        """How many aborts are not confirmed yet."""
        return len(self._closing)

    def _unindex(self, dispatched: DispatchedLeg) -> None:
        legs = self._by_replica[dispatched.replica_id]
        del legs[dispatched.leg.leg_id]
        if not legs:
            del self._by_replica[dispatched.replica_id]
