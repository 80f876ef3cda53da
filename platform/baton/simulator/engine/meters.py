"""Counters of simulated engines: steps, pulls by source, expired leases."""

from __future__ import annotations

from baton.domain.fleet import LinkTotals, StepTotals, TransferTotals

STEP_AVERAGE_WEIGHT = 0.2
"""Weight of the newest step in `step_s`: about the last ten steps count."""
TRANSPORT = "sim"


class PullMeter:
    """Totals of pulls."""

    __slots__ = ("_links", "transfers")

    def __init__(self) -> None:
        self.transfers = TransferTotals()
        self._links: dict[str, LinkTotals] = {}

    @property
    def links(self) -> tuple[LinkTotals, ...]:
        """Pulls by source, in the order of the first pull."""
        return tuple(self._links.values())

    def record_pull(self, source_id: str, *, moved_bytes: int, duration_s: float) -> None:
        """Count a successful pull."""
        total, link = self.transfers, self._link(source_id)
        self.transfers = total._replace(
            pulls=total.pulls + 1,
            moved_bytes=total.moved_bytes + moved_bytes,
            busy_s=total.busy_s + duration_s,
        )
        self._links[source_id] = link._replace(
            pulls=link.pulls + 1,
            moved_bytes=link.moved_bytes + moved_bytes,
            busy_s=link.busy_s + duration_s,
        )

    def record_pull_failure(self, source_id: str) -> None:
        """Count a failed pull."""
        self.transfers = self.transfers._replace(failures=self.transfers.failures + 1)
        link = self._link(source_id)
        self._links[source_id] = link._replace(failures=link.failures + 1)

    def record_void_pull(self) -> None:
        """Count a pull whose source had not kept the blocks."""
        self.transfers = self.transfers._replace(
            invalidated_pulls=self.transfers.invalidated_pulls + 1
        )

    def record_expired_leases(self, leases: int) -> None:
        """Count leases that ended before a pull."""
        total = self.transfers.expired_leases + leases
        self.transfers = self.transfers._replace(expired_leases=total)

    def _link(self, source_id: str) -> LinkTotals:
        return self._links.get(source_id) or LinkTotals(source_id, transport=TRANSPORT)


class EngineMeters(PullMeter):
    """Totals of pulls and steps, and the average `step_s`."""

    __slots__ = ("step_s", "steps")

    def __init__(self) -> None:
        super().__init__()
        self.step_s = 0.0
        self.steps = StepTotals()

    def record_step(
        self, duration_s: float, *, prefill_tokens: int, decode_tokens: int, context_tokens: int
    ) -> None:
        """Count an ended step."""
        weight = STEP_AVERAGE_WEIGHT if self.steps.steps else 1.0
        self.step_s += weight * (duration_s - self.step_s)
        before = self.steps
        self.steps = StepTotals(
            steps=before.steps + 1,
            busy_s=before.busy_s + duration_s,
            prefill_tokens=before.prefill_tokens + prefill_tokens,
            decode_tokens=before.decode_tokens + decode_tokens,
            context_tokens=before.context_tokens + context_tokens,
            prefill_steps=before.prefill_steps + (prefill_tokens > 0),
            decode_steps=before.decode_steps + (decode_tokens > 0),
        )
