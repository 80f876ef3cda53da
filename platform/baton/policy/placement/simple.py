"""Policies that know nothing of prompts, by their names in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType

from baton.domain.handoff import LegKind
from baton.policy.placement.chooser import LEAST_LOADED, Candidate, Chooser
from baton.policy.placement.port import PlacementQuery, load_key


def choose_randomly(
    query: PlacementQuery,
    kind: LegKind,
    candidates: Sequence[Candidate],
    rng: Random,
) -> int:
    """Each candidate with the same chance."""
    return rng.randrange(len(candidates))


class RoundRobin:
    """Takes replicas in turn, by id, for each kind of leg; joins and leaves keep the order."""

    def __init__(self) -> None:
        self._last: dict[LegKind, str] = {}

    def __call__(
        self,
        query: PlacementQuery,
        kind: LegKind,
        candidates: Sequence[Candidate],
        rng: Random,
    ) -> int:
        """The candidate whose id follows that of the one before."""
        del query
        last = self._last.get(kind, "")
        in_turn = [
            (candidate.view.replica_id <= last, candidate.view.replica_id)
            for candidate in candidates
        ]
        index = in_turn.index(min(in_turn))
        self._last[kind] = in_turn[index][1]
        return index


def choose_least_loaded(
    query: PlacementQuery,
    kind: LegKind,
    candidates: Sequence[Candidate],
    rng: Random,
) -> int:
    """The candidate with the fewest requests, of equals that with the fewest tokens to compute."""
    return min(range(len(candidates)), key=lambda index: load_key(candidates[index].view))


POLICIES: Mapping[str, Callable[[], Chooser]] = MappingProxyType(
    {
        "random": lambda: choose_randomly,
        "round-robin": RoundRobin,
        LEAST_LOADED: lambda: choose_least_loaded,
    }
)
"""The constructor of each chooser."""
