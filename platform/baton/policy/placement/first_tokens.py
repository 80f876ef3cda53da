"""Whether a first token goes to the client when the prefill ends, or when it is decoded on.

*Theory of operation.* Whoever prefills has a first token before the blocks are moved. Given at
once, it is sooner by the handoff, and the handoff is a gap after it: of a stream of n tokens it
takes handoff / (n - 1) of each token's time, and no gap of it may be longer than is promised. Held
back, it is part of the time to first token. So it is held back where it would break the pace, or a
gap, unless the first token would then be late: of two promises one is broken anyway, and a client
would rather see something.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.domain.slo import Slo
from baton.policy.admission.slo_evaluation import SLOW_GAPS_ALLOWED


class FirstToken(NamedTuple):
    """When it goes out, and whether what comes after it is then as promised."""

    early: bool
    breaks: bool = False
    """Its pace, or a gap, is predicted to be broken by that."""


LATE = FirstToken(early=False)


def first_token(
    slo: Slo,
    *,
    waited_s: float,
    prefilled_s: float,
    handoff_s: float,
    pace_s: float,
    output_tokens: float,
) -> FirstToken:
    """Say whether to give it at once.

    Args:
        slo: What the request is promised.
        waited_s: Since it arrived.
        prefilled_s: From now until the prefill ends, by prediction.
        handoff_s: From then until the decode replica's first token.
        pace_s: Between two tokens after that.
        output_tokens: How many it is expected to get.
    """
    later_tokens = output_tokens - 1.0
    if later_tokens < 1.0:
        return FirstToken(early=True)  # mostly nothing comes after it
    each_s = (handoff_s + (later_tokens - 1.0) * pace_s) / later_tokens
    breaks_pace = slo.tpot_s is not None and each_s > slo.tpot_s
    one_is_allowed = SLOW_GAPS_ALLOWED * later_tokens >= 1.0
    breaks_gap = slo.itl_p99_s is not None and handoff_s > slo.itl_p99_s and not one_is_allowed
    if not (breaks_pace or breaks_gap):
        return FirstToken(early=True)
    late = slo.ttft_s is not None and waited_s + prefilled_s + handoff_s > slo.ttft_s
    return FirstToken(early=True, breaks=True) if late else LATE
