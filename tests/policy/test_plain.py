"""Policies that know nothing of prompts."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import ReplicaView
from baton.domain.handoff import LegKind
from baton.domain.value import evolve
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery
from baton.policy.placement.simple import POLICIES, RoundRobin, choose_least_loaded
from tests.policy.candidates import GROUPED, busier, candidate, choose, kinds, prompts, several


def test_round_robin_gives_everyone_a_turn_for_each_kind_of_leg() -> None:
    chooser, all_three = RoundRobin(), [candidate(replica_id) for replica_id in "abc"]
    assert [choose(chooser, *all_three) for _ in range(5)] == list("abcab")
    assert choose(chooser, *all_three, kind=LegKind.PREFILL) == "a"
    without_c = all_three[:2]
    assert choose(chooser, *without_c) == "a"
    assert [choose(chooser, *all_three) for _ in range(3)] == list("bca")


def test_least_loaded_counts_requests_then_tokens_then_ids() -> None:
    one, two = candidate("a", running=2), candidate("b", legs=1, queued=1)
    assert choose(choose_least_loaded, one, two) == "b"
    tokens = candidate("a", running=1, queued_tokens=5), candidate("b", running=1)
    assert choose(choose_least_loaded, *tokens) == "b"
    assert choose(choose_least_loaded, candidate("b"), candidate("a")) == "a"


def test_random_gives_each_the_same_chance() -> None:
    chooser, views = POLICIES["random"](), [candidate("a", legs=99), candidate("b")]
    chosen = Counter(choose(chooser, *views, seed=seed) for seed in range(300))
    assert 110 < chosen["a"] < 190


@given(several, st.sampled_from(sorted(POLICIES)), kinds, prompts, st.integers(0, 9))
def test_every_policy_answers_with_an_index_and_the_same_one_for_the_same_seed(
    found: list[Candidate], name: str, kind: LegKind, query: PlacementQuery, seed: int
) -> None:
    first, again = (POLICIES[name]()(query, kind, found, Random(seed)) for _ in range(2))
    assert first == again
    assert first in range(len(found))


@given(several, kinds, st.integers(0, 9))
def test_load_on_the_others_never_drives_a_request_away(
    found: list[Candidate], kind: LegKind, seed: int
) -> None:
    index = choose_least_loaded(GROUPED, kind, found, Random(seed))
    others = [other if place == index else busier(other) for place, other in enumerate(found)]
    assert choose_least_loaded(GROUPED, kind, others, Random(seed)) == index


@pytest.mark.parametrize("name", POLICIES)
def test_the_views_that_candidates_are_made_of_are_not_changed(name: str) -> None:
    one = candidate("a", running=1)
    before: ReplicaView = evolve(one.view)
    choose(POLICIES[name](), one)
    assert one.view == before
