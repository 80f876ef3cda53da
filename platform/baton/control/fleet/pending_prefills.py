"""When the prompts that were sent to each replica will be computed, going by when they were sent.

*Theory of operation.* What a replica reports of its queue is old when it arrives, and may leave out
what the step under way computes; a coordinator that lets prompts in one by one, as engines come
free, must know better. It knows what it has sent and what has not come back: prompts are taken to
be computed one after the other, so each one adds its time to when the last one is done; and when
one is done, what is left cannot take longer than those that are still out. Others' prompts are not
known here; whoever asks takes this or what was reported, whichever is later.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.perf.timing import EngineTiming, added_prefill_s


class PendingPrefills:
    """Prompts that are out, and by when each replica will have computed those it has."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[str, float]] = {}
        """By leg: its replica, and how long it keeps others there waiting."""
        self._by_replica: dict[str, dict[str, float]] = {}
        self._due_at_s: dict[str, float] = {}
        self.due_at_s: Mapping[str, float] = MappingProxyType(self._due_at_s)
        """By replica; those that have none are not there."""

    def add(
        self,
        leg_id: str,
        replica_id: str,
        *,
        tokens: int,
        timing: EngineTiming,
        now_s: float,
        load_s: float = 0.0,
    ) -> None:
        """A prompt of which so many tokens must be computed went to a replica.

        Its adapter is loaded before that, for `load_s`, in which nothing else is computed there.
        """
        if tokens <= 1 and not load_s:
            return
        durations_s = self._by_replica.setdefault(replica_id, {})
        duration_s = load_s
        if tokens > 1:
            duration_s += (
                added_prefill_s(timing, tokens) if durations_s else timing.prefill_s(tokens)
            )
        durations_s[leg_id] = duration_s
        self._pending[leg_id] = (replica_id, duration_s)
        self._due_at_s[replica_id] = max(now_s, self._due_at_s.get(replica_id, 0.0)) + duration_s

    def remove(self, leg_id: str, now_s: float) -> None:
        """A prompt is computed, or will not be; ones that are not out are ignored."""
        pending = self._pending.pop(leg_id, None)
        if pending is None:
            return
        replica_id = pending[0]
        durations_s = self._by_replica[replica_id]
        del durations_s[leg_id]
        if durations_s:
            latest_at_s = now_s + sum(durations_s.values())
            self._due_at_s[replica_id] = min(self._due_at_s[replica_id], latest_at_s)
        else:
            del self._by_replica[replica_id], self._due_at_s[replica_id]

    def check_integrity(self, running: frozenset[str]) -> None:
        """Raise AssertionError when a prompt is out whose leg does not run."""
        assert self._pending.keys() <= running, (
            f"prompts out: {sorted(self._pending.keys() - running)}"
        )
        assert self._by_replica.keys() == self._due_at_s.keys(), "replicas with none, or no time"
