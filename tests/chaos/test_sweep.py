"""Long loads: what is added to a first token, and what is removed from an ingress' records."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from baton.domain.commands import RequestRecord
from baton.domain.handoff import LegTimes
from baton.domain.value import evolve
from tests.chaos.growth import ResourceGrowth, slope
from tests.chaos.history import Ending, Exchange
from tests.chaos.load import Load
from tests.chaos.local_ingress import Ingress
from tests.chaos.sweep import RunningTotals, overhead_s, run_steady_load
from tests.fakes.records import leg_record, request_record

RECORD = request_record()
LEG = leg_record(engine_times=LegTimes(0.1, 0.05))


def test_added_is_what_engines_do_not_say_that_they_took() -> None:
    decode = evolve(LEG, started_at_s=10.3, engine_times=LegTimes(0.2, 0.1))
    record = evolve(RECORD, legs=(LEG, decode))
    assert overhead_s(record) == pytest.approx(0.5 - 0.15 - 0.3)


def test_a_leg_after_the_first_token_takes_nothing_off() -> None:
    later = evolve(LEG, started_at_s=10.7, engine_times=LegTimes(5.0, 5.0))
    assert overhead_s(evolve(RECORD, legs=(LEG, later))) == pytest.approx(0.35)


def test_where_an_engine_does_not_say_nothing_is_known() -> None:
    assert math.isnan(overhead_s(evolve(RECORD, legs=(evolve(LEG, engine_times=None),))))
    assert math.isnan(overhead_s(evolve(RECORD, first_token_at_s=None)))


def ingress_with(*exchanges: Exchange, records: tuple[RequestRecord, ...]) -> Ingress:
    """An ingress' records, and nothing else of it."""
    books = SimpleNamespace(
        exchanges={other.request_id: other for other in exchanges},
        records=list(records),
        _ended_events={other.request_id: None for other in exchanges},
    )
    return cast("Ingress", cast("Any", books))


def exchange(name: str, ending: Ending | None = Ending.FINISHED) -> Exchange:
    made = Exchange(request_id=name, prompt=(1, 2, 3), max_tokens=2, sent_at_s=10.0)
    made.add_tokens((7, 8), 10.5)
    if ending is not None:
        made.end(ending, 11.0)
    return made


def test_ended_processes_are_removed_from_the_list_and_others_stay() -> None:
    books = ingress_with(
        exchange("r"),
        exchange("open", None),
        records=(evolve(RECORD, legs=(LEG,)), evolve(RECORD, request_id="open")),
    )
    sweep = RunningTotals(books)
    sweep.collect()
    assert (list(books.exchanges), [record.request_id for record in books.records]) == (
        ["open"],
    ) * 2
    assert sweep.endings == {"finished": 1}
    bounds, note = sweep.check_invariants(expected_tokens=lambda _: (7, 8), counters={})
    assert [bound.description for bound in bounds if not bound.is_met] == [
        "requests that did not end exactly once"
    ]
    assert note == "open: it has not ended"


def test_a_wrong_token_and_a_counter_that_stays_are_found_at_the_end() -> None:
    books = ingress_with(exchange("r"), records=(evolve(RECORD, legs=(LEG,)),))
    sweep = RunningTotals(books)
    sweep.collect()
    bounds, note = sweep.check_invariants(
        expected_tokens=lambda _: (7, 9), counters={"ingress: leases": 1.0}
    )
    assert sum(not bound.is_met for bound in bounds) == 2
    assert "r: wrong" in note
    assert "ingress: leases is 1" in note


async def test_a_long_load_is_sent_piece_by_piece_with_all_requests_different() -> None:
    asked: list[Exchange] = []

    async def ask(one: Exchange) -> None:
        asked.append(one)

    await run_steady_load(
        Load(rate_per_s=2000.0, requests=0, name="x", prompt_tokens=(4, 4)),
        ask,
        minutes=0.1 / 60,
    )
    assert len(asked) == 200
    assert len({other.request_id for other in asked}) == 200


# -------------------------------------------------------------------- growth


HOUR_S = 3600.0


def sampled(
    growth: ResourceGrowth, *, rises_mb_per_hour: float = 0.0, warms_mb: float = 50.0
) -> ResourceGrowth:
    """An hour, a sample every five seconds, of which the first ten minutes warm up."""
    for at_s in range(0, int(HOUR_S), 5):
        warm_mb = warms_mb * min(1.0, at_s / 600.0)
        growth.add("ingress", at_s, 300.0 + warm_mb + rises_mb_per_hour * at_s / HOUR_S, 40)
    return growth


def test_a_warm_up_is_no_growth() -> None:
    grown = sampled(ResourceGrowth(warm_up_s=600.0)).mb_per_hour()
    assert grown == {"ingress": pytest.approx(0.0, abs=1e-9)}


def test_growth_after_the_warm_up_counts() -> None:
    grown = sampled(ResourceGrowth(warm_up_s=600.0), rises_mb_per_hour=2.5).mb_per_hour()
    assert grown["ingress"] == pytest.approx(2.5)


def test_a_spike_is_no_growth() -> None:
    points = [(at_s, 900.0 if at_s % 100 == 0 else 300.0) for at_s in map(float, range(1000))]
    assert slope(points) == 0.0


def test_steps_that_come_rarely_are_growth() -> None:
    points = [(at_s, 300.0 + math.floor(at_s / 600.0)) for at_s in map(float, range(0, 3600, 5))]
    assert slope(points) * HOUR_S == pytest.approx(6.0, rel=0.2)


def test_two_points_make_a_slope_and_one_does_not() -> None:
    assert slope([(0.0, 1.0), (2.0, 5.0)]) == 2.0
    assert slope([(0.0, 1.0)]) == 0.0


def test_descriptors_are_compared_by_quarters() -> None:
    growth = ResourceGrowth(warm_up_s=100.0)
    for at_s in range(500):
        growth.add("flat", at_s, 1.0, 30 + at_s % 3)
        growth.add("leaks", at_s, 1.0, 30 + at_s // 50)
    assert growth.descriptor_growth() == {"flat": 0.0, "leaks": 6.0}


def test_a_busier_quarter_is_no_leak_and_a_leak_shows_in_a_busy_one() -> None:
    growth = ResourceGrowth(warm_up_s=100.0)
    for at_s in range(500):
        requests = at_s % 7 * (2 if at_s >= 400 else 1)
        growth.add("busier", at_s, 1.0, 30 + requests)
        growth.add("leaks", at_s, 1.0, 30 + requests + at_s // 50)
    assert growth.descriptor_growth() == {"busier": 0.0, "leaks": 6.0}
    assert growth.usual_descriptors()["busier"] == 3.0


def test_a_process_that_came_after_the_warm_up_began_is_followed_from_its_start() -> None:
    growth = ResourceGrowth(warm_up_s=100.0)
    growth.add("short", 10.0, 5.0, 3)
    assert (growth.mb_per_hour(), growth.last_mb("short")) == ({"short": 0.0}, 5.0)


def test_a_process_is_looked_at() -> None:
    growth = ResourceGrowth(warm_up_s=0.0)
    growth.sample({"me": psutil.Process(os.getpid())}, 0.0)
    assert growth.last_mb("me") > 1.0
