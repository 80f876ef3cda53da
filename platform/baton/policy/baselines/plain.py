"""Policies that know nothing of prompts: random, round-robin, least-loaded, power-of-two."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton.domain.handoff import LegKind
from baton.policy.choosing import Candidate
from baton.policy.placement import PlacementQuery, load_key


def choose_randomly(
    query: PlacementQuery,
    kind: LegKind,
    candidates: Sequence[Candidate],
    rng: Random,
) -> int:
    """Each candidate with the same chance."""
    return rng.randrange(len(candidates))


class RoundRobin:
    """Each in its turn, by id, for each kind of leg; who joins or leaves disturbs nobody's turn."""

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
        in_turn = [(one.view.replica_id <= last, one.view.replica_id) for one in candidates]
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


def choose_power_of_two(
    query: PlacementQuery,
    kind: LegKind,
    candidates: Sequence[Candidate],
    rng: Random,
) -> int:
    """Of two drawn at random the one with fewer requests, the first drawn of equals.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12(10),
    2001.
    """
    drawn = rng.sample(range(len(candidates)), min(2, len(candidates)))
    return min(drawn, key=lambda index: load_key(candidates[index].view)[0])
