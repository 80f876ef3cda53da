"""Which cluster a request goes to."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.policy.federation import ChoiceReason, ClusterView, choose_cluster, home_cluster

FAMILIES = [f"family-{number}" for number in range(2000)]
CLUSTERS = [ClusterView(name=name, replicas=100) for name in ("ams", "bos", "cpt", "del")]
views = st.builds(
    ClusterView,
    name=st.just(""),
    replicas=st.integers(1, 500),
    round_trip_s=st.floats(0, 1),
    queue_wait_s=st.floats(0, 10),
    is_unresponsive=st.booleans(),
)
fleets = st.lists(views, min_size=1, max_size=6).map(
    lambda found: [replace(cluster, name=f"c{number}") for number, cluster in enumerate(found)]
)


def test_larger_clusters_are_home_to_more_families() -> None:
    large = [replace(CLUSTERS[0], replicas=300), *CLUSTERS[1:]]
    homes = Counter(home_cluster(family, large).name for family in FAMILIES)
    assert homes["ams"] / len(FAMILIES) == pytest.approx(0.5, abs=0.05)
    assert all(
        homes[cluster.name] / len(FAMILIES) == pytest.approx(1 / 6, abs=0.04)
        for cluster in large[1:]
    )


def test_only_the_families_of_a_cluster_that_goes_move() -> None:
    for family in FAMILIES:
        before = home_cluster(family, CLUSTERS)
        after = home_cluster(family, CLUSTERS[:-1])
        assert after is before or before is CLUSTERS[-1]


@given(family=st.text(max_size=8), fleet=fleets, seed=st.randoms(), prefix_s=st.floats(0, 5))
def test_the_order_of_clusters_does_not_matter(
    family: str, fleet: list[ClusterView], seed: random.Random, prefix_s: float
) -> None:
    shuffled = list(fleet)
    seed.shuffle(shuffled)
    assert choose_cluster(family, fleet, prefix_prefill_s=prefix_s) == choose_cluster(
        family, shuffled, prefix_prefill_s=prefix_s
    )


@given(family=st.text(max_size=8), fleet=fleets, prefix_s=st.floats(0, 5))
def test_an_unresponsive_cluster_is_chosen_only_when_all_are(
    family: str, fleet: list[ClusterView], prefix_s: float
) -> None:
    chosen = choose_cluster(family, fleet, prefix_prefill_s=prefix_s)
    (view,) = [cluster for cluster in fleet if cluster.name == chosen.cluster]
    assert not view.is_unresponsive or all(cluster.is_unresponsive for cluster in fleet)


def test_a_family_leaves_home_when_the_wait_there_exceeds_what_its_cache_is_worth() -> None:
    home = home_cluster("f", CLUSTERS)
    for wait_s, reason in (
        (0.0, ChoiceReason.HOME),
        (0.9, ChoiceReason.HOME),
        (1.1, ChoiceReason.OVERFLOWED),
    ):
        now = [
            replace(cluster, queue_wait_s=wait_s) if cluster is home else cluster
            for cluster in CLUSTERS
        ]
        chosen = choose_cluster("f", now, prefix_prefill_s=1.0)
        assert (chosen.reason, chosen.home) == (reason, home.name)
        assert (chosen.cluster == home.name) == (reason is ChoiceReason.HOME)


def test_a_distant_cluster_must_be_worth_its_round_trip() -> None:
    home = home_cluster("f", CLUSTERS)
    far = [
        replace(cluster, round_trip_s=0.2) if cluster is home else cluster for cluster in CLUSTERS
    ]
    assert choose_cluster("f", far, prefix_prefill_s=0.3).reason is ChoiceReason.HOME
    assert choose_cluster("f", far, prefix_prefill_s=0.1).reason is ChoiceReason.OVERFLOWED


def test_families_of_an_unresponsive_home_meet_in_one_other_cluster() -> None:
    home = home_cluster("f", CLUSTERS)
    others = [cluster for cluster in CLUSTERS if cluster is not home]
    now = [
        replace(cluster, is_unresponsive=True) if cluster is home else cluster
        for cluster in CLUSTERS
    ]
    chosen = choose_cluster("f", now, prefix_prefill_s=1.0)
    assert chosen == (home_cluster("f", others).name, ChoiceReason.FAILED_OVER, home.name)


def test_each_region_has_its_home_and_the_next_one_when_that_is_unresponsive() -> None:
    here = [
        replace(cluster, round_trip_s=0.0 if cluster.name in {"ams", "bos"} else 0.1)
        for cluster in CLUSTERS
    ]
    homes = {
        choose_cluster(family, here, prefix_prefill_s=1.0, max_home_round_trip_s=0.01).cluster
        for family in FAMILIES
    }
    assert homes == {"ams", "bos"}
    gone = [replace(cluster, is_unresponsive=cluster.round_trip_s == 0.0) for cluster in here]
    homes = {
        choose_cluster(family, gone, prefix_prefill_s=1.0, max_home_round_trip_s=0.01).cluster
        for family in FAMILIES
    }
    assert homes == {"cpt", "del"}
