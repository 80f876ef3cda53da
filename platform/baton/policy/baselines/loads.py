"""The loads that rivals' formulas speak of, as far as a view of a replica tells them.

Rivals' routers book every request they send and every one that ends. Here the replica reports, and
what this coordinator has sent since the report is added.
"""

from __future__ import annotations

from baton.domain.fleet import ReplicaView


def pending_prefill_tokens(view: ReplicaView) -> int:
    """Prompt tokens that are not computed yet: as reported, and what was sent since."""
    return view.load.queued_tokens + view.unseen_tokens


def active_requests(view: ReplicaView) -> int:
    """Requests that wait, pull their blocks or run there: as reported, and what was sent since."""
    load = view.load
    reported = load.queued_requests + load.running_requests + load.pulling_requests
    return reported + view.unseen_legs


def active_blocks(view: ReplicaView) -> float:
    """Blocks that requests hold there: as reported, and for the tokens that were sent since."""
    facts = view.facts
    return view.load.kv_used_fraction * facts.kv_blocks + (
        view.unseen_tokens / facts.block_size_tokens
    )
