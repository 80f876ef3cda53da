"""How long a simulated engine lets a leg wait, and then computes until its first output."""

from __future__ import annotations

from baton.domain.handoff import LegTimes


class LegTimer:
    """The times of one leg. Not a dataclass: there is one for every leg of a simulation."""

    __slots__ = (
        "_first_output_at_s",
        "_queued_at_s",
        "_reported_preemptions",
        "_scheduled_at_s",
        "preemptions",
    )

    def __init__(self, queued_at_s: float | None) -> None:
        """Begin when the engine gets the leg; None: nobody says when, so that nothing is told."""
        self.preemptions = 0
        self._queued_at_s = queued_at_s
        self._scheduled_at_s: float | None = None
        self._first_output_at_s: float | None = None
        self._reported_preemptions = 0

    def on_scheduled(self, now_s: float) -> None:
        """A step computes for it; only the first one counts."""
        if self._scheduled_at_s is None:
            self._scheduled_at_s = now_s

    def on_first_output(self, now_s: float) -> LegTimes | None:
        """What to tell with its first output."""
        self._first_output_at_s = now_s
        return self._times()

    def on_last_output(self) -> LegTimes | None:
        """What to tell with an output that is its last, and not its first."""
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
