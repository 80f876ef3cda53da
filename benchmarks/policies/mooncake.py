"""Mooncake's Conductor: the prefill that ends first, and the decode with the shortest steps.

Source: Qin et al., Mooncake, FAST '25 (arXiv 2407.00079), Algorithm 1. For each prefill instance i

    TTFT_i = T_queue(i) + T_prefill(prompt, prefix_i)

with T_queue the predicted time of the prefills queued there and T_prefill from a regression on the
engine's own runs; the lowest wins. Decode goes where the predicted time between tokens is lowest.

Approximations: the regression is this platform's own, fitted online, so that the policies are
compared and not their fits; T_queue is that of all queued tokens together. Algorithm 1 also pulls a
prefix from the instance that holds the longest, where that is more than theta (manually set) times
longer than the local one: a chooser cannot order that, so theta is infinite here. Nor is a request
refused that would miss its objectives: placement refuses nothing. One replica that runs both phases
is chosen by TTFT, of equals by the time between tokens.

    router: {policy: "benchmarks.policies.mooncake:choose_by_conductor", index: events}
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton.domain.handoff import LegKind
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery
from benchmarks.policies.terms import (
    active_blocks,
    active_requests,
    lowest,
    pending_prefill_tokens,
    uncached_tokens,
)


def choose_by_conductor(
    query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
) -> int:
    """The lowest predicted TTFT, or for a decode leg the lowest predicted time between tokens."""
    if kind is LegKind.DECODE:
        return lowest([tbt_s(query, candidate) for candidate in candidates], rng)
    return lowest(
        [(ttft_s(query, candidate), tbt_s(query, candidate)) for candidate in candidates], rng
    )


def ttft_s(query: PlacementQuery, one: Candidate) -> float:
    """Until the first token, if it is prefilled here."""
    pending = pending_prefill_tokens(one.view)
    queue_s = one.timing.prefill_s(pending) if pending else 0.0
    # The last token is always computed: it gives the first new one.
    return queue_s + one.timing.prefill_s(max(1, uncached_tokens(query, one)))


def tbt_s(query: PlacementQuery, one: Candidate) -> float:
    """Between tokens, once this request decodes here too."""
    held_tokens = int(active_blocks(one.view)) * one.view.facts.block_size_tokens
    running = active_requests(one.view) + 1
    return one.timing.step_s(running=running, context_tokens=held_tokens + query.prompt_tokens)
