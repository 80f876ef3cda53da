"""A replica's reports to coordinators beyond their legs: its prefix cache, its pulls, its checks.

Theory of operation: a report never waits and never ends a session: a full send queue drops it. The
numbers show a missing cache update, and the coordinator requests a snapshot; pulls are totals; a
check is repeated. A session gets no update before its first snapshot, and none between a request
for another and its arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals
from baton.runtime.link import codec, frames
from baton.runtime.link.sessions import Session


class Reports:
    """Frames that may be dropped, on their way to sessions."""

    def __init__(
        self, sessions: Mapping[bytes, Session], try_send: Callable[[Session, list[bytes]], bool]
    ) -> None:
        self._sessions = sessions
        self._try_send = try_send
        self._links: dict[str, tuple[LinkTotals, int]] = {}
        self._links_version = 0
        self._check_requesters: dict[tuple[str, str], set[Session]] = {}

    # ------------------------------------------------------------------ prefix cache

    @property
    def snapshot_requested(self) -> bool:
        """Whether a session waits for a snapshot."""
        return any(session.needs_snapshot for session in self._sessions.values())

    def send_cache_update(self, update: CacheUpdate) -> None:
        """Send an update to every session that has its snapshot."""
        self._send_cache(update, [s for s in self._sessions.values() if not s.needs_snapshot])

    def send_cache_snapshot(self, snapshot: CacheUpdate) -> None:
        """Send a snapshot to every session that waits for one."""
        waiting = [s for s in self._sessions.values() if s.needs_snapshot]
        for session in waiting:
            session.needs_snapshot = False
        self._send_cache(snapshot, waiting)

    def _send_cache(self, update: CacheUpdate, sessions: list[Session]) -> None:
        if sessions:
            parts = codec.encode(frames.CacheUpdate(update))
            for session in sessions:
                self._try_send(session, parts)

    # ------------------------------------------------------------------ pulls

    def record_links(self, links: Iterable[LinkTotals]) -> None:
        """Store the pulls so far; `send_links` sends the changes."""
        previous, version = self._links, self._links_version + 1
        current = {link.source_id: (link, version) for link in links}
        for source_id, (link, _) in current.items():
            previous_entry = previous.get(source_id)
            if previous_entry is not None and previous_entry[0] == link:
                current[source_id] = previous_entry
            else:
                self._links_version = version
        self._links = current

    def send_links(self, session: Session) -> None:
        """Send a session the pulls since its last report."""
        if session.links_version == self._links_version:
            return
        new_links = tuple(
            link for link, version in self._links.values() if version > session.links_version
        )
        if self._try_send(
            session, codec.encode(frames.LinkReport(new_links[: frames.MAX_IDS_IN_FRAME]))
        ):
            session.links_version = self._links_version

    # ------------------------------------------------------------------ checks

    def add_check_requester(self, session: Session, source_id: str, address: str) -> None:
        """Add a session that waits for the result of a check."""
        self._check_requesters.setdefault((source_id, address), set()).add(session)

    def drop_check_requesters(self, source_id: str, address: str) -> None:
        """Drop a check whose requesters are gone."""
        self._check_requesters.pop((source_id, address), None)

    def send_check_result(
        self, source_id: str, address: str, *, elapsed_s: float, reason: str
    ) -> None:
        """Send a check's result to its requesters; `why` is empty when it succeeded."""
        answer = frames.SideChannelChecked(
            source_id=source_id,
            is_reachable=not reason,
            elapsed_s=elapsed_s,
            reason=reason[: frames.MAX_REASON_CHARS],
        )
        parts = codec.encode(answer)
        for session in self._check_requesters.pop((source_id, address), ()):
            if self._sessions.get(session.peer) is session:
                self._try_send(session, parts)
