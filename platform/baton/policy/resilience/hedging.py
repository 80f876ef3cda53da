"""When a request with an overdue first token restarts on another replica.

Theory of operation. A first token that is late by a large factor, and later than all but one in a
hundred recent tokens, is a sign of an unreported failure. Placement then runs once more, without
that replica. The leg moves only to an *idle* replica that would take less time than was waited
already. The remaining time of the old leg is unknown; with waits as spread as these, as long again
is the least to expect. The old leg is aborted first, so two legs never run. See decision 27.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.handoff import PlacementDecision

OVERRUN_QUANTILE = 0.99
"""Of recent first tokens, those that were no later than the added time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeOptions:
    """How late is too late, and when another replica is better."""

    latency_multiple: float | None = 4.0
    """As a multiple of the predicted time; None: never."""
    min_delay_s: float = 1.0
    """No sooner than this: short predictions err by more than their own length."""
    max_alternative_queue_s: float = 0.05
    """A replica with no more than this before the request has spare capacity."""

    def __post_init__(self) -> None:
        if self.latency_multiple is not None and not self.latency_multiple > 1:
            raise ValueError(
                f"hedging: latency_multiple is {self.latency_multiple}, expected more than"
                " 1, or none"
            )
        if not self.min_delay_s > 0:
            raise ValueError(f"hedging: min_delay_s is {self.min_delay_s}, expected more than 0")


def hedge_after_s(
    decision: PlacementDecision, overrun_s: float, options: HedgeOptions
) -> float | None:
    """How long after a decision its first token is suspiciously late; None: that is not known.

    `overrun_s` is how much later than predicted the latest of a hundred came recently.
    """
    if options.latency_multiple is None or not decision.options:
        return None
    predicted_s = decision.options[0].ttft_s
    return max(options.min_delay_s, options.latency_multiple * predicted_s + overrun_s)


def is_better_alternative(
    alternative: PlacementDecision, *, avoid: frozenset[str], waited_s: float, options: HedgeOptions
) -> bool:
    """Whether a decision made now, over none of those to avoid, beats waiting on."""
    route = alternative.route
    if not alternative.options or {route.prefill_replica_id, route.decode_replica_id} & avoid:
        return False
    option = alternative.options[0]
    return option.queue_s <= options.max_alternative_queue_s and option.ttft_s < waited_s
