"""Predicted SLO misses because of one more request, and their cost.

*Theory of operation.* A replica whose decode step takes `step_s`, and which spends the share s of
its time on prompts, gives each of its streams a token every

    pace = step / (1 - s)

With each token a stream gains slack, objective - pace. A prompt beside it takes the prompt's time
away at once. A stream is broken when that exceeds its gain over its whole life. So the new request
misses its TPOT when its pace there would, and it breaks `broken_fraction` of the streams beside it.
Streams that queued prompts break anyway do not count.

A miss costs a multiple of the time that the request may take within its objectives, in seconds. The
classes of running streams are not known here: they count with the placer's own objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from baton.perf.timing import decode_delay_s
from baton.policy.placement.replica_cost import ReplicaCost

_MIN_SLACK_FRACTION = 0.05
"""Of the objective: predictions err by as much, so no stream is ever given up as lost."""
_MISS_PENALTY_MULTIPLE = 4.0
"""A miss costs this multiple of the time that the request may take: earliness is worth far less
than punctuality. Found by trying: at 1, prompts still went to where they broke streams while the
prefill pool's queue was within the objective."""


@dataclass(frozen=True, slots=True)
class SloImpact:
    """The objectives of requests."""

    tpot_slo_s: float | None
    """The request's own; None: it has no TPOT objective."""
    ttft_slo_s: float | None = None
    running_tpot_slo_s: float | None = None
    """That of the streams that run already; None: the same as the request's."""

    def __post_init__(self) -> None:
        if self.tpot_slo_s is None and self.running_tpot_slo_s is None:
            raise ValueError("objectives: got no TPOT objective, expected at least one")

    @property
    def stream_tpot_slo_s(self) -> float:
        """The TPOT objective of the running streams."""
        tpot_slo_s = self.tpot_slo_s if self.running_tpot_slo_s is None else self.running_tpot_slo_s
        assert tpot_slo_s is not None, "one of them is set"
        return tpot_slo_s

    def expected_misses(self, cost: ReplicaCost, local_prompt_tokens: int = 0) -> float:
        """How many more requests miss their TPOT when a replica decodes one more.

        It computes `local_prompt_tokens` of the new one's prompt, too. The new one's own first
        token is not looked at.
        """
        tpot_slo_s, tpot_s = self.tpot_slo_s, cost.step_s / (1.0 - cost.prefill_time_fraction)
        own_misses = float(tpot_slo_s is not None and tpot_s > tpot_slo_s)
        return own_misses + (
            self.streams_broken(cost, local_prompt_tokens, tpot_s=tpot_s)
            if cost.running_streams
            else 0.0
        )

    def streams_broken(
        self, cost: ReplicaCost, local_prompt_tokens: int, *, tpot_s: float | None = None
    ) -> float:
        """How many more of a replica's streams miss their TPOT by such a prompt beside them.

        With the request as another stream among them they go on at `tpot_s`; None: it goes away.
        """
        slo_s, output_tokens, timing = self.stream_tpot_slo_s, cost.output_tokens, cost.timing
        tpot_without_s = max(0.0, cost.step_s - cost.step_increase_s) / (
            1.0 - cost.prefill_time_fraction
        )
        tpot_s = tpot_without_s if tpot_s is None else tpot_s
        min_slack_s, ahead_tokens = _MIN_SLACK_FRACTION * slo_s, cost.ahead_tokens
        stalls_s = (
            decode_delay_s(timing, ahead_tokens),
            decode_delay_s(timing, ahead_tokens + local_prompt_tokens),
        )
        broken_before = broken_fraction(
            stalls_s[0],
            slack_s=max(min_slack_s, slo_s - tpot_without_s),
            mean_output_tokens=output_tokens,
        )
        broken_after = broken_fraction(
            stalls_s[1], slack_s=max(min_slack_s, slo_s - tpot_s), mean_output_tokens=output_tokens
        )
        return cost.running_streams * max(0.0, broken_after - broken_before)

    def miss_penalty_s(self, cost: ReplicaCost) -> float:
        """The time that a request may take within its objectives: the price of a miss."""
        tpot_slo_s = self.stream_tpot_slo_s if self.tpot_slo_s is None else self.tpot_slo_s
        return _MISS_PENALTY_MULTIPLE * ((self.ttft_slo_s or 0.0) + cost.output_tokens * tpot_slo_s)


def broken_fraction(stall_s: float, *, slack_s: float, mean_output_tokens: float) -> float:
    """Of the streams on a replica, the share that gains less slack in all than a stall takes.

    With a slack of `slack_s` a token, those are the streams of fewer than stall / slack tokens.
    Lengths are taken to be exponentially distributed. Streams that run at a given moment are then
    distributed as Gamma of shape 2, because a longer stream is met more often. Of these, 1 -
    exp(-u) (1 + u) are below u mean lives.

    Source: Feller, An Introduction to Probability Theory and Its Applications II, I.4 (waiting time
    paradox).
    """
    lives = stall_s / (slack_s * mean_output_tokens)
    return 1.0 - exp(-lives) * (1.0 + lives)
