"""Where the last request of each session was decoded, for as many sessions as there is room for.

Theory of operation: each tenant has its own table, the longest idle session first. When all tables
together are full, the largest of them loses its longest idle session. So a tenant that sends a new
session with every request forgets its own, and steers no request of another tenant.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 65_536
"""Of all tenants together."""


class Sessions:
    """The last replica of each session."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._by_tenant: dict[str, OrderedDict[str, str]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def last_replica(self, tenant: str, session_id: str | None) -> str | None:
        """The replica of a session's last request; None: the session is not known."""
        if session_id is None:
            return None
        sessions = self._by_tenant.get(tenant)
        return None if sessions is None else sessions.get(session_id)

    def record(self, tenant: str, session_id: str, replica_id: str) -> None:
        """A request of a session was decoded on a replica."""
        sessions = self._by_tenant.setdefault(tenant, OrderedDict())
        self._count += session_id not in sessions
        sessions[session_id] = replica_id
        sessions.move_to_end(session_id)
        if self._count > self._max_sessions:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        tenant, largest = max(self._by_tenant.items(), key=lambda item: len(item[1]))
        largest.popitem(last=False)
        self._count -= 1
        if not largest:
            del self._by_tenant[tenant]

    def check_integrity(self) -> None:
        """Raise AssertionError when the count is wrong, or there are too many."""
        assert self._count <= self._max_sessions, (
            f"{self._count} sessions, at most {self._max_sessions} are kept"
        )
        assert all(self._by_tenant.values()), "a tenant without a session has a table"
        counted = sum(map(len, self._by_tenant.values()))
        assert self._count == counted, f"{counted} sessions, counted as {self._count}"
