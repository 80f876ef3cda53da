"""Which replicas of a large pool could hand a prompt over to each other, where few were looked at.

A shortlist is drawn without regard to layouts and links: these are alike nearly everywhere, and to
ask for each of a thousand replicas costs more than the rest of a placement. Where none of those who
were drawn can do it (half of a pool has another layout while it is rolled out, say), it is drawn
once more, from those who can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.domain.fleet import ReplicaView
from baton.policy.placement.port import PlacementContext

_MAX_PAIR_CHECKS = 5_000
"""At pairs in vain, about 2 ms: where a whole large pool is cut off, each request pays that."""


def can_receive(
    sources: Iterable[ReplicaView], targets: Iterable[str], context: PlacementContext
) -> list[str]:
    """Those of the targets that could pull from at least one of a few sources."""
    sources, replicas = tuple(sources), context.fleet.replicas
    return [
        target
        for target in targets
        if any(_can_pull(source, replicas[target], context) for source in sources)
    ]


def can_send(
    sources: Iterable[str], targets: Sequence[str], context: PlacementContext
) -> list[str]:
    """Those of the sources from which at least one of the targets could pull."""
    replicas = context.fleet.replicas
    by_layout: dict[str, list[ReplicaView]] = {}
    for target in targets:
        view = replicas[target]
        by_layout.setdefault(view.facts.layout, []).append(view)
    senders, checks = [], 0
    for other in sources:
        source = replicas[other]
        same_layout = by_layout.get(source.facts.layout, ())
        if any(_can_pull(source, target, context) for target in same_layout):
            senders.append(other)
            continue
        checks += len(same_layout)
        if checks > _MAX_PAIR_CHECKS:
            break
    return senders


def _can_pull(source: ReplicaView, target: ReplicaView, context: PlacementContext) -> bool:
    source_facts, target_facts = source.facts, target.facts
    if (
        source_facts.layout != target_facts.layout
        or source_facts.replica_id == target_facts.replica_id
    ):
        return False
    return context.links.transfer_s(source_facts.replica_id, target_facts.replica_id, 0) is not None
