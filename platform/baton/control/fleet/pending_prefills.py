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

from baton.perf.timing import EngineTiming, added_s


class Prompts:
    """Prompts that are out, and by when each replica will have computed those it has."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[str, float]] = {}
        """By leg: its replica, and how long it keeps others there waiting."""
        self._by_replica: dict[str, dict[str, float]] = {}
        self._due_at_s: dict[str, float] = {}
        self.due_at_s: Mapping[str, float] = MappingProxyType(self._due_at_s)
        """By replica; those that have none are not there."""

    def sent(
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
        legs = self._by_replica.setdefault(replica_id, {})
        took_s = load_s
        if tokens > 1:
            took_s += added_s(timing, tokens) if legs else timing.prefill_s(tokens)
        legs[leg_id] = took_s
        self._out[leg_id] = (replica_id, took_s)
        self._due_at_s[replica_id] = max(now_s, self._due_at_s.get(replica_id, 0.0)) + took_s

    def computed(self, leg_id: str, now_s: float) -> None:
        """A prompt is computed, or will not be; ones that are not out are ignored."""
        found = self._out.pop(leg_id, None)
        if found is None:
            return
        replica_id = found[0]
        legs = self._by_replica[replica_id]
        del legs[leg_id]
        if legs:
            left_s = now_s + sum(legs.values())
            self._due_at_s[replica_id] = min(self._due_at_s[replica_id], left_s)
        else:
            del self._by_replica[replica_id], self._due_at_s[replica_id]

    def check_integrity(self, running: frozenset[str]) -> None:
        """Raise AssertionError when a prompt is out whose leg does not run."""
        assert self._out.keys() <= running, f"prompts out: {sorted(self._out.keys() - running)}"
        assert self._by_replica.keys() == self._due_at_s.keys(), "replicas with none, or no time"
