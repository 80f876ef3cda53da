"""Which cluster a request goes to."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.policy.federation import ClusterView, Why, choose, home_of

FAMILIES = [f"family-{number}" for number in range(2000)]
CLUSTERS = [ClusterView(name=name, replicas=100) for name in ("ams", "bos", "cpt", "del")]
views = st.builds(
    ClusterView,
    name=st.just(""),
    replicas=st.integers(1, 500),
    away_s=st.floats(0, 1),
    wait_s=st.floats(0, 10),
    silent=st.booleans(),
)
fleets = st.lists(views, min_size=1, max_size=6).map(
    lambda found: [replace(one, name=f"c{number}") for number, one in enumerate(found)]
)


def test_larger_clusters_are_home_to_more_families() -> None:
    large = [replace(CLUSTERS[0], replicas=300), *CLUSTERS[1:]]
    homes = Counter(home_of(family, large).name for family in FAMILIES)
    assert homes["ams"] / len(FAMILIES) == pytest.approx(0.5, abs=0.05)
    assert all(
        homes[one.name] / len(FAMILIES) == pytest.approx(1 / 6, abs=0.04) for one in large[1:]
    )


def test_only_the_families_of_a_cluster_that_goes_move() -> None:
    for family in FAMILIES:
        before = home_of(family, CLUSTERS)
        after = home_of(family, CLUSTERS[:-1])
        assert after is before or before is CLUSTERS[-1]


@given(family=st.text(max_size=8), fleet=fleets, seed=st.randoms(), prefix_s=st.floats(0, 5))
def test_the_order_of_clusters_does_not_matter(
    family: str, fleet: list[ClusterView], seed: random.Random, prefix_s: float
) -> None:
    shuffled = list(fleet)
    seed.shuffle(shuffled)
    assert choose(family, fleet, prefix_s=prefix_s) == choose(family, shuffled, prefix_s=prefix_s)


@given(family=st.text(max_size=8), fleet=fleets, prefix_s=st.floats(0, 5))
def test_a_silent_cluster_is_chosen_only_when_all_are(
    family: str, fleet: list[ClusterView], prefix_s: float
) -> None:
    chosen = choose(family, fleet, prefix_s=prefix_s)
    (view,) = [one for one in fleet if one.name == chosen.cluster]
    assert not view.silent or all(one.silent for one in fleet)


def test_a_family_leaves_home_when_the_wait_there_exceeds_what_its_cache_is_worth() -> None:
    home = home_of("f", CLUSTERS)
    for wait_s, why in (0.0, Why.HOME), (0.9, Why.HOME), (1.1, Why.SPILLED):
        now = [replace(one, wait_s=wait_s) if one is home else one for one in CLUSTERS]
        chosen = choose("f", now, prefix_s=1.0)
        assert (chosen.why, chosen.home) == (why, home.name)
        assert (chosen.cluster == home.name) == (why is Why.HOME)


def test_what_is_far_away_must_be_worth_the_way() -> None:
    home = home_of("f", CLUSTERS)
    far = [replace(one, away_s=0.2) if one is home else one for one in CLUSTERS]
    assert choose("f", far, prefix_s=0.3).why is Why.HOME
    assert choose("f", far, prefix_s=0.1).why is Why.SPILLED


def test_families_of_a_silent_home_meet_in_one_other_cluster_again() -> None:
    home = home_of("f", CLUSTERS)
    others = [one for one in CLUSTERS if one is not home]
    now = [replace(one, silent=True) if one is home else one for one in CLUSTERS]
    chosen = choose("f", now, prefix_s=1.0)
    assert chosen == (home_of("f", others).name, Why.FAILED_OVER, home.name)


def test_each_region_has_a_home_of_its_own_and_the_next_far_away_when_that_is_silent() -> None:
    here = [replace(one, away_s=0.0 if one.name in {"ams", "bos"} else 0.1) for one in CLUSTERS]
    homes = {choose(family, here, prefix_s=1.0, near_s=0.01).cluster for family in FAMILIES}
    assert homes == {"ams", "bos"}
    gone = [replace(one, silent=one.away_s == 0.0) for one in here]
    homes = {choose(family, gone, prefix_s=1.0, near_s=0.01).cluster for family in FAMILIES}
    assert homes == {"cpt", "del"}
