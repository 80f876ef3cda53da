"""Device time and money as counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.accounting.cluster_totals import PoolCapacity
from baton.control.accounting.usage import IDLE, OVERHEAD
from baton.domain.demand import GpuUsage
from baton.telemetry.catalogue import COST, GPU_SECONDS, MAX_LABEL_VALUES, PAID_GPU_SECONDS, Metric
from baton.telemetry.families import Families
from baton.telemetry.metrics.usage_meter import UsageMeter

HOUR_S = 3600.0
Told = dict[tuple[str, ...], float]


def told(meter: UsageMeter, metric: Metric) -> Told:
    found = Families()
    meter.add_to(found)
    for family in found.collect():
        if f"{family.name}_total" == metric.name:
            return {tuple(sample.labels.values()): sample.value for sample in family.samples}
    return {}


def spent(**device_s: float) -> list[GpuUsage]:
    return [GpuUsage(tenant, "decode", used_s) for tenant, used_s in device_s.items()]


def held(device_s: float, busy_s: float) -> dict[str, PoolCapacity]:
    return {"decode": PoolCapacity(device_s=device_s, busy_s=busy_s)}


def test_tenants_overhead_and_idle_time_cost_together_what_was_paid() -> None:
    meter = UsageMeter()
    meter.ingest(spent(acme=1800.0, umbrella=900.0), held(2 * HOUR_S, HOUR_S), {"decode": 4.0})
    assert told(meter, GPU_SECONDS) == {("acme", "decode"): 1800.0, ("umbrella", "decode"): 900.0}
    assert told(meter, PAID_GPU_SECONDS) == {("decode",): 2 * HOUR_S}
    costs = {"acme": 2.0, "umbrella": 1.0, OVERHEAD: 1.0, IDLE: 4.0}
    assert told(meter, COST) == {(who,): pytest.approx(cost) for who, cost in costs.items()}


def test_time_costs_what_it_cost_when_it_was_used() -> None:
    meter = UsageMeter()
    meter.ingest(spent(acme=HOUR_S), held(HOUR_S, HOUR_S), {"decode": 4.0})
    meter.ingest(spent(acme=HOUR_S), held(HOUR_S, HOUR_S), {"decode": 1.0})
    assert told(meter, COST)["acme",] == pytest.approx(4.0)
    meter.ingest(spent(acme=2 * HOUR_S), held(2 * HOUR_S, 2 * HOUR_S), {"decode": 1.0})
    assert told(meter, COST)["acme",] == pytest.approx(5.0)


def test_pools_without_a_price_cost_nothing_and_are_used_all_the_same() -> None:
    meter = UsageMeter()
    meter.ingest(spent(acme=60.0), held(60.0, 60.0), {})
    assert told(meter, COST) == {}
    assert told(meter, GPU_SECONDS) == {("acme", "decode"): 60.0}


def test_overhead_that_becomes_a_tenants_time_decreases_nothing() -> None:
    meter = UsageMeter()
    meter.ingest([], held(100.0, 100.0), {"decode": HOUR_S})
    meter.ingest(spent(acme=80.0), held(100.0, 100.0), {"decode": HOUR_S})
    assert told(meter, COST) == {
        ("acme",): pytest.approx(80.0),
        (OVERHEAD,): pytest.approx(100.0),
        (IDLE,): 0.0,
    }


_FIGURES = st.floats(0, 1e6)


@given(st.lists(st.tuples(_FIGURES, _FIGURES, _FIGURES, _FIGURES, st.floats(0, 10)), max_size=8))
def test_counters_never_decrease_for_any_estimate(
    looks: list[tuple[float, float, float, float, float]],
) -> None:
    meter, before = UsageMeter(), dict[str, Told]()
    for acme_s, umbrella_s, device_s, busy_s, price in looks:
        meter.ingest(
            spent(acme=acme_s, umbrella=umbrella_s), held(device_s, busy_s), {"decode": price}
        )
        now = {metric.name: told(meter, metric) for metric in (GPU_SECONDS, PAID_GPU_SECONDS, COST)}
        for name, series in before.items():
            assert all(now[name][labels] >= value for labels, value in series.items())
        before = now


def test_tenants_keep_their_names_when_more_come_than_there_is_room_for() -> None:
    meter = UsageMeter()
    late = {f"z{n:04}": 1.0 for n in range(MAX_LABEL_VALUES)}
    meter.ingest(spent(**late), held(HOUR_S, HOUR_S), {})
    first = told(meter, GPU_SECONDS)
    meter.ingest(spent(**late, **{f"a{n:04}": 5.0 for n in range(99)}), held(HOUR_S, HOUR_S), {})
    now = told(meter, GPU_SECONDS)
    assert first.items() <= now.items()
    assert now["other", "decode"] == pytest.approx(5.0 * 99)


def test_idle_time_is_separate_however_many_tenants_there_are() -> None:
    meter = UsageMeter()
    many = {f"t{n:04}": 1.0 for n in range(2 * MAX_LABEL_VALUES)}
    meter.ingest(spent(**many), held(HOUR_S, HOUR_S / 2), {"decode": HOUR_S})
    costs = told(meter, COST)
    assert costs[IDLE,] == pytest.approx(HOUR_S / 2)
    assert costs[OVERHEAD,] == pytest.approx(HOUR_S / 2 - 2 * MAX_LABEL_VALUES)
    assert sum(costs.values()) == pytest.approx(HOUR_S)
