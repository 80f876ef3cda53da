"""Pulls in virtual time: a set-up, a flow on the shared network, and a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.simulator.network.network import Network
from baton.simulator.network.timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pull:
    """One pull and its callbacks."""

    key: str
    """Unique among the pulls under way."""
    source_id: str
    target_id: str
    moved_bytes: int
    setup_s: float
    on_done: Callable[[], None]
    on_failed: Callable[[], None]


class Transfers:
    """The pulls under way in a fleet. Engine ids are the addresses of their side channels."""

    def __init__(self, timeline: Timeline, *, share: bool) -> None:
        self.network = Network(share=share)
        self._timeline = timeline
        self._pulls: dict[str, Pull] = {}
        self._wake_at_s = float("inf")

    def __len__(self) -> int:
        return len(self._pulls)

    def begin(self, pull: Pull) -> None:
        """Start a pull."""
        self._pulls[pull.key] = pull
        self._timeline.call_later(pull.setup_s, lambda: self._begin_flow(pull))

    def cancel(self, key: str) -> None:
        """Stop a pull without a callback; ignored when it is over."""
        if self._pulls.pop(key, None) is not None:
            self.network.end(key, self._timeline.now_s)
            self._schedule_wake()

    def change_bandwidth(self, engine_id: str, bytes_per_s: float) -> None:
        """Change an engine's bandwidth, also for flows under way."""
        self.network.set_bandwidth(engine_id, bytes_per_s, self._timeline.now_s)
        self._schedule_wake()

    def on_engine_died(self, engine_id: str) -> None:
        """Fail the pulls from an engine, and cancel those into it."""
        for pull in tuple(self._pulls.values()):
            if pull.target_id == engine_id:
                self.cancel(pull.key)
            elif pull.source_id == engine_id:
                self.cancel(pull.key)
                pull.on_failed()
        self.network.disconnect(engine_id)

    def _begin_flow(self, pull: Pull) -> None:
        if self._pulls.get(pull.key) is pull:
            self.network.begin(
                pull.key,
                source_id=pull.source_id,
                target_id=pull.target_id,
                moved_bytes=pull.moved_bytes,
                now_s=self._timeline.now_s,
            )
            self._schedule_wake()

    def _schedule_wake(self) -> None:
        """Wake when the next flow will be done; an early wake-up is harmless."""
        at_s = self.network.next_done_at_s()
        if at_s is not None and at_s < self._wake_at_s:
            self._wake_at_s = at_s
            self._timeline.call_at(at_s, self._on_wake)

    def _on_wake(self) -> None:
        if self._wake_at_s > self._timeline.now_s:
            return  # a later wake-up is scheduled
        self._wake_at_s = float("inf")
        ended = [self._pulls.pop(key) for key in self.network.pop_done(self._timeline.now_s)]
        for pull in ended:
            pull.on_done()
        self._schedule_wake()
