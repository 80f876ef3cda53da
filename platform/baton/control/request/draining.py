"""Draining replicas: their streams may end there, and those that take too long are migrated.

*Theory of operation.* A draining replica gets no new work, and its existing work goes on. Streams
that have not ended after `drain_timeout_s` are migrated: aborted, and resumed elsewhere with their
tokens. So a replica is free after a time that does not depend on the length of answers.

A migration costs a prefill, and a pause in a stream. Hence at most `max_drain_migrations` are under
way over all replicas; each counts until its next token or its end. A stream ends where it is while
no other replica has room, or when it cannot be resumed. Only streams migrate: a request without a
token gets its first soon.

`start_due_migrations` returns the streams to migrate now; the caller migrates them. It acts only at
`next_at_s`: at the end of a drain timeout, and a few times a second while a stream is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import LegTable
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import RequestState
from baton.domain.fleet import ReplicaView
from baton.domain.request import Phase

_CHECK_INTERVAL_S = 0.25
"""Between two looks: as often as replicas report their loads."""
_MAX_KV_USED_FRACTION = 0.95
"""Share of a KV cache beyond which blocks may run out, and streams be preempted."""


class DrainingReplicas:
    """The draining replicas of one coordinator, and their migrations."""

    def __init__(self, limits: CoordinatorLimits, fleet: FleetTable, legs: LegTable) -> None:
        self._limits = limits
        self._fleet = fleet
        self._legs = legs
        self._next_check_at_s: dict[str, float] = {}
        """By replica that drains and still runs something."""
        self._migrating: set[str] = set()
        """Requests that were moved and have not got a token since."""

    def reconfigure(self, limits: CoordinatorLimits) -> None:
        """Go on with other limits; a drain timeout that has begun stays as it is."""
        self._limits = limits

    def begin(self, replica_id: str, now_s: float) -> None:
        """A replica drains from now on; a repetition does not begin its timeout again."""
        if replica_id in self._fleet:
            self._next_check_at_s.setdefault(replica_id, now_s + self._limits.drain_timeout_s)

    def remove(self, replica_id: str) -> None:
        """A replica is gone, or new."""
        self._next_check_at_s.pop(replica_id, None)

    def next_at_s(self) -> float | None:
        """When to look next; None while nothing drains."""
        return min(self._next_check_at_s.values()) if self._next_check_at_s else None

    def start_due_migrations(
        self, requests: Mapping[str, RequestState], now_s: float
    ) -> tuple[RequestState, ...]:
        """The streams that are to be moved now, oldest first. They count as under way."""
        overdue = [
            replica_id for replica_id, at_s in self._next_check_at_s.items() if at_s <= now_s
        ]
        if not overdue:
            return ()
        self._migrating = {
            replica_id for replica_id in self._migrating if _is_migrating(requests.get(replica_id))
        }
        chosen: list[RequestState] = []
        for replica_id in overdue:
            remaining = self._requests_on(replica_id, requests)
            if not remaining:
                del self._next_check_at_s[replica_id]
                continue
            self._next_check_at_s[replica_id] = now_s + _CHECK_INTERVAL_S
            chosen.extend(state for state in remaining if self._can_migrate(state, now_s))
        chosen = chosen[: max(0, self._limits.max_drain_migrations - len(self._migrating))]
        self._migrating.update(state.request_id for state in chosen)
        return tuple(chosen)

    def check_integrity(self) -> None:
        """Raise AssertionError when something is remembered of replicas that do not drain."""
        for replica_id in self._next_check_at_s:
            view = self._fleet.get(replica_id)
            assert view is not None, f"{replica_id} drains and is gone"
            assert view.draining, f"{replica_id} is looked at and does not drain"

    def _requests_on(
        self, replica_id: str, requests: Mapping[str, RequestState]
    ) -> list[RequestState]:
        """Requests that still run there; probes are none."""
        running, _ = self._legs.legs_on(replica_id)
        request_ids = (dispatched.leg.request_id for dispatched in running)
        return [requests[request_id] for request_id in request_ids if request_id in requests]

    def _can_migrate(self, state: RequestState, now_s: float) -> bool:
        if state.phase is not Phase.DECODE or not state.request.resumable:
            return False
        tokens = state.token_count
        return any(_has_room(view, tokens) for view in self._other_replicas(state, now_s))

    def _other_replicas(self, state: RequestState, now_s: float) -> Iterator[ReplicaView]:
        """Replicas that take new work, and have not failed it; drained replicas excluded."""
        fleet = self._fleet.view(now_s)
        for replica_id in fleet.eligible.decode or fleet.eligible.prefill:
            if replica_id not in state.avoid:
                yield fleet.replicas[replica_id]


def _is_migrating(state: RequestState | None) -> bool:
    return state is not None and state.phase is not Phase.DECODE


def _has_room(view: ReplicaView, tokens: int) -> bool:
    """Whether a stream with these tokens could begin there now."""
    load, facts = view.load, view.facts
    kv_used_fraction = load.kv_used_fraction + tokens / (facts.kv_blocks * facts.block_size_tokens)
    return (
        load.total_requests + view.unreported_legs < facts.max_running_requests
        and kv_used_fraction <= _MAX_KV_USED_FRACTION
    )
