"""Replicas that drain: their streams may end there, and those that take too long are moved.

*Theory of operation.* A replica that drains gets no new work. What runs there runs on: prompts are
computed and handed off, blocks that others wait for are kept, streams go on. Streams that have not
ended after `drain_patience_s` are moved: aborted there, and resumed elsewhere with the tokens that
they have. So a replica is free after a time that does not depend on how long answers are.

A move costs the computation of a prompt, and a pause in a stream. Hence at most `drain_moves` are
under way at a time, over all replicas that drain: the next one begins when one has its next token,
or has ended. None begins while no other replica has room for it, or when it cannot be carried over;
such a stream ends where it is, and the replica waits. Only streams move: a request without a token
yet has its first soon, and can be moved then.

`begin` and `over` say which replicas drain, `due` who is to be moved now; the caller moves them.
Time is looked at in `due` only, when `next_at_s` has come: at the end of a patience, and from then
on a few times a second while anything is left there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import LegBook
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.request_state import Entry
from baton.domain.fleet import ReplicaView
from baton.domain.request import Phase

_LOOK_S = 0.25
"""Between two looks: as often as replicas report their loads."""
_FULL = 0.95
"""Share of a KV cache beyond which blocks may run out, and streams be preempted."""


class Drains:
    """See the module."""

    def __init__(self, limits: CoordinatorLimits, fleet: FleetTable, legs: LegBook) -> None:
        self._limits = limits
        self._fleet = fleet
        self._legs = legs
        self._look_at_s: dict[str, float] = {}
        """By replica that drains and still runs something."""
        self._moving: set[str] = set()
        """Requests that were moved and have not got a token since."""

    def reconfigure(self, limits: CoordinatorLimits) -> None:
        """Go on by others; a patience that has begun stays as it is."""
        self._limits = limits

    def begin(self, replica_id: str, now_s: float) -> None:
        """A replica drains from now on; saying so twice does not begin its patience again."""
        if replica_id in self._fleet:
            self._look_at_s.setdefault(replica_id, now_s + self._limits.drain_patience_s)

    def over(self, replica_id: str) -> None:
        """A replica is gone, or new."""
        self._look_at_s.pop(replica_id, None)

    def next_at_s(self) -> float | None:
        """When to look next; None while nothing drains."""
        return min(self._look_at_s.values()) if self._look_at_s else None

    def due(self, entries: Mapping[str, Entry], now_s: float) -> tuple[Entry, ...]:
        """The streams that are to be moved now, oldest first. They count as under way."""
        overdue = [one for one, at_s in self._look_at_s.items() if at_s <= now_s]
        if not overdue:
            return ()
        self._moving = {one for one in self._moving if _is_under_way(entries.get(one))}
        chosen: list[Entry] = []
        for replica_id in overdue:
            left = self._left_on(replica_id, entries)
            if not left:
                del self._look_at_s[replica_id]
                continue
            self._look_at_s[replica_id] = now_s + _LOOK_S
            chosen.extend(entry for entry in left if self._can_move(entry, now_s))
        chosen = chosen[: max(0, self._limits.drain_moves - len(self._moving))]
        self._moving.update(entry.request_id for entry in chosen)
        return tuple(chosen)

    def check_integrity(self) -> None:
        """Raise AssertionError when something is remembered of replicas that do not drain."""
        for replica_id in self._look_at_s:
            view = self._fleet.get(replica_id)
            assert view is not None, f"{replica_id} drains and is gone"
            assert view.draining, f"{replica_id} is looked at and does not drain"

    def _left_on(self, replica_id: str, entries: Mapping[str, Entry]) -> list[Entry]:
        """Requests that still run there; probes are none."""
        running, _ = self._legs.on_replica(replica_id)
        ids = (placed.leg.request_id for placed in running)
        return [entries[one] for one in ids if one in entries]

    def _can_move(self, entry: Entry, now_s: float) -> bool:
        if entry.phase is not Phase.DECODE or not entry.request.resumable:
            return False
        tokens = len(entry.request.prompt_token_ids) + len(entry.generated)
        return any(_has_room(view, tokens) for view in self._others(entry, now_s))

    def _others(self, entry: Entry, now_s: float) -> Iterator[ReplicaView]:
        """Who takes new work, and has not failed it; this is not asked of those that drain."""
        fleet = self._fleet.view(now_s)
        for replica_id in fleet.roster.decode or fleet.roster.prefill:
            if replica_id not in entry.avoid:
                yield fleet.replicas[replica_id]


def _is_under_way(entry: Entry | None) -> bool:
    return entry is not None and entry.phase is not Phase.DECODE


def _has_room(view: ReplicaView, tokens: int) -> bool:
    """Whether a stream with so many tokens could begin there now."""
    load, facts = view.load, view.facts
    used = load.kv_used_fraction + tokens / (facts.kv_blocks * facts.block_size_tokens)
    return load.requests + view.unseen_legs < facts.max_running_requests and used <= _FULL
