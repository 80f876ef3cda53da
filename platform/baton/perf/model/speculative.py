"""The gain of speculative decoding: tokens per step, and seconds per token.

A draft proposes tokens, the model checks them all in one step and keeps the beginning that it
agrees with, plus one token of its own. Each proposal is taken to be accepted independently of the
others, with the same probability.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2211.17192),
equation 1 (expected tokens), theorem 3.8 (improvement in wall time).
"""

from __future__ import annotations

from collections.abc import Callable


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Tokens that one step yields: `(1 - a^(d + 1)) / (1 - a)`, between 1 and `drafted` + 1."""
    if not 0 <= acceptance <= 1 or drafted < 0:
        raise ValueError(
            f"got acceptance {acceptance}, drafted {drafted}, expected 0 to 1, at least 0"
        )
    if acceptance == 1:
        return float(drafted + 1)
    return float((1 - acceptance ** (drafted + 1)) / (1 - acceptance))


def step_cost(drafted: int, *, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Seconds of a step that drafts and checks, in steps that decode one token.

    `draft_cost` is that of drafting one token, `verify_cost` that of checking all of them. It is 1
    as long as a step is bound by reading the weights, and then grows.
    """
    return drafted * draft_cost + verify_cost


def speedup(
    acceptance: float, drafted: int, *, draft_cost: float, verify_cost: float = 1.0
) -> float:
    """How many times faster tokens come than one by one; below 1 when drafting does not pay."""
    cost = step_cost(drafted, draft_cost=draft_cost, verify_cost=verify_cost)
    return expected_tokens(acceptance, drafted) / cost


def best_draft_length(
    acceptance: float,
    *,
    draft_cost: float,
    verify_cost: Callable[[int], float] = lambda _drafted: 1.0,
    max_drafted: int = 16,
) -> int:
    """How many tokens to draft for the greatest speed-up; 0 when drafting does not pay.

    `verify_cost` is that of checking this number of tokens. The speed-up has one peak in the number
    drafted: each further token adds less than the one before, and costs no less.
    """
    best, best_gain = 0, 1.0
    for drafted in range(1, max_drafted + 1):
        cost = verify_cost(drafted)
        gain = speedup(acceptance, drafted, draft_cost=draft_cost, verify_cost=cost)
        if gain <= best_gain:
            break
        best, best_gain = drafted, gain
    return best
