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
from baton.policy.admission.slo_evaluation import MAX_ITL_VIOLATION_FRACTION


class FirstTokenPlan(NamedTuple):
    """When it goes out, and whether what comes after it is then as promised."""

    is_early: bool
    breaks_slo: bool = False
    """Its pace, or a gap, is predicted to be broken by that."""


NO_EARLY_TOKEN = FirstTokenPlan(is_early=False)


def plan_first_token(
    slo: Slo,
    *,
    waited_s: float,
    prefill_done_s: float,
    handoff_s: float,
    tpot_s: float,
    output_tokens: float,
) -> FirstTokenPlan:
    """Say whether to give it at once.

    Args:
        slo: What the request is promised.
        waited_s: Since it arrived.
        prefill_done_s: From now until the prefill ends, by prediction.
        handoff_s: From then until the decode replica's first token.
        tpot_s: Between two tokens after that.
        output_tokens: How many it is expected to get.
    """
    later_tokens = output_tokens - 1.0
    if later_tokens < 1.0:
        return FirstTokenPlan(is_early=True)  # mostly nothing comes after it
    effective_tpot_s = (handoff_s + (later_tokens - 1.0) * tpot_s) / later_tokens
    breaks_tpot = slo.tpot_s is not None and effective_tpot_s > slo.tpot_s
    is_violation_allowed = MAX_ITL_VIOLATION_FRACTION * later_tokens >= 1.0
    breaks_itl = (
        slo.itl_p99_s is not None and handoff_s > slo.itl_p99_s and not is_violation_allowed
    )
    if not (breaks_tpot or breaks_itl):
        return FirstTokenPlan(is_early=True)
    is_ttft_missed = slo.ttft_s is not None and waited_s + prefill_done_s + handoff_s > slo.ttft_s
    return FirstTokenPlan(is_early=True, breaks_slo=True) if is_ttft_missed else NO_EARLY_TOKEN
