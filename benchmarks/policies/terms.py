"""The terms of these policies' formulas, as far as a candidate tells them.

Other routers count every request that they send and every one that ends. Here the replica reports,
and what this coordinator has sent since the report is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from baton.domain.fleet import ReplicaView
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery

_Key = TypeVar("_Key", float, tuple[float, float])


def pending_prefill_tokens(view: ReplicaView) -> int:
    """Prompt tokens that are not computed yet: as reported, and what was sent since."""
    return view.load.queued_tokens + view.unreported_tokens


def active_requests(view: ReplicaView) -> int:
    """Requests that wait, pull their blocks or run there: as reported, and what was sent since."""
    load = view.load
    reported = load.queued_requests + load.running_requests + load.pulling_requests
    return reported + view.unreported_legs


def active_blocks(view: ReplicaView) -> float:
    """Blocks that requests hold there: as reported, and for the tokens that were sent since."""
    facts = view.facts
    return view.load.kv_used_fraction * facts.kv_blocks + (
        view.unreported_tokens / facts.block_size_tokens
    )


def uncached_tokens(query: PlacementQuery, candidate: Candidate) -> int:
    """Prompt tokens that a replica does not hold."""
    held = candidate.hit.blocks * candidate.view.facts.block_size_tokens
    return max(0, query.prompt_tokens - held)


def lowest(costs: Sequence[_Key], rng: Random) -> int:
    """Index of the lowest cost; equal ones are drawn uniformly."""
    best = min(costs)
    ties = [index for index, cost in enumerate(costs) if cost == best]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
