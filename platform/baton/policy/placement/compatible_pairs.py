"""Which replicas of a large pool could hand a prompt over to each other, where few were looked at.

A shortlist is drawn without regard to layouts and links: these are alike nearly everywhere, and to
ask for each of a thousand replicas costs more than the rest of a placement. Where none of those who
were drawn can do it (half of a pool has another layout while it is rolled out, say), it is drawn
once more, from those who can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.domain.fleet import ReplicaView
from baton.policy.placement.port import Surroundings

_MOST_LOOKS = 5_000
"""At pairs in vain, about 2 ms: where a whole large pool is cut off, each request pays that."""


def takers(
    sources: Iterable[ReplicaView], targets: Iterable[str], around: Surroundings
) -> list[str]:
    """Those of the targets that could pull from at least one of a few sources."""
    sources, replicas = tuple(sources), around.fleet.replicas
    return [
        target
        for target in targets
        if any(_could_pull(source, replicas[target], around) for source in sources)
    ]


def givers(sources: Iterable[str], targets: Sequence[str], around: Surroundings) -> list[str]:
    """Those of the sources from which at least one of the targets could pull."""
    replicas = around.fleet.replicas
    by_layout: dict[str, list[ReplicaView]] = {}
    for target in targets:
        view = replicas[target]
        by_layout.setdefault(view.facts.layout, []).append(view)
    found, looks = [], 0
    for one in sources:
        source = replicas[one]
        alike = by_layout.get(source.facts.layout, ())
        if any(_could_pull(source, target, around) for target in alike):
            found.append(one)
            continue
        looks += len(alike)
        if looks > _MOST_LOOKS:
            break
    return found


def _could_pull(source: ReplicaView, target: ReplicaView, around: Surroundings) -> bool:
    one, other = source.facts, target.facts
    if one.layout != other.layout or one.replica_id == other.replica_id:
        return False
    return around.links.transfer_s(one.replica_id, other.replica_id, 0) is not None
