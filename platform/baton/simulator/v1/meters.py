"""What a counted engine counts: steps and what they computed, pulls by source, leases run out."""

from __future__ import annotations

from baton.domain.fleet import LinkTotals, StepTotals, TransferTotals
from baton.simulator.v1.stretch import Stretch

_STEP_AVERAGE_WEIGHT = 0.2
"""Weight of the newest step in `step_s`: about the last ten steps count."""
_KEPT = 1 - _STEP_AVERAGE_WEIGHT
TRANSPORT = "sim"


class StepMeter:
    """Steps since the engine was made, and the average of the last ones' seconds."""

    __slots__ = ("_step_s", "_totals")

    def __init__(self) -> None:
        self._step_s = 0.0
        self._totals = StepTotals()

    def stepped(self, stretch: Stretch, steps: int) -> None:
        """The first `steps` steps of a stretch are done."""
        self._step_s = self.step_s(stretch, steps)
        self._totals = self.totals(stretch, steps)

    def totals(self, stretch: Stretch | None = None, steps: int = 0) -> StepTotals:
        """All steps so far, and the first `steps` of the one under way."""
        if stretch is None or not steps:
            return self._totals
        done, busy_s, prefilled, decoded, context, prefill_steps, decode_steps = self._totals
        prefill_tokens, decodes = stretch.prefill_tokens, stretch.decode_requests
        return StepTotals(
            done + steps,
            busy_s + stretch.seconds(steps),
            prefilled + steps * prefill_tokens,
            decoded + steps * decodes,
            context + stretch.context_of(steps),
            prefill_steps + (steps if prefill_tokens else 0),
            decode_steps + (steps if decodes else 0),
        )

    def step_s(self, stretch: Stretch | None = None, steps: int = 0) -> float:
        """The moving average of a step's seconds, counted likewise.

        Each step gets the weight w and leaves 1 - w to those before it; over a stretch this is a
        geometric series and the derivative of one.
        """
        if stretch is None or not steps:
            return self._step_s
        last_s = stretch.first_s + (steps - 1) * stretch.slope_s
        if not self._totals.steps:  # nothing to be averaged with; the first is a step of its own
            return last_s
        if steps == 1:
            return _KEPT * self._step_s + (1 - _KEPT) * last_s
        return _KEPT**steps * self._step_s + _weighted(last_s, stretch.slope_s, steps)


class PullMeter:
    """Pulls since the engine was made."""

    __slots__ = ("_links", "transfers")

    def __init__(self) -> None:
        self.transfers = TransferTotals()
        self._links: dict[str, LinkTotals] = {}

    @property
    def links(self) -> tuple[LinkTotals, ...]:
        """Pulls by source, those pulled from first in front."""
        return tuple(self._links.values())

    def pulled(self, source_id: str, *, moved_bytes: int, took_s: float) -> None:
        """A pull brought its blocks."""
        total, link = self.transfers, self._link(source_id)
        self.transfers = total._replace(
            pulls=total.pulls + 1,
            moved_bytes=total.moved_bytes + moved_bytes,
            busy_s=total.busy_s + took_s,
        )
        self._links[source_id] = link._replace(
            pulls=link.pulls + 1,
            moved_bytes=link.moved_bytes + moved_bytes,
            busy_s=link.busy_s + took_s,
        )

    def pull_failed(self, source_id: str) -> None:
        """A pull brought nothing."""
        self.transfers = self.transfers._replace(failures=self.transfers.failures + 1)
        link = self._link(source_id)
        self._links[source_id] = link._replace(failures=link.failures + 1)

    def expired(self, leases: int) -> None:
        """Leases ran out before anyone pulled."""
        total = self.transfers.expired_leases + leases
        self.transfers = self.transfers._replace(expired_leases=total)

    def _link(self, source_id: str) -> LinkTotals:
        return self._links.get(source_id) or LinkTotals(source_id, transport=TRANSPORT)


def _weighted(last_s: float, slope_s: float, steps: int) -> float:
    """What the last `steps` steps add to the average: sum of w (1-w)^j (last_s - j slope_s)."""
    kept = _KEPT**steps
    # sum of j q^j for j < n is q (1 - n q^(n-1) + (n-1) q^n) / (1-q)^2
    lags = _KEPT * (1 - steps * _KEPT ** (steps - 1) + (steps - 1) * kept) / _STEP_AVERAGE_WEIGHT
    return (1 - kept) * last_s - lags * slope_s
