"""Numbers for one scrape: labelled as declared, finite, and in a bounded number of series."""

from __future__ import annotations

import math

import pytest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from baton.telemetry.catalogue import (
    CIRCUIT_BREAKERS,
    LINK_SETUP,
    OTHER,
    RESUMES,
    SLACK,
    SLO_REQUESTS,
    STEP_ERROR,
    TTFT,
)
from baton.telemetry.families import Families


def told(families: Families) -> dict[tuple[str, ...], float]:
    [family] = families.collect()
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_counters_and_gauges_are_called_as_the_catalogue_calls_them() -> None:
    families = Families()
    families.add(RESUMES, 2)
    families.add(STEP_ERROR, 3, "decode")
    counter, gauge = families.collect()
    assert isinstance(counter, CounterMetricFamily)
    assert isinstance(gauge, GaugeMetricFamily)
    assert [sample.name for sample in counter.samples] == [RESUMES.name]
    assert [(sample.name, sample.labels) for sample in gauge.samples] == [
        (STEP_ERROR.name, {"pool": "decode"})
    ]
    assert (counter.documentation, gauge.documentation) == (RESUMES.help, STEP_ERROR.help)


def test_a_renamed_metric_is_exported_by_both_names() -> None:
    families = Families()
    families.add(CIRCUIT_BREAKERS, 2, "decode", "open")
    current, deprecated = families.collect()
    assert (current.name, deprecated.name) == ("baton_circuit_breakers", "baton_circuits")
    assert deprecated.documentation == "Deprecated, use baton_circuit_breakers."
    assert [sample[1:3] for sample in deprecated.samples] == [
        sample[1:3] for sample in current.samples
    ]


def test_what_is_added_under_the_same_labels_is_one_series() -> None:
    families = Families()
    families.add(STEP_ERROR, 1, "a")
    families.add(STEP_ERROR, 2, "b")
    families.add(STEP_ERROR, 3, "a")
    assert told(families) == {("a",): 4, ("b",): 2}


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_left_out(value: float | None) -> None:
    families = Families()
    families.add(SLACK, value)
    assert list(families.collect()) == []


def test_nought_is_a_number() -> None:
    families = Families()
    families.add(SLACK, 0.0)
    assert told(families) == {(): 0.0}


@pytest.mark.parametrize("labels", [(), ("a", "b")])
def test_labels_that_were_not_declared_are_an_error(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected pool"):
        Families().add(STEP_ERROR, 1, *labels)


def test_a_histogram_is_not_added_to() -> None:
    families = Families()
    families.add(TTFT, 1.0, "default", "tiny", "decode", "0a1b2c3d")
    with pytest.raises(ValueError, match="histogram observes"):
        list(families.collect())


def test_ten_thousand_tenants_are_no_more_series_than_there_is_room_for() -> None:
    families = Families(max_values=20)
    for number in range(10_000):
        families.add(SLO_REQUESTS, 1, "chat", f"tenant-{number}", "m", "p")
    series = told(families)
    assert len(series) == 21
    assert series["chat", OTHER, "m", "p"] == 10_000 - 20
    assert series["chat", "tenant-19", "m", "p"] == 1


def test_a_label_without_room_leaves_the_others_as_they_are() -> None:
    families = Families(max_values=2)
    for tenant in "abcd":
        for slo_class in ("chat", "batch"):
            families.add(SLO_REQUESTS, 1, slo_class, tenant, "m", "p")
    series = told(families)
    assert series["chat", OTHER, "m", "p"] == series["batch", OTHER, "m", "p"] == 2
    by_class = dict.fromkeys(("chat", "batch"), 0.0)
    for (slo_class, *_), value in series.items():
        by_class[slo_class] += value
    assert by_class == {"chat": 4, "batch": 4}


def test_each_metric_has_room_of_its_own() -> None:
    families = Families(max_values=1)
    families.add(STEP_ERROR, 1, "a")
    families.add(LINK_SETUP, 1, "b", "c")
    assert [len(family.samples) for family in families.collect()] == [1, 1]
    assert [tuple(f.samples[0].labels.values()) for f in families.collect()] == [("a",), ("b", "c")]
