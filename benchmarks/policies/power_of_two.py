"""The less loaded of two replicas drawn at random.

Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12(10), 2001.

    router: {policy: "benchmarks.policies.power_of_two:choose"}
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton.domain.handoff import LegKind
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery, load_key


def choose(
    query: PlacementQuery,
    kind: LegKind,
    candidates: Sequence[Candidate],
    rng: Random,
) -> int:
    """Of two drawn at random the one with fewer requests, the first drawn of equals."""
    del query, kind
    drawn = rng.sample(range(len(candidates)), min(2, len(candidates)))
    return min(drawn, key=lambda index: load_key(candidates[index].view)[0])
