from __future__ import annotations

import pytest

from baton.domain.fleet import FleetView, Load, ReplicaView
from baton.policy.placement.port import PlacementQuery
from baton.policy.placement.predicted import Shortlist
from tests.fakes.timings import replica_view

MANY = 40


def chosen(first: ReplicaView, second: ReplicaView, *, seed: int) -> set[str]:
    """Who is looked at where the halves of a pool are like these two, so that pairs are of both."""
    views = [first] * (MANY // 2) + [second] * (MANY // 2)
    ids = [f"d{number:02}" for number in range(MANY)]
    replicas = {
        name: replica_view(name, load=view.load, unreported_legs=view.unreported_legs)
        for name, view in zip(ids, views, strict=True)
    }
    shortlist = Shortlist(MANY // 4, seed=seed)
    fleet = FleetView(at_s=0.0, replicas=replicas)
    return set(shortlist.select(PlacementQuery(prompt_tokens=1), fleet, ids))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "busier",
    [
        replica_view("x", load=Load(queued_tokens=10)),
        replica_view("x", load=Load(running_requests=3)),
        replica_view("x", unreported_legs=1),
    ],
)
def test_the_idler_one_of_each_pair_is_looked_at(busier: ReplicaView, seed: int) -> None:
    idle = replica_view("x", load=Load(queued_tokens=0))
    lower, upper = chosen(idle, busier, seed=seed), chosen(busier, idle, seed=seed)
    assert len(lower) == len(upper) == MANY // 4
    assert max(lower) < f"d{MANY // 2:02}" <= min(upper)


def test_tokens_to_compute_weigh_more_than_streams() -> None:
    streams = replica_view("x", load=Load(running_requests=9))
    prompt = replica_view("x", load=Load(queued_tokens=1))
    assert max(chosen(streams, prompt, seed=1)) < f"d{MANY // 2:02}"
