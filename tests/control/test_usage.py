"""What was since the beginning: classes, tenants, device-seconds and money."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.accounting.cluster_totals import ClusterTotals, PoolCapacity
from baton.control.accounting.usage import IDLE, OVERHEAD, usage_rows
from baton.domain.demand import CoordinatorReport, GpuUsage, Tally
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.observation import PoolObservation

LATER_S = 1000.0
"""Long after the ledgers were begun."""


def tally(tenant: str = "acme", name: str = "chat", **figures: int) -> Tally:
    return Tally(name, tenant, "tiny", "decode")._replace(**figures)  # type: ignore[arg-type]


def report(
    name: str, at_s: float, *rows: Tally, spent: tuple[GpuUsage, ...] = ()
) -> CoordinatorReport:
    return CoordinatorReport(coordinator_id=name, at_s=at_s, tallies=rows, gpu_usage=spent)


def begun() -> ClusterTotals:
    ledgers = ClusterTotals()
    ledgers.ingest(report("first", 0.0), 0.0)
    return ledgers


# ------------------------------------------------------------------------------ totals


def test_counts_that_go_back_alone_say_that_it_is_another_life() -> None:
    ledgers = begun()
    ledgers.ingest(report("a", 5.0, tally(evaluated=7)), LATER_S)
    ledgers.ingest(report("a", 9.0, tally(evaluated=2)), LATER_S + 1)
    assert [row.evaluated for row in ledgers.tallies()] == [9]


def test_coordinators_older_than_the_totals_count_from_their_first_report() -> None:
    ledgers = ClusterTotals()
    old = report("a", 500.0, tally(evaluated=100), spent=(GpuUsage("acme", "d", 50.0),))
    ledgers.ingest(old, 0.0)
    later = report("a", 600.0, tally(evaluated=104), spent=(GpuUsage("acme", "d", 51.0),))
    ledgers.ingest(later, LATER_S)
    assert [row.evaluated for row in ledgers.tallies()] == [4]
    assert ledgers.gpu_usage() == (GpuUsage("acme", "d", 1.0),)
    ledgers.ingest(report("a", 1.0, tally(evaluated=1)), LATER_S + 1)
    assert [row.evaluated for row in ledgers.tallies()] == [5]


def test_many_coordinators_that_came_and_went_are_all_counted() -> None:
    ledgers = begun()
    for number in range(600):
        ledgers.ingest(report(f"c{number}", 1.0, tally(evaluated=1)), LATER_S + number)
    assert [row.evaluated for row in ledgers.tallies()] == [600]


# ------------------------------------------------------------------------------ classes


def test_a_class_is_evaluated_over_the_window_of_its_own_target() -> None:
    ledgers = begun()
    ledgers.set_max_window(10 * 3600.0)
    judged = good = 0
    for hour in range(1, 9):
        judged, good = judged + 10, good + (10 if hour > 4 else 0)
        row = tally(evaluated=judged, good=good)
        ledgers.ingest(report("a", hour * 3600.0, row), hour * 3600.0 + 1800)
    now_s = 8 * 3600.0 + 1800
    assert (
        ledgers.counts_in_window(Slo(name="chat", window_s=10 * 3600.0), now_s).attainment
        == 40 / 70
    )
    assert ledgers.counts_in_window(Slo(name="chat", window_s=3 * 3600.0), now_s).attainment == 1.0
    assert ledgers.counts_in_window(Slo(name="none"), now_s).attainment is None


def test_hours_that_no_target_looks_at_are_forgotten() -> None:
    ledgers = begun()
    ledgers.set_max_window(2 * 3600.0)
    for hour in range(1, 100):
        ledgers.ingest(report("a", hour * 3600.0, tally(evaluated=hour)), hour * 3600.0)
    assert ledgers.counts_in_window(Slo(name="chat", window_s=1e9), 99 * 3600.0).evaluated <= 4


# ------------------------------------------------------------------------------ device-seconds


def pool(name: str = "decode", **changes: object) -> PoolObservation:
    made = PoolObservation(name=name, role=Role.DECODE, decode=2, gpus_per_replica=4.0)
    return replace(made, **changes)  # type: ignore[arg-type]  # tests name them right


def test_replicas_cost_from_being_asked_for_to_being_gone() -> None:
    ledgers = ClusterTotals()
    ledgers.record_capacity([pool()], {}, 10.0)
    ledgers.record_capacity([pool(starting=1, draining=2)], {"decode": 7.0}, 20.0)
    assert ledgers.pools()["decode"] == PoolCapacity(device_s=5 * 4 * 10.0, busy_s=4 * 7.0)


# ------------------------------------------------------------------------------ usage

POOLS = {
    "prefill": PoolCapacity(device_s=100.0, busy_s=50.0),
    "decode": PoolCapacity(device_s=300.0, busy_s=200.0),
}
PRICES = {"prefill": 3.6, "decode": 7.2}


def test_usage_rows_add_up_to_the_cost_of_replicas() -> None:
    spent = (
        GpuUsage("acme", "prefill", 20.0),
        GpuUsage("acme", "decode", 40.0),
        GpuUsage("z", "decode", 60.0),
    )
    rows = {row.tenant: row for row in usage_rows((), spent, POOLS, PRICES)}
    assert rows["acme"].device_s == pytest.approx(60.0)
    assert rows["acme"].cost == pytest.approx(20.0 * 0.001 + 40.0 * 0.002)
    assert rows[OVERHEAD].device_s == pytest.approx(30.0 + 100.0)
    assert rows[IDLE].device_s == pytest.approx(50.0 + 100.0)
    assert sum(row.device_s for row in rows.values()) == pytest.approx(400.0)
    costs = [row.cost for row in rows.values() if row.cost is not None]
    assert sum(costs) == pytest.approx(100 * 0.001 + 300 * 0.002)


def test_no_tenant_is_charged_for_more_than_replicas_have_computed() -> None:
    spent = (GpuUsage("acme", "decode", 300.0), GpuUsage("zeta", "decode", 100.0))
    rows = {row.tenant: row.device_s for row in usage_rows((), spent, POOLS, {})}
    assert [rows["acme"], rows["zeta"]] == pytest.approx([150.0, 50.0])
    assert rows[OVERHEAD] == pytest.approx(50.0), "all of it the prefill pool's"


def test_without_prices_there_is_no_money() -> None:
    assert {row.cost for row in usage_rows((), (), POOLS, {})} == {None}


def test_a_tenant_that_was_only_refused_is_told_too() -> None:
    refused = tally("poor", evaluated=2, shed=2)._replace(client_errors=3)
    (row,) = [row for row in usage_rows((refused,), (), POOLS, {}) if row.tenant == "poor"]
    assert (row.requests, row.good, row.device_s) == (5, 0, 0.0)


SPENT = st.builds(
    GpuUsage,
    tenant=st.sampled_from(["a", "b", "c"]),
    pool=st.sampled_from(["prefill", "decode", "gone"]),
    gpu_s=st.floats(0.0, 1e4),
)
HELD = st.floats(0.0, 1e4).flatmap(
    lambda device_s: st.builds(
        PoolCapacity, device_s=st.just(device_s), busy_s=st.floats(0.0, device_s * 1.5 + 1)
    )
)


@given(st.lists(SPENT, max_size=8, unique_by=lambda s: s[:2]), HELD, HELD)
def test_rows_of_use_add_up_and_are_not_negative(
    spent: list[GpuUsage], prefill: PoolCapacity, decode: PoolCapacity
) -> None:
    pools = {"prefill": prefill, "decode": decode}
    rows = usage_rows((), spent, pools, PRICES)
    assert min(row.device_s for row in rows) >= 0.0
    held_s = prefill.device_s + decode.device_s
    assert sum(row.device_s for row in rows) == pytest.approx(held_s, abs=1e-6)
    cost = (prefill.device_s * 3.6 + decode.device_s * 7.2) / 3600
    assert sum(row.cost or 0.0 for row in rows) == pytest.approx(cost, abs=1e-6)


ACTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), max_size=40)


@given(ACTS)
def test_totals_are_those_of_a_twin_that_adds_up_every_single_request(
    acts: list[tuple[str, int, bool]],
) -> None:
    """Coordinators serve some requests and report, or begin again before they do."""
    ledgers, wanted = begun(), 0
    totals: defaultdict[str, int] = defaultdict(int)
    clocks: defaultdict[str, float] = defaultdict(lambda: 100.0)
    for number, (name, served, began_again) in enumerate(acts):
        if began_again:
            totals[name], clocks[name] = 0, clocks[name] - 1000.0
        totals[name] += served
        clocks[name] += 1.0
        wanted += served
        ledgers.ingest(report(name, clocks[name], tally(evaluated=totals[name])), LATER_S + number)
    assert sum(row.evaluated for row in ledgers.tallies()) == wanted
