"""Unresponsive replicas: a frozen process, a hung host and a cut cable all look like that.

Theory of operation. Every replica sends a heartbeat each `HEARTBEAT_INTERVAL_S`, independent of its
engine. An idle replica may be quiet for `IDLE_GRACE_S` more, until it gets work. After half of
`heartbeat_timeout_s` without a message a replica is *suspect* and gets no new work. After all of it
the replica is *unresponsive*, and its requests go elsewhere. A message ends both.

Checks run while any request runs. When a check is late, the checking process itself stood still,
and no replica is blamed for that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

HEARTBEAT_INTERVAL_S: Final = 0.25
"""Of a replica with work. All other times of reports follow from it and the next two values."""
INTERVALS_PER_IDLE_HEARTBEAT: Final = 16
LINK_TIMEOUT_S: Final = 2.0
"""A peer with work that sends nothing for so long has lost its session."""
IDLE_GRACE_S: Final = (INTERVALS_PER_IDLE_HEARTBEAT - 1) * HEARTBEAT_INTERVAL_S
"""How much longer an idle replica takes until its next heartbeat."""
STALE_AFTER_S: Final = LINK_TIMEOUT_S + IDLE_GRACE_S
"""A younger report is fresh: when an older one arrives, the session of an idle peer has ended."""
_CHECKS_PER_TIMEOUT = 6
"""Within `heartbeat_timeout_s`: a failure is noticed a sixth late at most."""
_SUSPECT_FRACTION = 0.5


class LivenessTracker:
    """Keeps when each replica was last heard of, and when to look next."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._last_heartbeat_at_s: dict[str, float] = {}
        self._suspects: set[str] = set()
        self._next_check_at_s: float | None = None

    def reconfigure(self, heartbeat_timeout_s: float) -> None:
        """Go by another bound from now on."""
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._suspects.clear()
        self._next_check_at_s = None

    @property
    def check_interval_s(self) -> float:
        """Between two looks."""
        return self._heartbeat_timeout_s / _CHECKS_PER_TIMEOUT

    def on_replica_joined(self, replica_id: str, now_s: float) -> None:
        """Track a replica from now on."""
        self._last_heartbeat_at_s[replica_id] = now_s
        self._suspects.discard(replica_id)

    def on_replica_left(self, replica_id: str) -> None:
        """Forget a replica."""
        self._last_heartbeat_at_s.pop(replica_id, None)
        self._suspects.discard(replica_id)

    def heartbeat(self, replica_id: str, now_s: float) -> None:
        """Note a message of a replica; unknown replicas are ignored."""
        last_at_s = self._last_heartbeat_at_s.get(replica_id)
        if last_at_s is None:
            return
        if now_s > last_at_s:  # later than the grace of an idle replica
            self._last_heartbeat_at_s[replica_id] = now_s
        self._suspects.discard(replica_id)

    def set_idle(self, replica_id: str, now_s: float) -> None:
        """Note that a replica is idle; unknown replicas are ignored."""
        if replica_id in self._last_heartbeat_at_s:
            self._last_heartbeat_at_s[replica_id] = now_s + IDLE_GRACE_S

    def set_busy(self, replica_id: str, now_s: float) -> None:
        """Note that a replica gets work; unknown replicas are ignored."""
        if replica_id in self._last_heartbeat_at_s:
            self._last_heartbeat_at_s[replica_id] = min(
                now_s, self._last_heartbeat_at_s[replica_id]
            )

    def start_checks(self, now_s: float) -> None:
        """Something runs from now on: begin to look, unless that is done already."""
        if self._next_check_at_s is None and self._heartbeat_timeout_s != float("inf"):
            self._next_check_at_s = now_s + self.check_interval_s

    def next_check_at_s(self) -> float | None:
        """When to look next; None while nothing runs."""
        return self._next_check_at_s

    def check(self, now_s: float, *, has_work: bool) -> bool:
        """Whether it is time to look; to be asked whenever time has passed.

        The next look is arranged while anything `has_work`.
        """
        due_at_s = self._next_check_at_s
        if due_at_s is None or now_s < due_at_s:
            return False
        late_s = now_s - due_at_s
        if late_s > self.check_interval_s:
            self._extend_deadlines(late_s, now_s)
        suspect_after_s = _SUSPECT_FRACTION * self._heartbeat_timeout_s
        self._suspects.update(
            replica_id
            for replica_id, at_s in self._last_heartbeat_at_s.items()
            if now_s - at_s > suspect_after_s
        )
        self._next_check_at_s = now_s + self.check_interval_s if has_work else None
        return True

    def unresponsive_s(self, replica_id: str, now_s: float) -> float:
        """For how long a replica has missed its heartbeats; 0 for unknown replicas."""
        return max(0.0, now_s - self._last_heartbeat_at_s.get(replica_id, now_s))

    def is_suspect(self, replica_id: str) -> bool:
        """Whether a replica should have been heard of, as of the last look."""
        return replica_id in self._suspects

    def unresponsive(self, now_s: float) -> Iterator[str]:
        """Suspects whose heartbeat timeout has passed; to be called after a check."""
        for replica_id in sorted(self._suspects):
            if now_s - self._last_heartbeat_at_s[replica_id] >= self._heartbeat_timeout_s:
                yield replica_id

    def _extend_deadlines(self, late_s: float, now_s: float) -> None:
        for replica_id, at_s in self._last_heartbeat_at_s.items():
            self._last_heartbeat_at_s[replica_id] = max(at_s, min(now_s, at_s + late_s))
