"""Several coordinators with the same old views must not all choose the same replica.

Measured by what each replica is assigned of one burst, and in each tenth of a second of a steady
load.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial

import pytest

from baton.domain.commands import RequestRecord
from baton.domain.fleet import Role
from baton.domain.request import Request
from baton.domain.value import evolve
from baton.engine.sim import SimSettings
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from baton.simulator.fleet.replica import ReportingOptions
from benchmarks._arrivals import open_loop, poisson_times
from tests.simulator.fleets import JOINED_S, coordinator, fleet, requests

REPLICAS = 8
BURST = 40
ENGINE = SimSettings(max_len_tokens=4096, kv_blocks=8192)
STALE = ReportingOptions(report_interval_s=0.05, load_delay_s=0.05)
"""A snapshot is 50 ms old when it arrives, and up to 100 ms when the next one comes."""
FRESH = ReportingOptions(report_interval_s=0.001, load_delay_s=0.0)


def with_coordinators(
    count: int, reporting: ReportingOptions, seed: int, replicas: int
) -> VirtualFleet:
    return fleet(
        replicas={Role.MIXED: replicas},
        engine=ENGINE,
        options=FleetOptions(seed=seed, reporting=reporting),
        coordinators=[coordinator(100 * seed + number) for number in range(count)],
    )


def send_burst(made: VirtualFleet, burst: Iterable[Request]) -> None:
    """Half a millisecond apart, to one coordinator after the other."""
    begun_at_s = made.timeline.now_s
    for number, request in enumerate(burst):
        at_s = begun_at_s + number * 0.0005
        sent = evolve(request, arrived_at_s=at_s)
        made.timeline.call_at(at_s, partial(made.send, sent, number % len(made.ingresses)))


def assigned(records: Iterable[RequestRecord], sent: Iterable[Request]) -> Counter[str]:
    ids = {request.request_id for request in sent}
    return Counter(
        record.routes[0].decode_replica_id for record in records if record.request_id in ids
    )


@pytest.mark.parametrize("seed", range(2))
def test_of_a_burst_no_replica_gets_much_more_than_its_share(seed: int) -> None:
    made = with_coordinators(4, STALE, seed, REPLICAS)
    burst = requests(BURST, prompt_tokens=1000, max_tokens=50, seed=seed)
    send_burst(made, burst)
    made.run(until_ended=BURST, until_s=60.0)
    got = assigned(made.records, burst)
    assert len(got) == REPLICAS
    assert max(got.values()) <= 7  # 5 on average


@pytest.mark.parametrize("seed", range(2))
def test_a_replica_that_has_just_joined_is_not_run_over(seed: int) -> None:
    made = with_coordinators(4, STALE, seed, REPLICAS - 1)
    before = requests(BURST, prompt_tokens=1000, max_tokens=120, seed=seed)
    send_burst(made, before)
    made.run(until_s=JOINED_S + 0.3)
    made.add_replica("new", ENGINE, role=Role.MIXED, pool="mixed")
    made.run(until_s=JOINED_S + 0.5)
    burst = [
        evolve(request, request_id=f"b-{request.request_id}") for request in requests(BURST, seed=9)
    ]
    send_burst(made, burst)
    made.run(until_ended=2 * BURST, until_s=60.0)
    # With all 80 spread evenly it would have 10; each coordinator alone would give it no more.
    assert 5 <= assigned(made.records, burst)["new"] <= 16


def worst_windows(made: VirtualFleet, seed: int) -> float:
    """Under a steady load, the mean over all 100 ms of the most that any replica was assigned.

    As a multiple of what it would be with the same tokens spread evenly.
    """
    rng = random.Random(seed)
    sent = [
        evolve(request, prompt_token_ids=request.prompt_token_ids[: rng.randint(100, 1000)])
        for request in requests(600, prompt_tokens=1000, max_tokens=30, seed=seed)
    ]
    times_s = poisson_times(200.0, len(sent), rng, start_s=JOINED_S)
    count = len(made.ingresses)
    open_loop(made, sent, times_s, lambda request: int(request.request_id[1:]) % count)
    made.run(until_ended=len(sent), until_s=60.0)
    windows: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for record in made.records:
        window = windows[int(record.arrived_at_s / 0.1)]
        window[record.routes[0].decode_replica_id] += record.prompt_tokens
    ratios = [max(w.values()) / (sum(w.values()) / REPLICAS) for w in windows.values()]
    return sum(ratios) / len(ratios)


def test_four_coordinators_with_old_views_spread_work_like_one_with_fresh_views() -> None:
    fresh = worst_windows(with_coordinators(1, FRESH, 1, REPLICAS), 1)
    stale = worst_windows(with_coordinators(4, STALE, 1, REPLICAS), 1)
    assert stale <= 1.5 * fresh
