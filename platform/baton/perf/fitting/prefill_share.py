"""What share of a replica's time prompts take, and so how often those who decode there wait.

*Theory of operation.* Reports carry totals since a replica started; the difference of two says how
many steps computed prompts, and how many tokens. Both are kept as sums that fade with `HORIZON_S`,
so divided by it they are rates: of a replica that computed prompts in one step of every ten
milliseconds, for long enough, 100 steps a second are kept. How long a step is held up by its part
of a prompt is the timing's to say, and asked only when somebody wants to know the share.
"""

from __future__ import annotations

from math import exp

from baton.domain.fleet import StepTotals
from baton.perf.timing import EngineTiming, decode_delay_s

HORIZON_S = 3.0
"""About the life of a stream: 200 tokens of 15 ms each."""
_MAX_SHARE = 0.95
"""Who computes nothing but prompts decodes at a twentieth of its pace, rather than never."""


class PrefillShare:
    """One replica's, from what it reports."""

    __slots__ = ("_at_s", "_steps", "_tokens")

    def __init__(self) -> None:
        self._steps = 0.0
        self._tokens = 0.0
        self._at_s = 0.0

    def observe(self, step_delta: StepTotals, now_s: float) -> None:
        """Take in what was computed between two reports."""
        if min(step_delta) < 0:  # the engine has started again
            return
        decay = self._decay(now_s)
        self._steps = self._steps * decay + step_delta.prefill_steps
        self._tokens = self._tokens * decay + step_delta.prefill_tokens
        self._at_s = max(now_s, self._at_s)

    def share(self, timing: EngineTiming, now_s: float) -> float:
        """Between 0 and 0.95: of each second, what prompts take from those who decode."""
        if not self._steps or not self._tokens:
            return 0.0
        chunk = max(1, round(self._tokens / self._steps))
        steps_per_s = self._steps * self._decay(now_s) / HORIZON_S
        return min(_MAX_SHARE, steps_per_s * decode_delay_s(timing, chunk))

    def _decay(self, now_s: float) -> float:
        return exp(-max(0.0, now_s - self._at_s) / HORIZON_S)
