"""How long a leg waits in a simulated engine, and computes until its first output."""

from __future__ import annotations

from baton.domain.handoff import LegTimes


class LegTimer:
    """The times of one leg. A plain class with slots, for speed."""

    __slots__ = (
        "_first_output_at_s",
        "_queued_at_s",
        "_reported_preemptions",
        "_scheduled_at_s",
        "preemptions",
    )

    def __init__(self, queued_at_s: float | None) -> None:
        """Begin when the engine gets the leg; None: the leg reports no times."""
        self.preemptions = 0
        self._queued_at_s = queued_at_s
        self._scheduled_at_s: float | None = None
        self._first_output_at_s: float | None = None
        self._reported_preemptions = 0

    def on_scheduled(self, now_s: float) -> None:
        """Note the first step that computes for the leg; ignores later steps."""
        if self._scheduled_at_s is None:
            self._scheduled_at_s = now_s

    def on_first_output(self, now_s: float) -> LegTimes | None:
        """The times for the leg's first output."""
        self._first_output_at_s = now_s
        return self._times()

    def on_last_output(self) -> LegTimes | None:
        """The times for a last output that is not the first: only after further preemptions."""
        return self._times() if self.preemptions > self._reported_preemptions else None

    def _times(self) -> LegTimes | None:
        queued_at_s, scheduled_at_s = self._queued_at_s, self._scheduled_at_s
        if queued_at_s is None or scheduled_at_s is None or self._first_output_at_s is None:
            return None
        self._reported_preemptions = self.preemptions
        return LegTimes(
            scheduled_at_s - queued_at_s,
            self._first_output_at_s - scheduled_at_s,
            self.preemptions,
        )
